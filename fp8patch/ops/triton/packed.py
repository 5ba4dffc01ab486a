"""The cast of BF16 values, with or without column sums, by a program a tile.

The kernels take what those of quantize.py and column_sums.py take, and replace them where
`packs`: packed_tile.py says what is faster about a tile.

Column sums come from the tensor cores: a row of ones times the tile, whose products are exact and
are added in FP32. That takes a tenth of the instructions that adding across threads does, so that
a program need not walk through many tiles for its sums to be worth their while.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from fp8patch.ops.triton.cast_tile import live_scale
from fp8patch.ops.triton.forms import is_stored
from fp8patch.ops.triton.launch import Launcher, capability
from fp8patch.ops.triton.packed_tile import REGISTERS, packed_rows, quantize_packed


@triton.jit
def _store_sums(target, p0, p1, p2, p3, k, width, PTX: tl.constexpr):
    """Write the sums over four rows and over fours of these; in FP32, of columns k."""
    if PTX == "":
        # (Triton's interpreter multiplies no BF16 matrices.)
        sums = (p0.to(tl.float32) + p1.to(tl.float32)) + (p2.to(tl.float32) + p3.to(tl.float32))
        tl.store(target + k, tl.sum(sums, 0), mask=k < width)
    else:
        # Sixteen times the same row: the least that a tensor core takes.
        ones = tl.full((16, p0.shape[0]), 1.0, tl.bfloat16)
        sums = tl.dot(ones, p0)
        sums = tl.dot(ones, p1, sums)
        sums = tl.dot(ones, p2, sums)
        sums = tl.dot(ones, p3, sums)
        row = tl.arange(0, 16)[:, None]
        tl.store(target + k[None, :] + row * 0, sums, mask=(row == 0) & (k[None, :] < width))


@triton.jit
def _quantize_tile(
    x, y, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts, partial,
    number, rows, cols, height, width, stride_m, stride_k,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    LIVE: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr, SUMS: tl.constexpr,
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
    p0, p1, p2, p3 = packed_rows(x, y, number, w, k, rows, end, stride_m, stride_k, EVEN, FORM, PTX)
    if SUMS:
        target = partial + (pid // across).to(tl.int64) * width
        _store_sums(target, p0, p1, p2, p3, k, width, PTX)
    quantize_packed(
        p0, p1, p2, p3, x, y, number, x_fp8, x_fp8_t, amax, counts, used, w, k, rows, end, width,
        height, stride_m, stride_k, LARGEST, CLIPS, FLUSHES_TO, OBSERVE, TRANSPOSE, EVEN, FORM, PTX,
    )  # fmt: skip
    if pid == 0:
        tl.store(scale_inv, tl.div_rn(1.0, used))
        if OBSERVE:
            # A size of 1 is a Python constant in here, which has no `.to`.
            tl.atomic_add(counts + 3, (tl.zeros((), tl.int64) + rows) * cols, sem="relaxed")


# `cols` is not specialised: see quantize.py.
@triton.jit(do_not_specialize=["cols"])
def quantize_packed_kernel(
    x, y, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts,
    number, rows, cols, height, width, stride_m, stride_k,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    LIVE: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    _quantize_tile(
        x, y, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts, amax,
        number, rows, cols, height, width, stride_m, stride_k,
        LARGEST, CLIPS, FLUSHES_TO, FLOOR, LIVE, OBSERVE, TRANSPOSE, EVEN, FULL, FORM, PTX, False,
        BM, BK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["cols", "tiles", "walk"])
def cast_and_add_packed_kernel(
    x, y, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts, partial,
    number, rows, cols, height, width, stride_m, stride_k, tiles, walk,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    LIVE: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # `walk` is 1.
    if PTX != "":
        # The kernel that adds up may come once all programs of this one have begun; it waits there.
        gdc_launch_dependents()
    _quantize_tile(
        x, y, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts, partial,
        number, rows, cols, height, width, stride_m, stride_k,
        LARGEST, CLIPS, FLUSHES_TO, FLOOR, LIVE, OBSERVE, TRANSPOSE, EVEN, FULL, FORM, PTX, True,
        BM, BK,
    )  # fmt: skip


quantize_packed_launch = Launcher(quantize_packed_kernel, maxnreg=REGISTERS)
cast_and_add_packed_launch = Launcher(cast_and_add_packed_kernel, maxnreg=REGISTERS)


def packs(
    dtype: torch.dtype, device: torch.device, column_sums: bool = False, form: str = ""
) -> bool:
    """Are values of `dtype` cast by the kernels here?

    A form would be computed once more for its sums: the compiler takes that for less work than
    giving its values to the tensor cores, which want other threads to hold them.
    """
    if dtype != torch.bfloat16 or (form and column_sums) or is_stored(form):
        return False
    return device.type != "cuda" or capability(device.index) >= (9, 0)
