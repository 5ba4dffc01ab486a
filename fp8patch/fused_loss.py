"""The loss of a language model, fused (ops/cross_entropy.py), where the model computes it itself.

While a converted root runs its training forward, `torch.nn.functional.cross_entropy` is one that
takes what it can to the operator, and the rest to the stock function. Where transformers' own loss
functions widen the logits first, they are given logits whose `.float()` waits (deferred.py): they
ask for FP32 only because PyTorch's losses are as precise as what they are given.

Who has put another cross entropy or another loss function in its place keeps it. Nothing is left on
the model or in torch when the forward ends.
"""

import operator
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch import regions
from fp8patch.deferred import Deferred
from fp8patch.ops import cross_entropy as ops
from fp8patch.structures import map_tensors

# Where there is Triton, and so something to gain.
DEVICES = ("cuda",)
# With fewer classes a row is too short for a program, and the logits are small beside the rest.
FEWEST_CLASSES = 512

_stock: Any = torch.nn.functional.cross_entropy
_TRANSFORMERS_LOSSES = "transformers.loss."


class _CrossEntropy(torch.autograd.Function):
    """(logits [M, V], labels [M], ignored, reduction) -> FP32 loss, [M] or a scalar."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignored: int, reduction: str) -> Tensor:
        losses, lse, sums = ops.cross_entropy(logits, labels, ignored)
        total, count, are_classes = sums.unbind()
        # PyTorch's own kernel asserts it too. Without a wait: no training goes on from there.
        torch._assert_async(are_classes, f"a label is no class, and not {ignored} either")
        ctx.ignored, ctx.reduction = ignored, reduction
        # As PyTorch has it, no loss at all has the mean nan, and the gradient zero.
        ctx.save_for_backward(logits, labels, lse, count)
        if reduction == "none":
            return losses
        return total / count if reduction == "mean" else total.clone()

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor) -> Any:
        logits, labels, lse, count = _saved(ctx)
        if torch.is_grad_enabled():  # Second derivatives are wanted.
            grad = _differentiable_grad(ctx, logits, labels, by_loss)
        else:
            by_loss = by_loss.float()
            by_row = by_loss / count if ctx.reduction == "mean" else by_loss.contiguous()
            grad = ops.cross_entropy_backward(logits, labels, lse, by_row, ctx.ignored)
        return grad, None, None, None


def _saved(ctx: Any) -> Any:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "the logits were written to in place between the loss and its backward, which a fused "
            "loss reads them again for. Write to a copy of them, or leave losses to PyTorch with "
            "`loss: stock` in the recipe."
        ) from error


def _differentiable_grad(ctx: Any, logits: Tensor, labels: Tensor, by_loss: Tensor) -> Tensor:
    loss = _stock(logits.float(), labels, ignore_index=ctx.ignored, reduction=ctx.reduction)
    grad: Tensor = torch.autograd.grad(loss, logits, by_loss, create_graph=True)[0]
    return grad


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
    plain = plain and type(ignore_index) is int and reduction in ("mean", "sum", "none")
    if plain and _takes(input, target):
        logits = input.current if isinstance(input, Deferred) else input
        loss: Tensor = _CrossEntropy.apply(logits, target, ignore_index, reduction)  # type: ignore[no-untyped-call]
        return loss.to(_dtype_of_loss(input))
    given = input.made() if isinstance(input, Deferred) else input
    more = weight, size_average, ignore_index, reduce, reduction, label_smoothing
    stock: Tensor = _stock(given, target, *more)
    return stock


def _dtype_of_loss(input: Tensor) -> torch.dtype:
    """What PyTorch's has: under autocast FP32."""
    return torch.float32 if torch.is_autocast_enabled(input.device.type) else input.dtype


def _takes(input: Tensor, target: Tensor) -> bool:
    if torch.compiler.is_compiling() or not _in_training():
        return False
    if isinstance(input, Deferred):
        input = input.current
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
    if region is None or region.execution == "observe" or region.training is not True:
        return False
    # What checkpointing computes again, when no root runs, has to be what it was.
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class _LossFunction:
    """Stands in for the loss function that transformers chose for a model.

    Which one that is is asked when it is called: for many a model it never is.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self.placed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stock = self.stock()
        ours = getattr(stock, "__module__", "").startswith(_TRANSFORMERS_LOSSES)
        if not ours or torch.compiler.is_compiling() or not _in_training():
            return stock(*args, **kwargs)
        if args:
            args = (_deferred(args[0]), *args[1:])
        if "logits" in kwargs:
            kwargs["logits"] = _deferred(kwargs["logits"])
        return map_tensors(stock(*args, **kwargs), _made)

    def stock(self) -> Any:
        """The model's loss function without us."""
        owner: Any = self._owner()
        put = owner.__dict__.pop(_PLACE, None)
        try:
            return owner.loss_function
        finally:
            if put is not None and self.placed:  # (Another thread's forward may have ended.)
                owner.__dict__[_PLACE] = put

    # A model that is copied or saved in its forward takes nothing of ours along.
    def __deepcopy__(self, memo: Any) -> Any:
        return self.stock()

    def __reduce__(self) -> Any:
        # (By a function that is there without us.)
        return operator.getitem, ([self.stock()], 0)


def _deferred(logits: Any) -> Any:
    narrow = type(logits) is Tensor and logits.dtype in (torch.bfloat16, torch.float16)
    return Deferred.of(logits) if narrow and worthwhile(logits) else logits


def _made(found: Tensor) -> Tensor:
    return found.made() if isinstance(found, Deferred) else found


# Where transformers keeps a loss function that somebody has set.
_PLACE = "_loss_function"
# What stands in, by root: (owner, its stand-in).
_stand_ins: "weakref.WeakKeyDictionary[nn.Module, list[tuple[Any, _LossFunction]]]" = (
    weakref.WeakKeyDictionary()
)


def _stand_ins_of(root: nn.Module) -> list[tuple[Any, _LossFunction]]:
    found = _stand_ins.get(root)
    if found is None:
        owners = [module for module in root.modules() if _is_transformers(module)]
        found = [(weakref.ref(owner), _LossFunction(owner)) for owner in owners]
        _stand_ins[root] = found
    return found


def _is_transformers(module: nn.Module) -> bool:
    declared = getattr(type(module), "loss_function", None)
    asked = declared.fget if isinstance(declared, property) else None
    return getattr(asked, "__module__", "").startswith("transformers.")


class FusedLosses(AbstractContextManager[None]):
    """Inside, `root` computes its losses fused."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._set: list[tuple[nn.Module, _LossFunction]] = []

    def __enter__(self) -> None:
        genuine = _stock.__module__ == "torch.nn.functional"
        if not genuine or torch.nn.functional.cross_entropy is not _stock:
            return
        for reference, stand_in in _stand_ins_of(self._root):
            owner = reference()
            # A user's own is kept there (as a submodule, if it is one), and left alone.
            if owner is not None and _PLACE not in owner.__dict__ | owner._modules:
                owner.__dict__[_PLACE] = stand_in
                stand_in.placed = True
                self._set.append((owner, stand_in))
        torch.nn.functional.cross_entropy = cross_entropy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if torch.nn.functional.cross_entropy is cross_entropy:
            torch.nn.functional.cross_entropy = _stock
        for owner, stand_in in self._set:
            stand_in.placed = False
            if owner.__dict__.get(_PLACE) is stand_in:
                del owner.__dict__[_PLACE]
        self._set.clear()
