"""Cross entropy: a program a row forward, a program a piece of a row backward.

Forward keeps a running maximum and a sum that is scaled to it, so that a row is read once. Rows
without a loss are not read at all: where a seventh of the tokens has labels, as in BERT's
pretraining, six sevenths of the logits are left alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8patch.ops.triton.launch import Launcher, blocks_of, empty_matrix, size_class

# Elements of a row at a time, and warps: forward and backward. Found with
# scripts/time_cross_entropy.py on an H200.
FORWARD, BACKWARD = (4096, 4), (2048, 4)
# Losses that are added up at a time, by one program.
_SUMMED = 4096
# Elements that one load may take.
_TOGETHER = tl.constexpr(8)


# `ignored` is no size: any number, below zero as a rule.
@triton.jit(do_not_specialize=["ignored"])
def _forward_kernel(
    logits, labels, losses, lse,
    classes, stride, ignored,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    loss = tl.zeros((), tl.float32)
    found = tl.zeros((), tl.float32)
    if label != ignored:
        # From a multiple of 16 bytes on, so that several elements are one load wherever rows begin.
        place = row * stride
        start = tl.multiple_of(place // _TOGETHER * _TOGETHER, _TOGETHER)
        before = (place - start).to(tl.int32)
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        for first in range(0, classes + before, BLOCK):
            k = first + tl.arange(0, BLOCK)
            inside = (k >= before) & (k < classes + before)
            values = tl.load(logits + start + k, mask=inside, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(values))
            # As long as all is -inf there is nothing to subtract.
            base = tl.where(higher > float("-inf"), higher, 0.0)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(values - base))
            top = higher
        base = tl.where(top > float("-inf"), top, 0.0)
        found = base + tl.log(total)
        known = (label >= 0) & (label < classes)
        picked = tl.load(logits + place + label, mask=known, other=0.0).to(tl.float32)
        loss = tl.where(known, found - picked, float("nan"))
    tl.store(losses + row, loss)
    tl.store(lse + row, found)


@triton.jit(do_not_specialize=["ignored"])
def _sum_kernel(losses, labels, sums, rows, classes, ignored, BLOCK: tl.constexpr):
    # One program: always the same order.
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    wrong = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        m = start + tl.arange(0, BLOCK)
        total += tl.load(losses + m, mask=m < rows, other=0.0)
        label = tl.load(labels + m, mask=m < rows, other=ignored)
        count += tl.where(label != ignored, 1.0, 0.0)
        known = (label >= 0) & (label < classes)
        wrong += tl.where((label != ignored) & (known == 0), 1.0, 0.0)
    tl.store(sums, tl.sum(total))
    tl.store(sums + 1, tl.sum(count))
    tl.store(sums + 2, tl.where(tl.sum(wrong) > 0.0, 0.0, 1.0))


@triton.jit(do_not_specialize=["ignored"])
def _backward_kernel(
    logits, labels, lse, by_loss, grad,
    classes, stride, ignored, width, across,
    EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // across).to(tl.int64)
    k = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    values = tl.zeros((BLOCK,), tl.float32)
    if label != ignored:
        factor = tl.load(by_loss + row) if EACH else tl.load(by_loss)
        known = (label >= 0) & (label < classes)
        factor = tl.where(known, factor, float("nan"))
        inside = k < classes
        x = tl.load(logits + row * stride + k, mask=inside, other=float("-inf")).to(tl.float32)
        values = tl.exp(x - tl.load(lse + row)) - tl.where(k == label, 1.0, 0.0)
        values = tl.where(inside, values * factor, 0.0)
    target = grad + row * width + k
    tl.store(target, values.to(grad.dtype.element_ty), mask=k < width)


def is_far(number: int) -> bool:
    """Is it passed to a kernel in 64 bits? (One of them is a kernel of its own.)"""
    return not -(2**31) <= number < 2**31


_forward = Launcher(_forward_kernel)
_sum = Launcher(_sum_kernel)
_backward = Launcher(_backward_kernel)


def cross_entropy(
    logits: Tensor, labels: Tensor, ignored: int, tile: tuple[int, int] = FORWARD
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.cross_entropy` on the GPU; at least one element."""
    rows, classes = logits.shape
    stride, device = logits.stride(0), logits.device
    # (Not two rows of one tensor: a view can't be edited in place, and losses may be.)
    losses, lse = (
        torch.empty_strided((rows,), (1,), dtype=torch.float32, device=device) for _ in range(2)
    )
    sums = torch.empty_strided((3,), (1,), dtype=torch.float32, device=device)
    block, warps = tile
    sizes = classes, stride, ignored
    starts = tuple(tensor.data_ptr() % 16 for tensor in (logits, labels, lse))
    far = is_far(ignored)
    variant: tuple[Any, ...] = (logits.dtype, starts, tile, far, *map(size_class, sizes[:2]))
    _forward(variant, rows, (logits, labels, losses, lse), sizes, {"BLOCK": block}, warps)
    numbers = rows, classes, ignored
    variant = starts[1], far, *map(size_class, numbers[:2])
    _sum(variant, 1, (losses, labels, sums), numbers, {"BLOCK": _SUMMED}, 8)
    return losses, lse, sums


def cross_entropy_backward(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    by_loss: Tensor,
    ignored: int,
    width: int,
    tile: tuple[int, int] = BACKWARD,
) -> Tensor:
    """`ops.cross_entropy_backward` on the GPU; rows of the result are `width` elements apart."""
    rows, classes = logits.shape
    grad = empty_matrix(rows, width, logits.dtype, logits.device)
    block, warps = tile
    across = blocks_of(width, block)
    each = by_loss.dim() == 1
    sizes = classes, logits.stride(0), ignored, width, across
    tensors = logits, labels, lse, by_loss, grad
    starts = tuple(tensor.data_ptr() % 16 for tensor in tensors)
    positive = classes, logits.stride(0), width, across
    variant = (logits.dtype, starts, each, tile, is_far(ignored), *map(size_class, positive))
    constants = {"EACH": each, "BLOCK": block}
    _backward(variant, rows * across, tensors, sizes, constants, warps)
    return grad[:, :classes] if width != classes else grad
