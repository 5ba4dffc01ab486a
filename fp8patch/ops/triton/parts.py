"""The cast of a matrix whose columns lie in two or three tensors, side by side.

The kernels are those of quantize.py and column_sums.py, to the letter: each of their programs stays
in one range of columns, so it is given the one part that these lie in, as if it were the whole. The
parts' widths are multiples of a program's columns for that.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8patch.ops.triton.column_sums import cast_and_add, cast_and_add_kernel, programs_of
from fp8patch.ops.triton.launch import Launcher, blocks_of, empty_matrix, size_class
from fp8patch.ops.triton.packed import cast_and_add_packed_kernel, packs, quantize_packed_kernel
from fp8patch.ops.triton.packed_tile import REGISTERS
from fp8patch.ops.triton.quantize import quantize_constants, quantize_kernel, tile_of

# Columns of every tile in quantize.py.
COLUMNS = 64


@triton.jit
def _part(x, x1, x2, width, begin1, begin2, stride, stride1, stride2, BK: tl.constexpr):
    """The part that this program reads, as a pointer to where column 0 of the whole would be."""
    k = (tl.program_id(0) % tl.cdiv(width, BK)) * BK
    found = tl.where(k < begin1, x, x1 - begin1)
    stride_m = tl.where(k < begin1, stride, stride1)
    return tl.where(k < begin2, found, x2 - begin2), tl.where(k < begin2, stride_m, stride2)


# `cols` is not specialised, as in the kernels that are called.
@triton.jit(do_not_specialize=["cols"])
def _quantize_kernel(
    x, x1, x2, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts,
    limit, rows, cols, height, width, begin1, begin2, stride, stride1, stride2,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    LIVE: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    part, stride_m = _part(x, x1, x2, width, begin1, begin2, stride, stride1, stride2, BK)
    quantize_kernel(
        part, part, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts,
        limit, rows, cols, height, width, stride_m, 1,
        LARGEST, CLIPS, FLUSHES_TO, FLOOR, LIVE, OBSERVE, TRANSPOSE, EVEN, FULL, FORM, PTX, BM, BK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["cols", "tiles", "walk"])
def _cast_and_add_kernel(
    x, x1, x2, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts, partial,
    limit, rows, cols, height, width, begin1, begin2, stride, stride1, stride2, tiles, walk,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    LIVE: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    part, stride_m = _part(x, x1, x2, width, begin1, begin2, stride, stride1, stride2, BK)
    cast_and_add_kernel(
        part, part, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts, partial,
        limit, rows, cols, height, width, stride_m, 1, tiles, walk,
        LARGEST, CLIPS, FLUSHES_TO, FLOOR, LIVE, OBSERVE, TRANSPOSE, EVEN, FULL, FORM, PTX, BM, BK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["cols"])
def _quantize_packed_kernel(
    x, x1, x2, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts,
    limit, rows, cols, height, width, begin1, begin2, stride, stride1, stride2,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    LIVE: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    part, stride_m = _part(x, x1, x2, width, begin1, begin2, stride, stride1, stride2, BK)
    quantize_packed_kernel(
        part, part, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts,
        limit, rows, cols, height, width, stride_m, 1,
        LARGEST, CLIPS, FLUSHES_TO, FLOOR, LIVE, OBSERVE, TRANSPOSE, EVEN, FULL, FORM, PTX, BM, BK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["cols", "tiles", "walk"])
def _cast_and_add_packed_kernel(
    x, x1, x2, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts, partial,
    limit, rows, cols, height, width, begin1, begin2, stride, stride1, stride2, tiles, walk,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    LIVE: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    part, stride_m = _part(x, x1, x2, width, begin1, begin2, stride, stride1, stride2, BK)
    cast_and_add_packed_kernel(
        part, part, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts, partial,
        limit, rows, cols, height, width, stride_m, 1, tiles, walk,
        LARGEST, CLIPS, FLUSHES_TO, FLOOR, LIVE, OBSERVE, TRANSPOSE, EVEN, FULL, FORM, PTX, BM, BK,
    )  # fmt: skip


_quantize = Launcher(_quantize_kernel)
_cast_and_add = Launcher(_cast_and_add_kernel)
_quantize_packed = Launcher(_quantize_packed_kernel, maxnreg=REGISTERS)
_cast_and_add_packed = Launcher(_cast_and_add_packed_kernel, maxnreg=REGISTERS)


def can_read(parts: Sequence[Tensor]) -> bool:
    """Are these parts as the kernels want them?"""
    return 2 <= len(parts) <= 3 and all(
        part.shape[1] % COLUMNS == 0 and part.stride(1) == 1 and part.numel() for part in parts
    )


def quantize_parts(
    parts: Sequence[Tensor],
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    limit: float,
    dtype: torch.dtype,
    *,
    observe: bool,
    transpose: bool,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`quantize.quantize` of `torch.cat(parts, 1)`, with `live` False; `can_read(parts)`."""
    x, x1, x2 = (*parts, parts[-1])[:3]
    begin1 = x.shape[1]
    # Of two parts no program reads a third one.
    begin2 = begin1 + x1.shape[1]
    width = sum(part.shape[1] for part in parts)
    rows = x.shape[0]
    height = (rows + 15) // 16 * 16
    packed = packs(x.dtype, x.device)
    tile = tile_of(x.dtype, column_sums, "", packed)
    bm, bk, warps = tile
    assert bk == COLUMNS
    # The transpose has padded rows of its own to fill with zeros.
    down, across = blocks_of(height if transpose else rows, bm), width // bk
    x_fp8 = empty_matrix(rows, width, dtype, x.device)
    x_fp8_t = empty_matrix(*((width, height) if transpose else (0, 0)), dtype, x.device)
    scale_inv = torch.empty_like(scale)
    flags = (False, observe, transpose, rows % bm == 0, True)
    sizes = rows, width, height, width, begin1, begin2, x.stride(0), x1.stride(0), x2.stride(0)
    aligned = x.data_ptr() % 16, x1.data_ptr() % 16, x2.data_ptr() % 16
    variant = (x.dtype, dtype, flags, tile, aligned, *map(size_class, sizes))
    tensors = x, x1, x2, x_fp8, x_fp8_t, scale, scale_inv, scale, amax, counts
    numbers = limit, *sizes

    def constants() -> dict[str, Any]:
        return quantize_constants(dtype, x.is_cuda, flags, "", bm, bk)

    sums = None
    blocks = down * across
    if column_sums:
        shape, programs = (width, width), blocks if packed else programs_of("")
        sums = cast_and_add(
            variant, down, across, tensors, numbers, constants, warps, shape, programs,
            _cast_and_add_packed if packed else _cast_and_add,
        )  # fmt: skip
    else:
        launch = _quantize_packed if packed else _quantize
        launch(variant, blocks, tensors, numbers, constants, warps)
    return x_fp8, x_fp8_t, scale_inv, sums
