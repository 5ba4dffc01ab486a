"""Cast, transpose, amax and counts in one read of the input.

A tile of x is read once; its FP8 values go out twice, as they are and transposed, and its amax and
counts go to the slot by atomics. With a scale from the tensor itself (`live`) a first kernel finds
amax, and the second derives the scale from it on the device: no sync.

Bit equality with `numerics` needs three things said explicitly: divisions are correctly rounded
(`div_rn`; a plain `/` compiles to a 2-ulp approximation), inf becomes nan before the saturating
conversion would make it the largest value, and amax is compared as the integer of its bits, where
nan is above inf is above every number, so that both propagate.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8patch import numerics

# Tile of x and warps, found with scripts/tune_quantize.py on an H200.
_TILE = (32, 128, 4)
_AMAX_TILE = (32, 256, 8)


@triton.jit
def _tile(x, pid, rows, cols, stride_m, stride_k, width, BM: tl.constexpr, BK: tl.constexpr):
    """Offsets and FP32 values of tile `pid`; zero outside x."""
    across = tl.cdiv(width, BK)
    m = (pid // across) * BM + tl.arange(0, BM)
    k = (pid % across) * BK + tl.arange(0, BK)
    inside = (m[:, None] < rows) & (k[None, :] < cols)
    offsets = m.to(tl.int64)[:, None] * stride_m + k.to(tl.int64)[None, :] * stride_k
    return m, k, tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _max_bits(values):
    """The largest |value| of a tile, as the integer of its FP32 bits."""
    return tl.max(tl.abs(values).to(tl.int32, bitcast=True))


@triton.jit
def _amax_kernel(x, bits, rows, cols, stride_m, stride_k, BM: tl.constexpr, BK: tl.constexpr):
    _, _, values = _tile(x, tl.program_id(0), rows, cols, stride_m, stride_k, cols, BM, BK)
    tl.atomic_max(bits, _max_bits(values), sem="relaxed")


@triton.jit
def _live_scale(bits, limit, FLOOR: tl.constexpr):
    amax = tl.load(bits).to(tl.float32, bitcast=True)
    scale = tl.div_rn(limit, tl.maximum(amax, FLOOR))
    return tl.where(amax < float("inf"), scale, 1.0)


@triton.jit
def _count(counts, column, flags):
    number = tl.sum(flags.to(tl.int32))
    if number > 0:
        tl.atomic_add(counts + column, number.to(tl.int64), sem="relaxed")


@triton.jit
def _quantize_kernel(
    x,
    x_fp8,
    x_fp8_t,
    scale,
    scale_inv,
    bits,
    amax,
    counts,
    limit,
    rows,
    cols,
    padded_rows,
    padded_cols,
    stride_m,
    stride_k,
    LARGEST: tl.constexpr,
    CLIPS_ABOVE: tl.constexpr,
    FLUSHES_TO: tl.constexpr,
    FLOOR: tl.constexpr,
    LIVE: tl.constexpr,
    OBSERVE: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    pid = tl.program_id(0)
    m, k, values = _tile(x, pid, rows, cols, stride_m, stride_k, padded_cols, BM, BK)
    if LIVE:
        used = _live_scale(bits, limit, FLOOR)
    else:
        used = tl.load(scale)
    if pid == 0:
        tl.store(scale_inv, tl.div_rn(1.0, used))

    # Arithmetic is what limits this kernel, so the common path has as little of it as can be: what
    # only an outlier needs is decided once a tile, from the tile's amax.
    scaled = values * used
    tile_bits = _max_bits(values)
    largest = tile_bits.to(tl.float32, bitcast=True)
    clips = (largest * used <= CLIPS_ABOVE) == 0
    if clips:
        finite = tl.abs(values) < float("inf")
        if OBSERVE:
            _count(counts, 0, finite & (tl.abs(scaled) > CLIPS_ABOVE))
            _count(counts, 2, finite == 0)
        clamped = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        scaled = tl.where(finite, clamped, float("nan"))
    quantized = scaled.to(x_fp8.dtype.element_ty)

    wide_m = m.to(tl.int64)
    inside = (m[:, None] < rows) & (k[None, :] < padded_cols)
    tl.store(x_fp8 + wide_m[:, None] * padded_cols + k[None, :], quantized, mask=inside)
    if TRANSPOSE:
        inside_t = (k[:, None] < padded_cols) & (m[None, :] < padded_rows)
        offsets = k.to(tl.int64)[:, None] * padded_rows + m[None, :]
        tl.store(x_fp8_t + offsets, tl.trans(quantized), mask=inside_t)
    if OBSERVE:
        # Thousands of atomics on one address would queue up; most tiles have nothing to add to it.
        slot = amax.to(tl.pointer_type(tl.int32), bitcast=True)
        if tile_bits > tl.load(slot):
            tl.atomic_max(slot, tile_bits, sem="relaxed")
        _count(counts, 1, (values != 0.0) & (tl.abs(scaled) <= FLUSHES_TO))
        if pid == 0:
            # A size of 1 is a Python constant in here, which has no `.to`.
            tl.atomic_add(counts + 3, (tl.zeros((), tl.int64) + rows) * cols, sem="relaxed")


def quantize(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    limit: float,
    dtype: torch.dtype,
    *,
    live: bool,
    observe: bool,
    transpose: bool,
    tile: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.quantize.quantize` on the GPU; x [M, K] holds at least one element."""
    rows, cols = x.shape
    padded_rows, padded_cols = -(-rows // 16) * 16, -(-cols // 16) * 16
    x_fp8 = torch.empty(rows, padded_cols, dtype=dtype, device=x.device)
    shape = (padded_cols, padded_rows) if transpose else (0, 0)
    x_fp8_t = torch.empty(shape, dtype=dtype, device=x.device)
    scale_inv = torch.empty((), device=x.device)
    strides: Any = x.stride()
    bits = scale
    if live:
        bits = torch.zeros((), dtype=torch.int32, device=x.device)
        bm, bk, warps = _AMAX_TILE
        grid = (triton.cdiv(rows, bm) * triton.cdiv(cols, bk),)
        _amax_kernel[grid](x, bits, rows, cols, *strides, BM=bm, BK=bk, num_warps=warps)
    bm, bk, warps = tile or _TILE
    # The transpose has padded rows of its own to fill with zeros.
    height = padded_rows if transpose else rows
    grid = (triton.cdiv(height, bm) * triton.cdiv(padded_cols, bk),)
    _quantize_kernel[grid](
        x,
        x_fp8,
        x_fp8_t,
        scale,
        scale_inv,
        bits,
        amax,
        counts,
        limit,
        rows,
        cols,
        padded_rows,
        padded_cols,
        *strides,
        LARGEST=numerics.FP8_MAX[dtype],
        CLIPS_ABOVE=numerics.CLIPS_ABOVE[dtype],
        FLUSHES_TO=numerics.FLUSHES_TO[dtype],
        FLOOR=numerics.AMAX_FLOOR,
        LIVE=live,
        OBSERVE=observe,
        TRANSPOSE=transpose,
        BM=bm,
        BK=bk,
        num_warps=warps,
    )
    return x_fp8, x_fp8_t, scale_inv
