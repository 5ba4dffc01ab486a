"""The loss of a language model, fused (ops/cross_entropy.py), where the model computes it itself.

While a converted root runs its training forward, `torch.nn.functional.cross_entropy` is one that
takes what it can to the operator, and the rest to the stock function. Where transformers keeps the
loss in a function of its own, that is given logits whose `.float()` waits (deferred.py): it asks
for FP32 only because PyTorch's losses are as precise as what they are given.

Nothing is left on the model or in torch when the forward ends.
"""

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8patch import regions
from fp8patch.deferred import Deferred
from fp8patch.ops import cross_entropy as ops

# Where there is Triton, and so something to gain.
DEVICES = ("cuda",)
# With fewer classes a row is too short for a program, and the logits are small beside the rest.
FEWEST_CLASSES = 512

_stock: Callable[..., Tensor] = torch.nn.functional.cross_entropy


class _CrossEntropy(torch.autograd.Function):
    """(logits [M, V], labels [M], ignored, reduction) -> FP32 loss, [M] or a scalar."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignored: int, reduction: str) -> Tensor:
        losses, lse, sums = ops.cross_entropy(logits, labels, ignored)
        ctx.ignored, ctx.mean = ignored, reduction == "mean"
        total, count = sums.unbind()
        # As PyTorch has it, no loss at all has the mean nan, and the gradient zero.
        ctx.save_for_backward(logits, labels, lse, count)
        if reduction == "none":
            return losses
        return total / count if ctx.mean else total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> Any:
        logits, labels, lse, count = ctx.saved_tensors
        by_loss = by_loss.float()
        by_row = by_loss / count if ctx.mean else by_loss.contiguous()
        return (
            ops.cross_entropy_backward(logits, labels, lse, by_row, ctx.ignored),
            None,
            None,
            None,
        )


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`, in one read of `input` where it can be."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if plain and reduction in ("mean", "sum", "none") and _takes(input, target):
        logits = input.stored if isinstance(input, Deferred) else input
        loss: Tensor = _CrossEntropy.apply(logits, target, ignore_index, reduction)  # type: ignore[no-untyped-call]
        return loss.to(_dtype_of_loss(input))
    given = input.made() if isinstance(input, Deferred) else input
    return _stock(
        given, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


def _dtype_of_loss(input: Tensor) -> torch.dtype:
    """What PyTorch's has: under autocast FP32."""
    return torch.float32 if torch.is_autocast_enabled(input.device.type) else input.dtype


def _takes(input: Tensor, target: Tensor) -> bool:
    if torch.compiler.is_compiling() or not _in_training():
        return False
    if isinstance(input, Deferred):
        input = input.stored
    if type(input) is not Tensor or type(target) is not Tensor or input.dim() != 2:
        return False
    return (
        worthwhile(input)
        and target.dtype == torch.int64
        and target.device == input.device
        and target.shape == input.shape[:1]
        and target.is_contiguous()
        and input.stride(1) == 1
        and input.numel() > 0
    )


def worthwhile(logits: Tensor) -> bool:
    """Can these logits, of any shape, be what the operator is for?"""
    return (
        logits.device.type in DEVICES
        and logits.dtype in ops.DTYPES
        and logits.requires_grad
        and logits.shape[-1:].numel() >= FEWEST_CLASSES
        and torch.is_grad_enabled()
    )


def _in_training() -> bool:
    region = regions.active()
    return region is not None and region.execution != "observe" and region.training is True


class _LossFunction:
    """A model's own loss function, given logits whose `.float()` waits."""

    def __init__(self, stock: Callable[..., Any]) -> None:
        self._stock = stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _in_training():
            return self._stock(*args, **kwargs)
        if args:
            args = (_deferred(args[0]), *args[1:])
        if "logits" in kwargs:
            kwargs["logits"] = _deferred(kwargs["logits"])
        found = self._stock(*args, **kwargs)
        return found.made() if isinstance(found, Deferred) else found


def _deferred(logits: Any) -> Any:
    narrow = type(logits) is Tensor and logits.dtype in (torch.bfloat16, torch.float16)
    return Deferred.of(logits) if narrow and worthwhile(logits) else logits


@functools.cache
def _loss_function(stock: Callable[..., Any]) -> _LossFunction:
    return _LossFunction(stock)


# Modules of a root with a loss function that transformers chose.
_owners: "weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Any]]]" = (
    weakref.WeakKeyDictionary()
)


def _owners_in(root: nn.Module) -> list[Any]:
    known = _owners.get(root)
    if known is None:
        found = [m for m in root.modules() if isinstance(_declared(m), property)]
        known = _owners[root] = [weakref.ref(module) for module in found]
    return [module for module in (owner() for owner in known) if module is not None]


def _declared(module: nn.Module) -> Any:
    return getattr(type(module), "loss_function", None)


class FusedLosses(AbstractContextManager[None]):
    """Inside, `root` computes its losses fused."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._set: list[nn.Module] = []

    def __enter__(self) -> None:
        torch.nn.functional.cross_entropy = cross_entropy
        for owner in _owners_in(self._root):
            # A user's own is kept there, and is left alone.
            if "_loss_function" not in owner.__dict__:
                owner.__dict__["_loss_function"] = _loss_function(owner.loss_function)
                self._set.append(owner)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if torch.nn.functional.cross_entropy is cross_entropy:
            torch.nn.functional.cross_entropy = _stock
        for owner in self._set:
            if isinstance(owner.__dict__.get("_loss_function"), _LossFunction):
                del owner.__dict__["_loss_function"]
        self._set.clear()
