"""What goes into a model and what comes out of it: batch sizes, losses, and FP32 outputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch.structures import map_tensors, tensors_in

__all__ = ["find_loss", "to_fp32", "tokens_of"]

_NARROW = (torch.bfloat16, torch.float16)


def to_fp32(value: Any) -> Any:
    """`value` with its BF16 and FP16 tensors in FP32; else as `map_tensors`."""
    return map_tensors(value, lambda t: t.float() if t.dtype in _NARROW else t)


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
    tensors = list(tensors_in([*args, *kwargs.values()]))
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
