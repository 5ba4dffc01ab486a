"""`Deferred`: a tensor whose conversion to FP32 was asked for, and waits until somebody needs it.

What only moves elements about is done to the tensor as it is stored, and gives another such tensor.
Anything else gets what it would have got: the converted tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8patch.structures import map_tensors

_FP32 = torch.float32


def _reading(name: str) -> Any:
    """What `__torch_function__` is given where an attribute is read."""
    return getattr(Tensor, name).__get__


# Rounding commutes with these. What they return is read for its place and shape only.
_MOVES: frozenset[Any] = frozenset(
    {
        Tensor.view,
        Tensor.reshape,
        Tensor.flatten,
        Tensor.contiguous,
        Tensor.squeeze,
        Tensor.unsqueeze,
        Tensor.__getitem__,
        torch.flatten,
        torch.reshape,
        torch.squeeze,
        torch.unsqueeze,
    }
)
_ASKS: frozenset[Any] = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.stride,
        Tensor.__len__,
        Tensor.is_contiguous,
        *(_reading(name) for name in ("shape", "device", "ndim", "is_cuda", "requires_grad")),
    }
)
_DTYPE = _reading("dtype")


class Deferred(Tensor):
    """BF16 or FP16 as it is stored; `dtype` is FP32 once that was asked for."""

    _wide: bool
    # Once made it is an ordinary tensor for good: it may have been written to since.
    _kept: Tensor | None

    @staticmethod
    def of(stored: Tensor, wide: bool = False) -> "Deferred":
        with torch._C.DisableTorchFunctionSubclass():
            found = stored.as_subclass(Deferred)
        found._wide, found._kept = wide, None
        return found

    @property
    def stored(self) -> Tensor:
        """As it is stored, an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @property
    def current(self) -> Tensor:
        """As it is stored, unless it has been made: an ordinary tensor with the same values."""
        return self.stored if self._kept is None else self._kept

    def made(self) -> Tensor:
        """As it would have been, an ordinary tensor; the same one each time."""
        if self._kept is None:
            # With a gradient, as it was asked for: who reads it first may want none, of a metric,
            # and who comes next may.
            with torch.inference_mode(False), torch.enable_grad():
                self._kept = self.stored.float() if self._wide else self.stored
        return self._kept

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Deferred) and first._kept is None:
            if func is Tensor.float or (func is Tensor.to and _is_to_fp32(args[1:], kwargs)):
                # (Without gradients it is a tensor that has none, wherever it is read.)
                graded = first._wide or torch.is_grad_enabled()
                return cls.of(first.stored, wide=True) if graded else first.stored.float()
            if func == _DTYPE:
                return _FP32 if first._wide else first.stored.dtype
            if func in _ASKS:
                return func(first.stored, *args[1:], **kwargs)
            given = (*args, *kwargs.values())
            if func in _MOVES and not any(isinstance(each, torch.dtype) for each in given):
                return cls.of(func(first.stored, *args[1:], **kwargs), first._wide)
        return func(*_made(list(args)), **_made(dict(kwargs)))


def _is_to_fp32(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return (tuple(args), dict(kwargs)) in (((_FP32,), {}), ((), {"dtype": _FP32}))


def _made(values: Any) -> Any:
    return map_tensors(values, lambda x: x.made() if isinstance(x, Deferred) else x)
