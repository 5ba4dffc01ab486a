"""Cast, transpose, amax, counts and column sums in one read of the input.

A tile of x is read once; its FP8 values go out twice, as they are and transposed, and its amax and
counts go to the slot by atomics. With a scale from the tensor itself (`live`) a first kernel finds
amax, and the second derives the scale from it on the device: no sync.

Single bytes are slow to transpose through shared memory. So a thread reads the same columns of four
neighbouring rows and packs their results into one 32-bit word (packing.py): the transpose then
moves words.

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
from fp8patch.ops.triton.launch import Launcher, blocks_of, size_class
from fp8patch.ops.triton.packing import ASSEMBLY, cast_four

# Rows, columns and warps of a tile: of two-byte values, of these with column sums, and of FP32.
# Found with scripts/tune_quantize.py on an H200, where they reach 85 to 95 % of the speed of a copy
# (with column sums 54 to 78 %).
_NARROW, _NARROW_SUMS, _WIDE = (64, 64, 2), (32, 64, 2), (64, 64, 4)
_AMAX_TILE = (32, 256, 8)


@triton.jit
def load_row(x, m, k, rows, cols, stride_m, stride_k, EVEN: tl.constexpr):
    """FP32 values of rows m and columns k; zero outside x."""
    offsets = m.to(tl.int64)[:, None] * stride_m + k.to(tl.int64)[None, :] * stride_k
    if EVEN:
        return tl.load(x + offsets).to(tl.float32)
    inside = (m[:, None] < rows) & (k[None, :] < cols)
    return tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def bits_of(values):
    """|value| as the integer of its FP32 bits, which orders as the values do, and nan on top."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@triton.jit
def _amax_kernel(
    x, bits, rows, cols, stride_m, stride_k, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    across = tl.cdiv(cols, BK)
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    k = (tl.program_id(0) % across) * BK + tl.arange(0, BK)
    values = load_row(x, m, k, rows, cols, stride_m, stride_k, EVEN)
    tl.atomic_max(bits, tl.max(bits_of(values)), sem="relaxed")


@triton.jit
def live_scale(bits, limit, FLOOR: tl.constexpr):
    amax = tl.load(bits).to(tl.float32, bitcast=True)
    scale = tl.div_rn(limit, tl.maximum(amax, FLOOR))
    return tl.where(amax < float("inf"), scale, 1.0)


@triton.jit
def _one(flags):
    # As floats: the compiler turns a sum of booleans into bit masks and their population count, at
    # six instructions an element.
    return tl.where(flags, 1.0, 0.0)


@triton.jit
def add_count(counts, column, ones):
    number = tl.sum(ones)
    if number > 0.0:
        tl.atomic_add(counts + column, number.to(tl.int64), sem="relaxed")


@triton.jit
def flushed(values, used, FLUSHES_TO: tl.constexpr):
    return _one((values != 0.0) & (tl.abs(values * used) <= FLUSHES_TO))


@triton.jit
def _store_row(x_fp8, quantized, m, k, rows, width, EVEN: tl.constexpr):
    target = x_fp8.to(tl.pointer_type(tl.uint8), bitcast=True)
    target += m.to(tl.int64)[:, None] * width + k[None, :]
    if EVEN:
        tl.store(target, quantized)
    else:
        tl.store(target, quantized, mask=(m[:, None] < rows) & (k[None, :] < width))


@triton.jit
def store_tile(
    x_fp8, x_fp8_t, s0, s1, s2, s3, w, k, rows, width, height,
    TRANSPOSE: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Cast and write rows 4 w to 4 w + 3, and the same transposed, as word w of each row."""
    words, b0, b1, b2, b3 = cast_four(s0, s1, s2, s3, x_fp8.dtype.element_ty, PTX)
    _store_row(x_fp8, b0, 4 * w, k, rows, width, EVEN)
    _store_row(x_fp8, b1, 4 * w + 1, k, rows, width, EVEN)
    _store_row(x_fp8, b2, 4 * w + 2, k, rows, width, EVEN)
    _store_row(x_fp8, b3, 4 * w + 3, k, rows, width, EVEN)
    if TRANSPOSE:
        # `height` is a multiple of 16, so that each row of the transpose holds whole words.
        # (w and not a row divided by four: the compiler has to see that neighbours are neighbours.)
        words_a_row = tl.multiple_of(height // 4, 4)
        offsets = k.to(tl.int64)[:, None] * words_a_row + w[None, :]
        target = x_fp8_t.to(tl.pointer_type(tl.uint32), bitcast=True) + offsets
        if EVEN:
            tl.store(target, tl.trans(words))
        else:
            inside = (k[:, None] < width) & (w[None, :] < words_a_row)
            tl.store(target, tl.trans(words), mask=inside)


@triton.jit
def outlier(
    values, used, counts, LARGEST: tl.constexpr, CLIPS: tl.constexpr, OBSERVE: tl.constexpr
):
    """What a tile with an element that clips, or is not finite, is scaled to."""
    scaled = values * used
    finite = tl.abs(values) < float("inf")
    if OBSERVE:
        add_count(counts, 0, _one(finite & (tl.abs(scaled) > CLIPS)))
        add_count(counts, 2, _one(finite == 0))
    return tl.where(finite, tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST), float("nan"))


@triton.jit
def max_abs(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_tile(
    x, x_fp8, x_fp8_t, amax, counts, used, w, k, rows, cols, width, height, stride_m, stride_k,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr,
    OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Cast rows 4 w to 4 w + 3, write them, and add to the slot what was seen.

    Returns the sums of each four values.
    """
    v0 = load_row(x, 4 * w, k, rows, cols, stride_m, stride_k, EVEN)
    v1 = load_row(x, 4 * w + 1, k, rows, cols, stride_m, stride_k, EVEN)
    v2 = load_row(x, 4 * w + 2, k, rows, cols, stride_m, stride_k, EVEN)
    v3 = load_row(x, 4 * w + 3, k, rows, cols, stride_m, stride_k, EVEN)
    store_tile(
        x_fp8, x_fp8_t, v0 * used, v1 * used, v2 * used, v3 * used, w, k, rows, width, height,
        TRANSPOSE, EVEN, PTX,
    )  # fmt: skip
    sums = (v0 + v1) + (v2 + v3)
    tile_bits = tl.max(bits_of(max_abs(max_abs(v0, v1), max_abs(v2, v3))))
    if OBSERVE:
        # Thousands of atomics on one address would queue up; most tiles have nothing to add to it.
        slot = amax.to(tl.pointer_type(tl.int32), bitcast=True)
        if tile_bits > tl.load(slot):
            tl.atomic_max(slot, tile_bits, sem="relaxed")
        lost = flushed(v0, used, FLUSHES_TO) + flushed(v1, used, FLUSHES_TO)
        lost += flushed(v2, used, FLUSHES_TO) + flushed(v3, used, FLUSHES_TO)
        add_count(counts, 1, lost)
    # What only an outlier needs is done again, from memory, in the rare tile that holds one.
    if (tile_bits.to(tl.float32, bitcast=True) * used <= CLIPS) == 0:
        v0 = load_row(x, 4 * w, k, rows, cols, stride_m, stride_k, EVEN)
        v1 = load_row(x, 4 * w + 1, k, rows, cols, stride_m, stride_k, EVEN)
        v2 = load_row(x, 4 * w + 2, k, rows, cols, stride_m, stride_k, EVEN)
        v3 = load_row(x, 4 * w + 3, k, rows, cols, stride_m, stride_k, EVEN)
        s0 = outlier(v0, used, counts, LARGEST, CLIPS, OBSERVE)
        s1 = outlier(v1, used, counts, LARGEST, CLIPS, OBSERVE)
        s2 = outlier(v2, used, counts, LARGEST, CLIPS, OBSERVE)
        s3 = outlier(v3, used, counts, LARGEST, CLIPS, OBSERVE)
        store_tile(
            x_fp8, x_fp8_t, s0, s1, s2, s3, w, k, rows, width, height, TRANSPOSE, EVEN, PTX
        )  # fmt: skip
    return sums


# `cols` is not specialised: as a constant 1 it makes neighbours zeros that are known to be equal,
# and ptxas 12.8 converts a pair of equal registers wrongly (F2FP merges garbage in).
@triton.jit(do_not_specialize=["cols"])
def _quantize_kernel(
    x, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts, sums,
    limit, rows, cols, height, width, stride_m, stride_k,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    LIVE: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, SUMS: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, PTX: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    across = tl.cdiv(width, BK)
    w = (pid // across) * (BM // 4) + tl.arange(0, BM // 4)
    k = (pid % across) * BK + tl.arange(0, BK)
    if LIVE:
        used = live_scale(bits, limit, FLOOR)
    else:
        used = tl.load(scale)
    # (`width` is known to be a multiple of 16.)
    end = width if FULL else cols
    tile_sums = quantize_tile(
        x, x_fp8, x_fp8_t, amax, counts, used, w, k, rows, end, width, height, stride_m, stride_k,
        LARGEST, CLIPS, FLUSHES_TO, OBSERVE, TRANSPOSE, EVEN, PTX,
    )  # fmt: skip
    if SUMS:
        target = sums + (pid // across).to(tl.int64) * width + k
        tl.store(target, tl.sum(tile_sums, 0), mask=k < width)
    if pid == 0:
        tl.store(scale_inv, tl.div_rn(1.0, used))
        if OBSERVE:
            # A size of 1 is a Python constant in here, which has no `.to`.
            tl.atomic_add(counts + 3, (tl.zeros((), tl.int64) + rows) * cols, sem="relaxed")


@triton.jit
def _add_rows_kernel(partial, sums, rows, cols, width, BM: tl.constexpr, BK: tl.constexpr):
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    total = tl.zeros((BM, BK), tl.float32)
    for start in range(0, rows, BM):
        m = start + tl.arange(0, BM)
        inside = (m[:, None] < rows) & (k[None, :] < width)
        total += tl.load(partial + m[:, None] * width + k[None, :], mask=inside, other=0.0)
    tl.store(sums + k, tl.sum(total, 0), mask=k < cols)


def _quantize_constants(
    dtype: torch.dtype, on_gpu: bool, flags: tuple[bool, ...], bm: int, bk: int
) -> dict[str, Any]:
    names = ("LIVE", "OBSERVE", "TRANSPOSE", "SUMS", "EVEN", "FULL")
    return {
        **CONSTANTS[dtype],
        "FLOOR": numerics.AMAX_FLOOR,
        **dict(zip(names, flags, strict=True)),
        "PTX": ASSEMBLY[dtype] if on_gpu else "",
        "BM": bm,
        "BK": bk,
    }


CONSTANTS = {
    dtype: {
        "LARGEST": numerics.FP8_MAX[dtype],
        "CLIPS": numerics.CLIPS_ABOVE[dtype],
        "FLUSHES_TO": numerics.FLUSHES_TO[dtype],
    }
    for dtype in (numerics.E4M3, numerics.E5M2)
}
_quantize = Launcher(_quantize_kernel)
_amax = Launcher(_amax_kernel)
_add_rows = Launcher(_add_rows_kernel)


def tile_of(dtype: torch.dtype, column_sums: bool) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile for values of `dtype`."""
    if dtype == torch.float32:
        return _WIDE
    return _NARROW_SUMS if column_sums else _NARROW


def live_amax(x: Tensor) -> Tensor:
    """max |x| of a non-empty [M, K] as the bits of an FP32 number (int32 scalar), for `live`."""
    rows, cols = x.shape
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    bm, bk, warps = _AMAX_TILE
    sizes = rows, cols, *x.stride()
    even = rows % bm == 0 and cols % bk == 0
    variant = (x.dtype, x.data_ptr() % 16, even, *map(size_class, sizes))
    constants = {"EVEN": even, "BM": bm, "BK": bk}
    grid = blocks_of(rows, bm) * blocks_of(cols, bk)
    _amax(variant, grid, (x, bits), sizes, constants, warps)
    return bits


def _add_rows_of(partial: Tensor, cols: int) -> Tensor:
    rows, width = partial.shape
    sums = torch.empty(cols, dtype=torch.float32, device=partial.device)
    sizes = rows, cols, width
    variant = tuple(map(size_class, sizes))
    constants = {"BM": 64, "BK": 32}
    _add_rows(variant, blocks_of(cols, 32), (partial, sums), sizes, constants, 4)
    return sums


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
    column_sums: bool,
    tile: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`ops.quantize.quantize_now` on the GPU; x [M, K] holds at least one element."""
    rows, cols = x.shape
    stride_m, stride_k = x.stride()
    device = x.device
    height, width = (rows + 15) // 16 * 16, (cols + 15) // 16 * 16
    tile = tile or tile_of(x.dtype, column_sums)
    bm, bk, warps = tile
    # The transpose has padded rows of its own to fill with zeros.
    down = blocks_of(height if transpose else rows, bm)
    x_fp8 = torch.empty((rows, width), dtype=dtype, device=device)
    x_fp8_t = torch.empty((width, height) if transpose else (0, 0), dtype=dtype, device=device)
    scale_inv = torch.empty((), dtype=torch.float32, device=device)
    sums = torch.empty((down, width), dtype=torch.float32, device=device) if column_sums else None
    bits = live_amax(x) if live else scale
    full = cols == width
    even = full and rows % bm == 0 and width % bk == 0
    sizes = rows, cols, height, width, stride_m, stride_k
    flags = (live, observe, transpose, column_sums, even, full)
    variant = (
        x.dtype,
        dtype,
        flags,
        tile,
        x.data_ptr() % 16,
        size_class(rows),
        cols >> 31,
        size_class(height),
        size_class(width),
        size_class(stride_m),
        size_class(stride_k),
    )
    _quantize(
        variant,
        down * blocks_of(width, bk),
        (
            x,
            x_fp8,
            x_fp8_t,
            scale,
            scale_inv,
            bits,
            amax,
            counts,
            scale_inv if sums is None else sums,
        ),
        (limit, *sizes),
        lambda: _quantize_constants(dtype, x.is_cuda, flags, bm, bk),
        warps,
    )
    return x_fp8, x_fp8_t, scale_inv, None if sums is None else _add_rows_of(sums, cols)
