"""The transpose of a cast, alone: no rows, no amax, no counts. Parts in cast_tile.py."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.triton.cast_tile import (
    CONSTANTS,
    bits_of,
    exceeds,
    load_row,
    max_abs,
    outlier,
    store_transposed,
)
from fp8patch.ops.triton.launch import Launcher, blocks_of, empty_matrix, size_class
from fp8patch.ops.triton.packing import ASSEMBLY

# Rows, columns and warps of a tile.
_TILE = (64, 64, 4)


@triton.jit
def write_transposed(
    x_fp8_t, v0, v1, v2, v3, used, w, k, width, height,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Cast rows 4 w to 4 w + 3 and write them transposed, outliers as the other casts do."""
    tile_bits = tl.max(bits_of(max_abs(max_abs(v0, v1), max_abs(v2, v3))))
    if exceeds(tile_bits, used, CLIPS):
        s0 = outlier(v0, used, x_fp8_t, LARGEST, CLIPS, False)
        s1 = outlier(v1, used, x_fp8_t, LARGEST, CLIPS, False)
        s2 = outlier(v2, used, x_fp8_t, LARGEST, CLIPS, False)
        s3 = outlier(v3, used, x_fp8_t, LARGEST, CLIPS, False)
        store_transposed(x_fp8_t, s0, s1, s2, s3, w, k, width, height, EVEN, PTX)
    else:
        store_transposed(
            x_fp8_t, v0 * used, v1 * used, v2 * used, v3 * used, w, k, width, height, EVEN, PTX
        )


# `cols` is not specialised: see quantize.py.
@triton.jit(do_not_specialize=["cols"])
def transpose_again_kernel(
    x, x_fp8_t, scale_inv, rows, cols, height, width,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    PTX: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    across = tl.cdiv(width, BK)
    w = (pid // across) * (BM // 4) + tl.arange(0, BM // 4)
    k = (pid % across) * BK + tl.arange(0, BK)
    end = width if FULL else cols
    used = tl.div_rn(1.0, tl.load(scale_inv))
    v0 = load_row(x, 4 * w, k, rows, end, cols, 1, EVEN)
    v1 = load_row(x, 4 * w + 1, k, rows, end, cols, 1, EVEN)
    v2 = load_row(x, 4 * w + 2, k, rows, end, cols, 1, EVEN)
    v3 = load_row(x, 4 * w + 3, k, rows, end, cols, 1, EVEN)
    write_transposed(x_fp8_t, v0, v1, v2, v3, used, w, k, width, height, LARGEST, CLIPS, EVEN, PTX)


_launch = Launcher(transpose_again_kernel)


def transpose_again(x: Tensor, scale_inv: Tensor) -> Tensor:
    """`ops.transpose_again` on the GPU; x [M, K] is contiguous and holds at least one element."""
    rows, cols = x.shape
    height, width = (rows + 15) // 16 * 16, (cols + 15) // 16 * 16
    x_fp8_t = empty_matrix(width, height, numerics.E4M3, x.device)
    bm, bk, warps = _TILE
    full = cols == width
    even = full and rows % bm == 0 and width % bk == 0
    sizes = size_class(rows), cols >> 31, size_class(height), size_class(width)
    variant = (x.dtype, x.data_ptr() % 16, even, full, sizes)

    def constants() -> dict[str, Any]:
        known = CONSTANTS[numerics.E4M3]
        return {
            "LARGEST": known["LARGEST"],
            "CLIPS": known["CLIPS"],
            "EVEN": even,
            "FULL": full,
            "PTX": ASSEMBLY[numerics.E4M3] if x.is_cuda else "",
            "BM": bm,
            "BK": bk,
        }

    grid = blocks_of(height, bm) * blocks_of(width, bk)
    numbers = rows, cols, height, width
    _launch(variant, grid, (x, x_fp8_t, scale_inv), numbers, constants, warps)
    return x_fp8_t
