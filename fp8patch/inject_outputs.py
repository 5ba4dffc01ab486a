"""What goes into a model and what comes out of it: batch sizes, losses, and FP32 outputs."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["find_loss", "to_fp32", "tokens_of"]

_NARROW = (torch.bfloat16, torch.float16)


def to_fp32(value: Any) -> Any:
    """`value` with its BF16 and FP16 tensors in FP32, in a structure of the same type.

    What is no tensor, dict, tuple, list or dataclass (a cache) is passed on as it is, and so is a
    structure in which there is nothing to cast. No structure of the model's is written to.
    """
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _NARROW else value
    if isinstance(value, Mapping):
        return _changed_mapping(value)
    if isinstance(value, tuple | list):
        new = [to_fp32(item) for item in value]
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*new)
        return type(value)(new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {k: new for k, v in vars(value).items() if (new := to_fp32(v)) is not v}
        if not changes:
            return value
        other = copy.copy(value)
        for name, new in changes.items():
            object.__setattr__(other, name, new)  # frozen ones too
        return other
    return value


def _changed_mapping(value: Mapping[Any, Any]) -> Any:
    changes = {k: new for k, v in value.items() if (new := to_fp32(v)) is not v}
    if not changes:
        return value
    # A copy and not type(value)(...): transformers' outputs are dicts and dataclasses in one, whose
    # keys and attributes follow each other.
    other: Any = copy.copy(value)
    for key, new in changes.items():
        other[key] = new
    return other


def find_loss(output: Any) -> Tensor | None:
    """The training loss in a model's output, detached, or None where there is none.

    `.loss`, the key "loss", the output itself, or the one scalar of a tuple; it has a gradient.
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple | list):
        scalars = [v for v in output if _is_loss(v)]
        found = scalars[0] if len(scalars) == 1 else None
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    return found.detach() if _is_loss(found) else None


def _is_loss(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.numel() == 1
        and value.dim() <= 1
        and value.is_floating_point()
        and value.requires_grad
    )


def tokens_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """How many rows the model's Linears will see for this batch: M. None where nothing tells."""
    tensors = list(_tensors([*args, *kwargs.values()]))
    for tensor in tensors:  # token ids [B, T]
        if not tensor.is_floating_point() and tensor.dim() == 2 and tensor.dtype != torch.bool:
            return tensor.numel() or None
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dim() in (4, 5):
            return _patches(model, tensor)
        if tensor.is_floating_point() and tensor.dim() >= 2:  # features [..., K]
            return tensor.numel() // max(tensor.shape[-1], 1) or None
    return None


def _patches(model: nn.Module, images: Tensor) -> int | None:
    """Images [B, C, H, W] (or video) that a convolution cuts into patches."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and module.kernel_size == module.stride:
            sizes = images.shape[-len(module.kernel_size) :]
            count = images.shape[0]
            for size, step in zip(sizes, module.kernel_size, strict=True):
                count *= size // int(step)
            return count or None
    return None


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(list(value.values()))
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
