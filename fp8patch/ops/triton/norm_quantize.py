"""A norm and the cast of its output in one kernel: y, its FP8 values, the same transposed.

Transposed stores want many neighbouring rows, and so many rows do not fit into registers. A program
therefore goes over its rows twice: for their statistics, and to normalise, cast and write. What the
second pass reads is still in the cache.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.triton.cast_tile import (
    CONSTANTS,
    add_count,
    bits_of,
    flushed,
    load_row,
    max_abs,
    outlier,
    store_tile,
)
from fp8patch.ops.triton.launch import Launcher, blocks_of, size_class
from fp8patch.ops.triton.norm import kind_of, whole_rows
from fp8patch.ops.triton.packing import ASSEMBLY


class Tile(NamedTuple):
    """Rows a program has, columns that it holds at once, warps."""

    rows: int
    columns: int
    warps: int


def tile_of(cols: int) -> Tile:
    """How the kernel is run."""
    return Tile(32, 128 if cols <= 128 else 256, 8)


@triton.jit
def _part(x, m, start, rows, stride, COLS: tl.constexpr, BK: tl.constexpr):
    """FP32 values of the rows m from column `start` on, and where they are inside; zero outside."""
    k = start + tl.arange(0, BK)
    inside = (m[:, None] < rows) & (k[None, :] < COLS)
    offsets = m.to(tl.int64)[:, None] * stride + k[None, :]
    return tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def _statistics(
    x, m, rows, stride, eps,
    COLS: tl.constexpr, CENTER: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """(mean, rstd) of the rows m.

    Sums are kept a column and added up once: reductions across threads are what costs here. They
    are of the distance to the mean of a row's first part, so that a large mean loses nothing.
    """
    near = tl.zeros((BM,), tl.float32)
    if CENTER:
        values, _ = _part(x, m, 0, rows, stride, COLS, BK)
        near = tl.sum(values, 1) / min(COLS, BK)
    first = tl.zeros((BM, BK), tl.float32)
    second = tl.zeros((BM, BK), tl.float32)
    for start in range(0, COLS, BK):
        values, inside = _part(x, m, start, rows, stride, COLS, BK)
        if CENTER:
            values = tl.where(inside, values - near[:, None], 0.0)
            first += values
        second += values * values
    square = tl.sum(second, 1) / COLS
    if CENTER:
        apart = tl.sum(first, 1) / COLS
        square = tl.maximum(square - apart * apart, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return near + apart, tl.rsqrt(square + eps)
    return near, tl.rsqrt(square + eps)


@triton.jit
def _normalized(
    x, y, mean, rstd, factor, shift, m, k, rows, stride,
    COLS: tl.constexpr, CENTER: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write y of the rows m and columns k; returns what was written, in FP32, zero outside."""
    values = load_row(x, m, k, rows, COLS, stride, 1, EVEN)
    if CENTER:
        values -= tl.load(mean + m, mask=m < rows, other=0.0)[:, None]
    values *= tl.load(rstd + m, mask=m < rows, other=0.0)[:, None]
    found = (values * factor + shift).to(y.dtype.element_ty)
    target = y + m.to(tl.int64)[:, None] * COLS + k[None, :]
    if EVEN:
        tl.store(target, found)
        return found.to(tl.float32)
    inside = (m[:, None] < rows) & (k[None, :] < COLS)
    tl.store(target, found, mask=inside)
    return tl.where(inside, found.to(tl.float32), 0.0)


@triton.jit
def _cast(
    v0, v1, v2, v3, y, x_fp8, x_fp8_t, amax, counts, used, w, k, rows, height,
    COLS: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, CLIPS: tl.constexpr,
    FLUSHES_TO: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    store_tile(
        x_fp8, x_fp8_t, v0 * used, v1 * used, v2 * used, v3 * used, w, k, rows, WIDTH, height,
        TRANSPOSE, EVEN, PTX,
    )  # fmt: skip
    bits = tl.max(bits_of(max_abs(max_abs(v0, v1), max_abs(v2, v3))))
    if OBSERVE:
        slot = amax.to(tl.pointer_type(tl.int32), bitcast=True)
        if bits > tl.load(slot):
            tl.atomic_max(slot, bits, sem="relaxed")
        lost = flushed(v0, used, FLUSHES_TO) + flushed(v1, used, FLUSHES_TO)
        lost += flushed(v2, used, FLUSHES_TO) + flushed(v3, used, FLUSHES_TO)
        add_count(counts, 1, lost)
    # What only an outlier needs is done again, from memory, in the rare tile that holds one.
    if (bits.to(tl.float32, bitcast=True) * used <= CLIPS) == 0:
        tl.debug_barrier()
        v0 = load_row(y, 4 * w, k, rows, COLS, COLS, 1, EVEN)
        v1 = load_row(y, 4 * w + 1, k, rows, COLS, COLS, 1, EVEN)
        v2 = load_row(y, 4 * w + 2, k, rows, COLS, COLS, 1, EVEN)
        v3 = load_row(y, 4 * w + 3, k, rows, COLS, COLS, 1, EVEN)
        s0 = outlier(v0, used, counts, LARGEST, CLIPS, OBSERVE)
        s1 = outlier(v1, used, counts, LARGEST, CLIPS, OBSERVE)
        s2 = outlier(v2, used, counts, LARGEST, CLIPS, OBSERVE)
        s3 = outlier(v3, used, counts, LARGEST, CLIPS, OBSERVE)
        store_tile(x_fp8, x_fp8_t, s0, s1, s2, s3, w, k, rows, WIDTH, height, TRANSPOSE, EVEN, PTX)


@triton.jit
def _kernel(
    x, weight, bias, y, mean, rstd, x_fp8, x_fp8_t, scale, scale_inv, amax, counts,
    rows, height, stride, eps,
    COLS: tl.constexpr, WIDTH: tl.constexpr, CENTER: tl.constexpr, OFFSET: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr,
    EVEN: tl.constexpr, LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr,
    PTX: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    m = pid * BM + tl.arange(0, BM)
    middle, inverse = _statistics(x, m, rows, stride, eps, COLS, CENTER, BM, BK)
    if CENTER:
        tl.store(mean + m, middle, mask=m < rows)
    tl.store(rstd + m, inverse, mask=m < rows)
    # The second pass reads them as other threads have written them.
    tl.debug_barrier()
    used = tl.load(scale)
    w = pid * (BM // 4) + tl.arange(0, BM // 4)
    for start in range(0, WIDTH, BK):
        k = start + tl.arange(0, BK)
        factor = tl.full((1, BK), 1.0, tl.float32)
        shift = tl.zeros((1, BK), tl.float32)
        if WEIGHT:
            factor = tl.load(weight + k, mask=k < COLS, other=0.0).to(tl.float32)[None, :]
            if OFFSET:
                factor += 1.0
        if BIAS:
            shift = tl.load(bias + k, mask=k < COLS, other=0.0).to(tl.float32)[None, :]
        v0 = _normalized(
            x, y, mean, rstd, factor, shift, 4 * w, k, rows, stride, COLS, CENTER, EVEN
        )  # fmt: skip
        v1 = _normalized(
            x, y, mean, rstd, factor, shift, 4 * w + 1, k, rows, stride, COLS, CENTER, EVEN
        )  # fmt: skip
        v2 = _normalized(
            x, y, mean, rstd, factor, shift, 4 * w + 2, k, rows, stride, COLS, CENTER, EVEN
        )  # fmt: skip
        v3 = _normalized(
            x, y, mean, rstd, factor, shift, 4 * w + 3, k, rows, stride, COLS, CENTER, EVEN
        )  # fmt: skip
        _cast(
            v0, v1, v2, v3, y, x_fp8, x_fp8_t, amax, counts, used, w, k, rows, height, COLS, WIDTH,
            LARGEST, CLIPS, FLUSHES_TO, OBSERVE, TRANSPOSE, EVEN, PTX,
        )  # fmt: skip
    if pid == 0:
        tl.store(scale_inv, tl.div_rn(1.0, used))
        if OBSERVE:
            # A size of 1 is a Python constant in here, which has no `.to`.
            tl.atomic_add(counts + 3, (tl.zeros((), tl.int64) + rows) * COLS, sem="relaxed")


_launch = Launcher(_kernel)


def norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    offset: bool,
    dtype: torch.dtype,
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    observe: bool,
    transpose: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`ops.norm_quantize.norm_quantize` on the GPU; x [..., K] holds at least one element."""
    shape, cols, device, fp8 = x.shape, x.shape[-1], x.device, numerics.E4M3
    x, rows, stride = whole_rows(x)
    tile = tile or tile_of(cols)
    height, width = (rows + 15) // 16 * 16, (cols + 15) // 16 * 16
    y = torch.empty(shape, dtype=dtype, device=device)
    rstd = torch.empty((rows,), dtype=torch.float32, device=device)
    mean = torch.empty((rows if center else 0,), dtype=torch.float32, device=device)
    x_fp8 = torch.empty((rows, width), dtype=fp8, device=device)
    x_fp8_t = torch.empty((width, height) if transpose else (0, 0), dtype=fp8, device=device)
    scale_inv = torch.empty((), dtype=torch.float32, device=device)
    # What is missing is never read.
    given = x, x if weight is None else weight, x if bias is None else bias
    sizes = rows, height, stride
    even = rows % tile.rows == 0 and cols % tile.columns == 0
    flags = (center, offset, weight is not None, bias is not None, observe, transpose, even)
    _launch(
        (cols, tile, dtype, flags, *map(kind_of, given), *map(size_class, sizes)),
        # The transpose has padded rows of its own to fill with zeros.
        blocks_of(height if transpose else rows, tile.rows),
        (*given, y, mean, rstd, x_fp8, x_fp8_t, scale, scale_inv, amax, counts),
        (*sizes, eps),
        lambda: _constants(cols, width, flags, tile, x.is_cuda),
        tile.warps,
    )
    return y, mean, rstd, x_fp8, x_fp8_t, scale_inv


def _constants(
    cols: int, width: int, flags: tuple[bool, ...], tile: Tile, on_gpu: bool
) -> dict[str, Any]:
    names = ("CENTER", "OFFSET", "WEIGHT", "BIAS", "OBSERVE", "TRANSPOSE", "EVEN")
    return {
        "COLS": cols,
        "WIDTH": width,
        **dict(zip(names, flags, strict=True)),
        **CONSTANTS[numerics.E4M3],
        "PTX": ASSEMBLY[numerics.E4M3] if on_gpu else "",
        "BM": tile.rows,
        "BK": tile.columns,
    }
