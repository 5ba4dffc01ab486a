"""Norms in one read of the input: a program holds whole rows in registers.

Forward writes the statistics that backward needs. Backward reads x and the gradient once, writes
grad_x, and each of its programs sums the gradients of weight and bias over the rows that it was
given; a second kernel adds up a few hundred of these. No atomics: the order is always the same.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8patch.ops.triton.add_rows import add_rows
from fp8patch.ops.triton.launch import Launcher, blocks_of, size_class


class Tile(NamedTuple):
    """How a kernel is run: elements a program holds at once, warps, programs an SM (backward)."""

    elements: int
    warps: int
    programs: int = 0


@triton.jit
def _load(x, m, k, rows, stride, COLS: tl.constexpr):
    """FP32 values of the rows m of x, and where they are inside; zero outside."""
    inside = (m[:, None] < rows) & (k[None, :] < COLS)
    offsets = m.to(tl.int64)[:, None] * stride + k[None, :]
    return tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def _vector(vector, k, COLS: tl.constexpr):
    return tl.load(vector + k, mask=k < COLS, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _normalize(
    values, inside, weight, bias, k, eps,
    COLS: tl.constexpr, CENTER: tl.constexpr, OFFSET: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """(y, mean, rstd) of a tile of whole rows."""
    mean = tl.sum(values, 1) / COLS
    if CENTER:
        values = tl.where(inside, values - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(values * values, 1) / COLS + eps)
    y = values * rstd[:, None]
    if WEIGHT:
        factor = _vector(weight, k, COLS)
        if OFFSET:
            factor += 1.0
        y *= factor
    if BIAS:
        y += _vector(bias, k, COLS)
    return y, mean, rstd


@triton.jit
def _forward_kernel(
    x, weight, bias, y, mean, rstd,
    rows, stride, eps,
    COLS: tl.constexpr, CENTER: tl.constexpr, OFFSET: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    values, inside = _load(x, m, k, rows, stride, COLS)
    found, middle, scale = _normalize(
        values, inside, weight, bias, k, eps, COLS, CENTER, OFFSET, WEIGHT, BIAS
    )
    if CENTER:
        tl.store(mean + m, middle, mask=m < rows)
    tl.store(rstd + m, scale, mask=m < rows)
    offsets = m.to(tl.int64)[:, None] * COLS + k[None, :]
    tl.store(y + offsets, found.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _sum_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _backward_kernel(
    grad, x, weight, mean, rstd, grad_x, partial,
    rows, grad_stride, stride,
    COLS: tl.constexpr, CENTER: tl.constexpr, OFFSET: tl.constexpr, WEIGHT: tl.constexpr,
    PARAMETERS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0)
    k = tl.arange(0, BK)
    by_weight = tl.zeros((BM, BK), tl.float32)
    by_bias = tl.zeros((BM, BK), tl.float32)
    if WEIGHT:
        factor = _vector(weight, k, COLS)
        if OFFSET:
            factor += 1.0
    for tile in range(tl.program_id(0), tl.cdiv(rows, BM), programs):
        m = tile * BM + tl.arange(0, BM)
        normed, inside = _load(x, m, k, rows, stride, COLS)
        by_y, _ = _load(grad, m, k, rows, grad_stride, COLS)
        scale = tl.load(rstd + m, mask=m < rows, other=0.0)[:, None]
        if CENTER:
            normed -= tl.load(mean + m, mask=m < rows, other=0.0)[:, None]
            # Outside is no zero any more.
            normed = tl.where(inside, normed, 0.0)
        normed *= scale
        by_normed = by_y
        if WEIGHT:
            by_normed = by_y * factor
        along = by_normed * normed
        if CENTER:
            # Two sums at once are as many barriers as one.
            sums, mean_by = tl.reduce((along, by_normed), 1, _sum_two)
            by_x = by_normed - normed * (sums / COLS)[:, None] - (mean_by / COLS)[:, None]
        else:
            by_x = by_normed - normed * (tl.sum(along, 1) / COLS)[:, None]
        offsets = m.to(tl.int64)[:, None] * COLS + k[None, :]
        tl.store(grad_x + offsets, (by_x * scale).to(grad_x.dtype.element_ty), mask=inside)
        if PARAMETERS:
            by_weight += by_y * normed
            if CENTER:
                by_bias += by_y
    if PARAMETERS:
        place = tl.program_id(0) * COLS + k
        tl.store(partial + place, tl.sum(by_weight, 0), mask=k < COLS)
        if CENTER:
            place += programs * COLS
            tl.store(partial + place, tl.sum(by_bias, 0), mask=k < COLS)


_forward = Launcher(_forward_kernel)
_backward = Launcher(_backward_kernel)


def width_of(cols: int) -> int:
    """Columns of a tile that holds whole rows."""
    power: int = triton.next_power_of_2(cols)
    return max(power, 16)


@cache
def height_of(tile: Tile, cols: int) -> int:
    """Rows that a tile holds."""
    return max(tile.elements // width_of(cols), 1)


@cache
def forward_tile(cols: int) -> Tile:
    """How the forward kernel is run."""
    width = width_of(cols)
    return Tile(max(width, 4096), 4 if width <= 2048 else 8 if width <= 8192 else 16)


@cache
def backward_tile(cols: int) -> Tile:
    """How the backward kernel is run."""
    width = width_of(cols)
    # Sixteen elements a thread: they are held four times over.
    elements = max(width, 2048)
    return Tile(elements, min(elements // 512, 32), max(8192 // elements, 1))


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return 2  # Under the interpreter.
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    offset: bool,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.norm.norm` on the GPU; x [..., K] holds at least one element."""
    shape, device, cols = x.shape, x.device, x.shape[-1]
    x, rows, stride = whole_rows(x)
    tile = tile or forward_tile(cols)
    height = height_of(tile, cols)
    y = torch.empty(shape, dtype=dtype, device=device)
    rstd = torch.empty((rows,), dtype=torch.float32, device=device)
    mean = torch.empty((rows if center else 0,), dtype=torch.float32, device=device)
    # What is missing is never read.
    given = x, x if weight is None else weight, x if bias is None else bias
    flags = (center, offset, weight is not None, bias is not None)
    variant = (
        cols, tile, dtype, flags, *map(kind_of, given), size_class(rows), size_class(stride)
    )  # fmt: skip
    _forward(
        variant,
        blocks_of(rows, height),
        (*given, y, mean, rstd),
        (rows, stride, eps),
        lambda: {
            "COLS": cols,
            **dict(zip(("CENTER", "OFFSET", "WEIGHT", "BIAS"), flags, strict=True)),
            "BM": height,
            "BK": width_of(cols),
        },
        tile.warps,
    )
    return y, mean, rstd


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    center: bool,
    offset: bool,
    parameters: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """`ops.norm.norm_backward` on the GPU; x [..., K] holds at least one element."""
    shape, device, cols = x.shape, x.device, x.shape[-1]
    x, rows, stride = whole_rows(x)
    grad, _, grad_stride = whole_rows(grad)
    tile = tile or backward_tile(cols)
    height = height_of(tile, cols)
    blocks = min(blocks_of(rows, height), tile.programs * processors(device))
    by_x = torch.empty(shape, dtype=x.dtype, device=device)
    sums = (2 if center else 1) if parameters else 0
    partial = torch.empty((sums, blocks, cols), dtype=torch.float32, device=device)
    given = grad, x, x if weight is None else weight
    sizes = rows, grad_stride, stride
    flags = (center, offset, weight is not None, parameters)
    _backward(
        (cols, tile, flags, *map(kind_of, given), *map(size_class, sizes)),
        blocks,
        (*given, mean, rstd, by_x, partial),
        sizes,
        lambda: {
            "COLS": cols,
            **dict(zip(("CENTER", "OFFSET", "WEIGHT", "PARAMETERS"), flags, strict=True)),
            "BM": height,
            "BK": width_of(cols),
        },
        tile.warps,
    )
    return by_x, add_rows(partial) if sums else partial.sum(1)


def whole_rows(x: Tensor) -> tuple[Tensor, int, int]:
    """x where the elements of its rows lie side by side, else a copy; how many rows, how far apart.

    Only the address of what is returned counts, not its shape.
    """
    cols = x.shape[-1]
    if x.is_contiguous():
        return x, x.numel() // cols, cols
    x = x.reshape(-1, cols)
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.shape[0], x.stride(0)


def kind_of(x: Tensor) -> tuple[torch.dtype, int]:
    """What the code that reads x depends on, besides its shape."""
    return x.dtype, x.data_ptr() % 16
