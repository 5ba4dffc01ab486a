"""The cast of quantize.py with column sums of its input, the gradient of a bias, in the same read.

Sums over rows want many rows in one thread: a reduction across threads, and a row of partial sums
to write and read again, cost a tile more than its cast. So a program walks down many tiles of the
same columns, and its threads add up what they read; so they do with amax and counts. At the end it
writes one row of partial sums; a second kernel adds those up. Atomics would need no second kernel,
but add in another order, to other last digits, every time.

This is how FP32 and FP16 values are cast, and those that a form is computed of; for BF16 ones
packed.py has what is faster, and only the second kernel is the same (add_rows.py). That one is
launched before the first has ended, and waits there, on a GPU that can: a launch alone would take
1.5 us. (The first gives way to it early only where it is one of packed.py.)

A program loads the next tile before it casts this one, so that memory always has work from it:
few programs fit on the GPU at once, and they stay for long.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8patch.ops.triton.add_rows import add_up
from fp8patch.ops.triton.cast_tile import (
    add_count,
    as_one,
    bits_of,
    cast_again,
    exceeds,
    formed_rows,
    live_scale,
    max_abs,
    other_row,
    raise_amax,
    raw_row,
    store_tile,
)
from fp8patch.ops.triton.forms import formed, is_stored
from fp8patch.ops.triton.launch import Launcher, blocks_of, capability

# How many programs to aim at, with a form (forms.py), and with one of what is stored. Found with
# scripts/tune_quantize.py and tune_grad_forms.py on an H200, which runs about as many at once.
PROGRAMS, PROGRAMS_FORMED, PROGRAMS_STORED = 528, 660, 528
# Rows, columns and warps of a tile of partial sums: few columns, as there are few in all, and
# many rows, as one load after the other would take as long as all of them do.
ADDED = (256, 16, 8)
# Tiles of a program, so that the count of its elements is exact as an FP32 number.
_LONGEST = 1024


@triton.jit
def near_less_zero(values, used, FLUSHES_TO: tl.constexpr):
    # Adds up to the same as `flushed`, in 30 registers less: a program may hold many more rows.
    # (Zero times a scale that is not finite is not near zero. Such a sum is not above 0: no count.)
    return as_one(tl.abs(values * used) <= FLUSHES_TO) - as_one(values == 0.0)


# `cols` is not specialised: as a constant 1 it makes neighbours zeros that are known to be equal,
# and ptxas 12.8 converts a pair of equal registers wrongly (F2FP merges garbage in).
@triton.jit(do_not_specialize=["cols", "tiles", "walk"])
def cast_and_add_kernel(
    x, y, x_fp8, x_fp8_t, scale, scale_inv, bits, amax, counts, partial,
    number, rows, cols, height, width, stride_m, stride_k, tiles, walk,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    LIVE: tl.constexpr, OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    across = tl.cdiv(width, BK)
    first = (pid // across) * walk
    last = tl.minimum(first + walk, tiles)
    k = (pid % across) * BK + tl.arange(0, BK)
    if LIVE:
        used = live_scale(bits, number, FLOOR)
    else:
        used = tl.load(scale)
    # (`width` is known to be a multiple of 16.)
    end = width if FULL else cols
    sums = tl.zeros((BM // 4, BK), tl.float32)
    top = tl.zeros((BM // 4, BK // 4), tl.float32)
    lost = tl.zeros((BM // 4, BK // 4), tl.float32)
    w = first * (BM // 4) + tl.arange(0, BM // 4)
    r0 = raw_row(x, 4 * w, k, rows, end, True, stride_m, stride_k, EVEN)
    r1 = raw_row(x, 4 * w + 1, k, rows, end, True, stride_m, stride_k, EVEN)
    r2 = raw_row(x, 4 * w + 2, k, rows, end, True, stride_m, stride_k, EVEN)
    r3 = raw_row(x, 4 * w + 3, k, rows, end, True, stride_m, stride_k, EVEN)
    s0 = other_row(r0, y, 4 * w, k, rows, end, True, stride_m, stride_k, EVEN, FORM)
    s1 = other_row(r1, y, 4 * w + 1, k, rows, end, True, stride_m, stride_k, EVEN, FORM)
    s2 = other_row(r2, y, 4 * w + 2, k, rows, end, True, stride_m, stride_k, EVEN, FORM)
    s3 = other_row(r3, y, 4 * w + 3, k, rows, end, True, stride_m, stride_k, EVEN, FORM)
    for tile in range(first, last):
        w = tile * (BM // 4) + tl.arange(0, BM // 4)
        n = w + BM // 4
        more = tile + 1 < last
        if PTX == "":
            # Triton's interpreter (3.9) takes no scalar that was computed for a mask.
            more = (n < last * (BM // 4))[:, None]
        n0 = raw_row(x, 4 * n, k, rows, end, more, stride_m, stride_k, EVEN)
        n1 = raw_row(x, 4 * n + 1, k, rows, end, more, stride_m, stride_k, EVEN)
        n2 = raw_row(x, 4 * n + 2, k, rows, end, more, stride_m, stride_k, EVEN)
        n3 = raw_row(x, 4 * n + 3, k, rows, end, more, stride_m, stride_k, EVEN)
        p0 = other_row(n0, y, 4 * n, k, rows, end, more, stride_m, stride_k, EVEN, FORM)
        p1 = other_row(n1, y, 4 * n + 1, k, rows, end, more, stride_m, stride_k, EVEN, FORM)
        p2 = other_row(n2, y, 4 * n + 2, k, rows, end, more, stride_m, stride_k, EVEN, FORM)
        p3 = other_row(n3, y, 4 * n + 3, k, rows, end, more, stride_m, stride_k, EVEN, FORM)
        v0 = formed(r0.to(tl.float32), s0.to(tl.float32), number, x.dtype.element_ty, FORM, PTX)
        v1 = formed(r1.to(tl.float32), s1.to(tl.float32), number, x.dtype.element_ty, FORM, PTX)
        v2 = formed(r2.to(tl.float32), s2.to(tl.float32), number, x.dtype.element_ty, FORM, PTX)
        v3 = formed(r3.to(tl.float32), s3.to(tl.float32), number, x.dtype.element_ty, FORM, PTX)
        store_tile(
            x_fp8, x_fp8_t, v0 * used, v1 * used, v2 * used, v3 * used, w, k, rows, width, height,
            TRANSPOSE, EVEN, PTX,
        )  # fmt: skip
        sums += (v0 + v1) + (v2 + v3)
        # By fours, which one thread holds: fewer registers to carry along.
        tops = max_abs(max_abs(v0, v1), max_abs(v2, v3))
        top = max_abs(top, tl.reduce(tl.reshape(tops, (BM // 4, BK // 4, 4)), 2, max_abs))
        if OBSERVE:
            small = near_less_zero(v0, used, FLUSHES_TO) + near_less_zero(v1, used, FLUSHES_TO)
            small += near_less_zero(v2, used, FLUSHES_TO) + near_less_zero(v3, used, FLUSHES_TO)
            lost += tl.sum(tl.reshape(small, (BM // 4, BK // 4, 4)), 2)
        r0, r1, r2, r3 = n0, n1, n2, n3
        s0, s1, s2, s3 = p0, p1, p2, p3
    target = partial + (pid // across).to(tl.int64) * width + k
    tl.store(target, tl.sum(sums, 0), mask=k < width)
    top_bits = tl.max(bits_of(top))
    if OBSERVE:
        raise_amax(amax, top_bits)
        add_count(counts, 1, lost)
    if exceeds(top_bits, used, CLIPS):
        # Rare: find the tiles that hold an outlier, and cast these again.
        for tile in range(first, last):
            w = tile * (BM // 4) + tl.arange(0, BM // 4)
            v0, v1, v2, v3 = formed_rows(
                x, y, number, w, k, rows, end, stride_m, stride_k, EVEN, FORM, PTX
            )
            tile_bits = tl.max(bits_of(max_abs(max_abs(v0, v1), max_abs(v2, v3))))
            if exceeds(tile_bits, used, CLIPS):
                cast_again(
                    x, y, number, x_fp8, x_fp8_t, counts, used, w, k, rows, end, width, height,
                    stride_m, stride_k, LARGEST, CLIPS, OBSERVE, TRANSPOSE, EVEN, FORM, PTX,
                )  # fmt: skip
    if pid == 0:
        tl.store(scale_inv, tl.div_rn(1.0, used))
        if OBSERVE:
            # A size of 1 is a Python constant in here, which has no `.to`.
            tl.atomic_add(counts + 3, (tl.zeros((), tl.int64) + rows) * cols, sem="relaxed")


def programs_of(form: str) -> int:
    """How many programs to aim at."""
    if is_stored(form):
        return PROGRAMS_STORED
    return PROGRAMS_FORMED if form else PROGRAMS


_cast = Launcher(cast_and_add_kernel)


def cast_and_add(
    variant: Hashable,
    down: int,
    across: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: Callable[[], dict[str, Any]],
    warps: int,
    shape: tuple[int, int],
    programs: int,
    launch: Launcher = _cast,
) -> Tensor:
    """The launch of `quantize.quantize` (its arguments), over `down` times `across` tiles.

    Returns the sums over the rows of x, FP32 [K]; `shape` is K and K padded; `programs`:
    how many to aim at; `launch` is of a kernel with the same last arguments.
    """
    cols, width = shape
    device = tensors[0].device
    walk = min(blocks_of(down * across, programs), _LONGEST)
    rows = blocks_of(down, walk)
    partial = torch.empty_strided((rows * width,), (1,), dtype=torch.float32, device=device)
    launch(variant, rows * across, (*tensors, partial), (*numbers, down, walk), constants, warps)
    if rows == 1:
        return partial if cols == width else partial[:cols]
    sums = torch.empty_strided((cols,), (1,), dtype=torch.float32, device=device)
    add_up(partial, sums, (rows, cols, width), ADDED, capability(device.index) >= (9, 0))
    return sums
