"""Cast, transpose, amax and counts in one read of the input.

A tile of x is read once; its FP8 values go out twice, as they are and transposed, and its amax and
counts go to the slot by atomics (cast_tile.py). With a scale from the tensor itself (`live`) a
first kernel finds amax, and the second derives the scale from it on the device: no sync.

With column sums the kernel of column_sums.py takes the place of the one here, and for most casts of
BF16 values (`packs`) those of packed.py take the place of both.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.triton.cast_tile import (
    CONSTANTS,
    bits_of,
    live_scale,
    load_row,
    quantize_tile,
)
from fp8patch.ops.triton.column_sums import cast_and_add, programs_of
from fp8patch.ops.triton.launch import Launcher, blocks_of, empty_matrix, size_class
from fp8patch.ops.triton.packed import (
    cast_and_add_packed_launch,
    packs,
    quantize_packed_launch,
)
from fp8patch.ops.triton.packing import ASSEMBLY

Tile = tuple[int, int, int]

# Rows, columns and warps of a tile, and of one with column sums: of FP16, of FP32, of values with a
# form, and as packed.py casts. Found with scripts/tune_quantize.py on an H200, where BF16 casts of
# 25 MB and more reach 91 to 95 % of the speed of a copy, 80 to 87 with column sums, 68 to 69 of
# GELU, 86 to 89 of SiLU-and-mul, and 81 to 84 of GELU's gradient.
_NARROW, _WIDE = ((64, 64, 2), (64, 64, 4)), ((64, 64, 4), (32, 64, 2))
_FORMED, _PACKED = ((32, 64, 2), (32, 64, 4)), ((64, 64, 2), (128, 64, 4))
_AMAX_TILE = (32, 256, 8)


@triton.jit
def _amax_kernel(
    x, bits, rows, cols, stride_m, stride_k, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    across = tl.cdiv(cols, BK)
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    k = (tl.program_id(0) % across) * BK + tl.arange(0, BK)
    values = load_row(x, m, k, rows, cols, stride_m, stride_k, EVEN)
    tl.atomic_max(bits, tl.max(bits_of(values)), sem="relaxed")


# `number` is the limit of a live scale or the factor of a form; no cast has both. (With a parameter
# more the others move, and ptxas of Triton 3.8 gives gelu_tanh_backward 127 registers, not 96.)
#
# `cols` is not specialised: as a constant 1 it makes neighbours zeros that are known to be equal,
# and ptxas 12.8 converts a pair of equal registers wrongly (F2FP merges garbage in).
@triton.jit(do_not_specialize=["cols"])
def quantize_kernel(
    x, y, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts,
    number, rows, cols, height, width, stride_m, stride_k,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    LIVE: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    across = tl.cdiv(width, BK)
    w = (pid // across) * (BM // 4) + tl.arange(0, BM // 4)
    k = (pid % across) * BK + tl.arange(0, BK)
    if LIVE:
        used = live_scale(bits, number, FLOOR)
    else:
        used = tl.load(scale)
    # (`width` is known to be a multiple of 16.)
    end = width if FULL else cols
    quantize_tile(
        x, y, number, x_fp8, x_fp8_t, amax, counts, used, w, k, rows, end, width, height,
        stride_m, stride_k, LARGEST, CLIPS, FLUSHES_TO, OBSERVE, TRANSPOSE, EVEN, FORM, PTX,
    )  # fmt: skip
    if pid == 0:
        tl.store(scale_inv, tl.div_rn(1.0, used))
        if OBSERVE:
            # A size of 1 is a Python constant in here, which has no `.to`.
            tl.atomic_add(counts + 3, (tl.zeros((), tl.int64) + rows) * cols, sem="relaxed")


def quantize_constants(
    dtype: torch.dtype, on_gpu: bool, flags: tuple[bool, ...], form: str, bm: int, bk: int
) -> dict[str, Any]:
    names = ("LIVE", "OBSERVE", "TRANSPOSE", "EVEN", "FULL")
    return {
        **CONSTANTS[dtype],
        "FLOOR": numerics.AMAX_FLOOR,
        **dict(zip(names, flags, strict=True)),
        "FORM": form,
        "PTX": ASSEMBLY[dtype] if on_gpu else "",
        "BM": bm,
        "BK": bk,
    }


_quantize = Launcher(quantize_kernel)
_amax = Launcher(_amax_kernel)


def tile_of(dtype: torch.dtype, column_sums: bool, form: str, packed: bool) -> Tile:
    """Rows, columns and warps of a tile for values of `dtype`; `packed`: as packed.py casts."""
    if packed:
        return _PACKED[column_sums]
    if form:
        return _FORMED[column_sums]
    return (_WIDE if dtype == torch.float32 else _NARROW)[column_sums]


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
    form: str = "",
    y: Tensor | None = None,
    factor: float = 1.0,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`ops.quantize.quantize_now` on the GPU; x [M, K] holds at least one element.

    With a `form` (forms.py), of x and of y where it reads two: y is like x, strides included, or
    where it is a mask, bool; `live` is False. `factor` is of dropout.
    """
    rows, cols = x.shape
    stride_m, stride_k = x.stride()
    device = x.device
    height, width = (rows + 15) // 16 * 16, (cols + 15) // 16 * 16
    # (As bytes, a mask can be loaded long before it is looked at.)
    y = x if y is None else y.view(torch.uint8) if y.dtype == torch.bool else y
    packed = packs(x.dtype, device, column_sums, form)
    tile = tile or tile_of(x.dtype, column_sums, form, packed)
    bm, bk, warps = tile
    # The transpose has padded rows of its own to fill with zeros.
    down = blocks_of(height if transpose else rows, bm)
    across = blocks_of(width, bk)
    x_fp8 = empty_matrix(rows, width, dtype, device)
    x_fp8_t = empty_matrix(*((width, height) if transpose else (0, 0)), dtype, device)
    scale_inv = torch.empty_like(scale)
    bits = live_amax(x) if live else scale
    full = cols == width
    even = full and rows % bm == 0 and width % bk == 0
    flags = (live, observe, transpose, even, full)
    variant = (
        x.dtype,
        dtype,
        flags,
        tile,
        form,
        x.data_ptr() % 16,
        y.data_ptr() % 16,
        size_class(rows),
        cols >> 31,
        size_class(height),
        size_class(width),
        size_class(stride_m),
        size_class(stride_k),
    )
    tensors = x, y, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts
    numbers = factor if form else limit, rows, cols, height, width, stride_m, stride_k

    def constants() -> dict[str, Any]:
        return quantize_constants(dtype, x.is_cuda, flags, form, bm, bk)

    sums = None
    blocks, shape = down * across, (cols, width)
    if column_sums and packed:
        sums = cast_and_add(
            variant, down, across, tensors, numbers, constants, warps, shape, blocks,
            cast_and_add_packed_launch,
        )  # fmt: skip
    elif column_sums:
        sums = cast_and_add(
            variant, down, across, tensors, numbers, constants, warps, shape, programs_of(form)
        )
    else:
        launch = quantize_packed_launch if packed else _quantize
        launch(variant, blocks, tensors, numbers, constants, warps)
    return x_fp8, x_fp8_t, scale_inv, sums
