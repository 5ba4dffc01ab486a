"""What the first training step shows: who runs, who shares an input, what reads a norm.

The first training step of a model is run in the open (eager, every cast scaled by its own amax),
and watched:

- Linears that are handed the *same tensor object* are siblings (q, k and v; gate and up; the
  cross-attention keys and values of every decoder layer). They share one input slot from then on.
- A norm whose output is read by converted modules and matmuls alone may write BF16; one whose
  output is also added to a residual stream (post-LN) has to stay as it is.
- A converted module that is never called is reported: its weights are read behind its back.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fp8patch.compiler import skip_frame

# Reading one of these off a tensor does not consume its values.
_METADATA = frozenset(
    {"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "grad_fn", "is_leaf"}
    | {"_version"}
)
_METADATA_CALLS = frozenset(
    {
        "size",
        "dim",
        "numel",
        "stride",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "__len__",
        "ndimension",
    }
)
_MATMULS = frozenset({"linear", "matmul", "__matmul__", "mm", "bmm", "addmm"})


class Observation:
    """Notes of one bank's first training step. Holds no tensor alive.

    Attributes:
        calls: {path: how often that module was called}.
        frugal: Blocks are compiled, so later steps need less memory: this one keeps only what
            backward can't make again (modules/again.py).
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.frugal = False
        self._readers: dict[int, tuple[weakref.ref[Tensor], list[str]]] = {}
        self._siblings: dict[str, str] = {}
        self._norms: dict[int, tuple[weakref.ref[Tensor], str, int]] = {}
        self._norms_read_otherwise: set[str] = set()
        self._norms_read_by_gemm: set[str] = set()
        self._gemms_of_norms: dict[str, set[str]] = {}
        self._inside_module = 0
        self._watched = False

    def saw_input(self, path: str, input: Tensor) -> None:
        """A converted GEMM module at `path` was called with `input`."""
        self.calls[path] = self.calls.get(path, 0) + 1
        norm = self._norms.get(id(input))
        if norm is not None and norm[0]() is input:
            self._norms_read_by_gemm.add(norm[1])
            # (Edited in place since, it is not what the norm would cast.)
            if norm[2] == _version(input):
                self._gemms_of_norms.setdefault(norm[1], set()).add(path)
        known = self._readers.get(id(input))
        if known is None or known[0]() is not input:
            self._readers[id(input)] = (weakref.ref(input), [path])
            return
        leader = known[1][0]
        known[1].append(path)
        if path != leader and self.calls[path] == 1 and path not in self._siblings.values():
            self._siblings.setdefault(path, self._siblings.get(leader, leader))

    def saw_norm(self, path: str, output: Tensor) -> None:
        """The converted norm at `path` returned `output`."""
        self._norms[id(output)] = (weakref.ref(output), path, _version(output))
        if not self._watched:
            # Called outside a watched root: who else reads the output can't be known.
            self._norms_read_otherwise.add(path)

    def watch(self, watched: bool) -> None:
        """From now on every torch function is (or is not) reported."""
        self._watched = watched

    def saw_result(self, output: Any) -> None:
        """The watched root returns `output`: what is in it may be read by anybody."""
        self.saw_function("return", (output,), {})

    def siblings(self) -> dict[str, str]:
        """{path: path of the sibling whose input slot it shares}; a leader is never a key."""
        return {path: leader for path, leader in self._siblings.items() if path != leader}

    def never_ran(self, paths: Sequence[str]) -> str:
        """What to say of those of `paths` that were not called; empty if all were."""
        idle = [path for path in paths if path not in self.calls]
        if not idle:
            return ""
        shown = ", ".join(idle[:5]) + (", …" if len(idle) > 5 else "")
        return (
            f"{len(idle)} of {len(paths)} converted modules never ran in the first training step, "
            f"so they are not in FP8: {shown}. The model reads their weights directly, or did not "
            "need them for this batch."
        )

    def norms_feeding_gemms_only(self) -> set[str]:
        """Norms that were read, and by nothing but GEMMs."""
        return self._norms_read_by_gemm - self._norms_read_otherwise

    def norm_readers(self, siblings: Mapping[str, str]) -> dict[str, str]:
        """{path of a norm: path of the module that reads it}, where all that do share one slot.

        Whether others read it as well makes no difference: they read the norm's output, not the
        cast of it.
        """
        leaders = {
            norm: {siblings.get(path, path) for path in paths}
            for norm, paths in self._gemms_of_norms.items()
        }
        return {norm: next(iter(found)) for norm, found in leaders.items() if len(found) == 1}

    def entering_module(self) -> None:
        """A converted module runs: what it does to its input is not another reader."""
        self._inside_module += 1

    def leaving_module(self) -> None:
        self._inside_module -= 1

    def saw_function(self, name: str, args: Any, kwargs: Any) -> None:
        """A torch function was called outside our modules."""
        if self._inside_module or name in _METADATA_CALLS:
            return
        gemm = name in _MATMULS
        for value in _tensors(args, kwargs):
            norm = self._norms.get(id(value))
            if norm is None or norm[0]() is not value:
                continue
            (self._norms_read_by_gemm if gemm else self._norms_read_otherwise).add(norm[1])


class WatchReaders(TorchFunctionMode):
    """Reports every torch function of the observed forward to an `Observation`."""

    def __init__(self, observation: Observation) -> None:
        super().__init__()
        self._observation = observation

    def __enter__(self) -> Self:
        self._observation.watch(True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._observation.watch(False)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            owner = getattr(getattr(func, "__self__", None), "__name__", "")
            name = "size" if owner in _METADATA else owner
        self._observation.saw_function(name, args, kwargs)
        return func(*args, **kwargs)


# Compiled once, it would serve one attribute's getter for another's (`.device` gave a shape).
skip_frame(WatchReaders.__torch_function__)


def _version(tensor: Tensor) -> int:
    """Its version counter; a tensor made under inference_mode has none."""
    return 0 if tensor.is_inference() else tensor._version


def _tensors(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    pending: list[Any] = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
    return found
