"""A norm and the cast of its output in one kernel: y, its FP8 values, the same transposed.

Transposed stores want many neighbouring rows, and so many rows do not fit into registers. A program
therefore goes over its rows twice: for their statistics, and, from the last columns back to the
first, to normalise, cast and write. What the second pass reads is still in a cache, as long as the
rows of all programs that run at once fit there: wide rows want few programs, of many warps.

A thread reads the same columns of four neighbouring rows (cast_tile.py) in both passes, and the
next part before it works on this one. Only the transpose moves data between threads: statistics,
amax and counts are added up in registers, and reduced once a program.
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
    cast_again,
    exceeds,
    flushed,
    load_row,
    max_abs,
    raise_amax,
    store_tile,
)
from fp8patch.ops.triton.launch import Launcher, blocks_of, size_class
from fp8patch.ops.triton.norm import kind_of, whole_rows
from fp8patch.ops.triton.packing import ASSEMBLY, rounded


class Tile(NamedTuple):
    """How the kernel is run.

    Attributes:
        rows, columns: What a program has, and how much of it it holds at once.
        warps: Of a program.
    """

    rows: int
    columns: int
    warps: int


def tile_of(cols: int) -> Tile:
    """How the kernel is run on rows of `cols`; found with scripts/tune_norms.py on an H200."""
    if cols <= 768:
        return Tile(16, 128 if cols <= 128 else 256, 4)
    if cols <= 1024:
        return Tile(32, 128, 8)
    return Tile(32, 256, 8) if cols <= 4096 else Tile(32, 512, 16)


@triton.jit
def _raw(x, m, k, rows, stride, more, COLS: tl.constexpr, EVEN: tl.constexpr):
    """Rows m and columns k as they are stored; zero outside x, and anything if not `more`."""
    offsets = m.to(tl.int64)[:, None] * stride + k[None, :]
    if EVEN:
        return tl.load(x + offsets, mask=more)
    return tl.load(x + offsets, mask=(m[:, None] < rows) & (k[None, :] < COLS) & more, other=0.0)


@triton.jit
def _by_fours(values):
    # Four neighbours are in one thread: fewer registers to carry along.
    return tl.sum(tl.reshape(values, (values.shape[0], values.shape[1] // 4, 4)), 2)


@triton.jit
def _add(first, second, raw, near, k, COLS: tl.constexpr, CENTER: tl.constexpr, EVEN: tl.constexpr):
    """Add a part of some rows to the sums of their distances to `near`, and of the squares."""
    values = raw.to(tl.float32)
    if CENTER:
        values -= near[:, None]
        if not EVEN:
            values = tl.where(k[None, :] < COLS, values, 0.0)
        first += _by_fours(values)
    return first, second + _by_fours(values * values)


@triton.jit
def _sum_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _statistics(first, second, near, eps, COLS: tl.constexpr, CENTER: tl.constexpr):
    """(mean, rstd)"""
    square = second / COLS
    if CENTER:
        apart = first / COLS
        square = tl.maximum(square - apart * apart, 0.0, propagate_nan=tl.PropagateNan.ALL)
        near += apart
    return near, tl.rsqrt(square + eps)


@triton.jit
def _keep(target, s0, s1, s2, s3, pid, rows):
    """Write a statistic of the rows of a program."""
    found = tl.reshape(tl.join(tl.join(s0, s2), tl.join(s1, s3)), (4 * s0.shape[0],))
    m = pid * (4 * s0.shape[0]) + tl.arange(0, 4 * s0.shape[0])
    tl.store(target + m, found, mask=m < rows)


@triton.jit
def _vector(vector, k, TIMES: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr):
    # `TIMES` over, once a row: threads read what they need, and nothing goes through shared memory.
    where = tl.broadcast_to(k[None, :], (TIMES, k.shape[0]))
    if EVEN:
        return tl.load(vector + where).to(tl.float32)
    return tl.load(vector + where, mask=where < COLS, other=0.0).to(tl.float32)


@triton.jit
def _normalized(
    raw, y, middle, inverse, factor, shift, m, k, rows,
    COLS: tl.constexpr, CENTER: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Write y of the rows m and columns k; returns what was written, in FP32, zero outside."""
    values = raw.to(tl.float32)
    if CENTER:
        values -= middle[:, None]
    found, written = rounded(values * inverse[:, None] * factor + shift, y.dtype.element_ty, PTX)
    target = y + m.to(tl.int64)[:, None] * COLS + k[None, :]
    if EVEN:
        tl.store(target, found)
        return written
    inside = (m[:, None] < rows) & (k[None, :] < COLS)
    tl.store(target, found, mask=inside)
    return tl.where(inside, written, 0.0)


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
    w = pid * (BM // 4) + tl.arange(0, BM // 4)
    m0, m1, m2, m3 = 4 * w, 4 * w + 1, 4 * w + 2, 4 * w + 3
    k = tl.arange(0, BK)
    last: tl.constexpr = (WIDTH - 1) // BK
    r0 = _raw(x, m0, k, rows, stride, True, COLS, EVEN)
    r1 = _raw(x, m1, k, rows, stride, True, COLS, EVEN)
    r2 = _raw(x, m2, k, rows, stride, True, COLS, EVEN)
    r3 = _raw(x, m3, k, rows, stride, True, COLS, EVEN)
    # Distances to the mean of the first part: a large mean loses nothing then. (Four sums at once
    # are as many barriers as one.)
    near0 = tl.zeros((BM // 4,), tl.float32)
    near1, near2, near3 = near0, near0, near0
    if CENTER:
        near0, near1, near2, near3 = tl.reduce(
            (r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)),
            1,
            _sum_four,
        )
        near0, near1 = near0 / min(COLS, BK), near1 / min(COLS, BK)
        near2, near3 = near2 / min(COLS, BK), near3 / min(COLS, BK)
    a0 = tl.zeros((BM // 4, BK // 4), tl.float32)
    a1, a2, a3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0
    for part in range(0, last):
        n = k + (part + 1) * BK
        n0 = _raw(x, m0, n, rows, stride, True, COLS, EVEN)
        n1 = _raw(x, m1, n, rows, stride, True, COLS, EVEN)
        n2 = _raw(x, m2, n, rows, stride, True, COLS, EVEN)
        n3 = _raw(x, m3, n, rows, stride, True, COLS, EVEN)
        # (All but the last part are whole.)
        a0, b0 = _add(a0, b0, r0, near0, k, COLS, CENTER, True)
        a1, b1 = _add(a1, b1, r1, near1, k, COLS, CENTER, True)
        a2, b2 = _add(a2, b2, r2, near2, k, COLS, CENTER, True)
        a3, b3 = _add(a3, b3, r3, near3, k, COLS, CENTER, True)
        r0, r1, r2, r3 = n0, n1, n2, n3
    k += last * BK
    a0, b0 = _add(a0, b0, r0, near0, k, COLS, CENTER, EVEN)
    a1, b1 = _add(a1, b1, r1, near1, k, COLS, CENTER, EVEN)
    a2, b2 = _add(a2, b2, r2, near2, k, COLS, CENTER, EVEN)
    a3, b3 = _add(a3, b3, r3, near3, k, COLS, CENTER, EVEN)
    if CENTER:
        f0, f1, f2, f3 = tl.reduce((a0, a1, a2, a3), 1, _sum_four)
    else:
        f0, f1, f2, f3 = near0, near1, near2, near3
    q0, q1, q2, q3 = tl.reduce((b0, b1, b2, b3), 1, _sum_four)
    mean0, rstd0 = _statistics(f0, q0, near0, eps, COLS, CENTER)
    mean1, rstd1 = _statistics(f1, q1, near1, eps, COLS, CENTER)
    mean2, rstd2 = _statistics(f2, q2, near2, eps, COLS, CENTER)
    mean3, rstd3 = _statistics(f3, q3, near3, eps, COLS, CENTER)
    if CENTER:
        _keep(mean, mean0, mean1, mean2, mean3, pid, rows)
    _keep(rstd, rstd0, rstd1, rstd2, rstd3, pid, rows)
    used = tl.load(scale)
    top = tl.zeros((BM // 4, BK // 4), tl.float32)
    lost = tl.zeros((BM // 4, BK // 4), tl.float32)
    for done in range(0, last + 1):
        n = k - BK
        more = done < last
        n0 = _raw(x, m0, n, rows, stride, more, COLS, EVEN)
        n1 = _raw(x, m1, n, rows, stride, more, COLS, EVEN)
        n2 = _raw(x, m2, n, rows, stride, more, COLS, EVEN)
        n3 = _raw(x, m3, n, rows, stride, more, COLS, EVEN)
        factor = tl.full((BM // 4, BK), 1.0, tl.float32)
        shift = tl.zeros((BM // 4, BK), tl.float32)
        if WEIGHT:
            factor = _vector(weight, k, BM // 4, COLS, EVEN)
            if OFFSET:
                factor += 1.0
        if BIAS:
            shift = _vector(bias, k, BM // 4, COLS, EVEN)
        v0 = _normalized(
            r0, y, mean0, rstd0, factor, shift, m0, k, rows, COLS, CENTER, EVEN, PTX
        )  # fmt: skip
        v1 = _normalized(
            r1, y, mean1, rstd1, factor, shift, m1, k, rows, COLS, CENTER, EVEN, PTX
        )  # fmt: skip
        v2 = _normalized(
            r2, y, mean2, rstd2, factor, shift, m2, k, rows, COLS, CENTER, EVEN, PTX
        )  # fmt: skip
        v3 = _normalized(
            r3, y, mean3, rstd3, factor, shift, m3, k, rows, COLS, CENTER, EVEN, PTX
        )  # fmt: skip
        store_tile(
            x_fp8, x_fp8_t, v0 * used, v1 * used, v2 * used, v3 * used, w, k, rows, WIDTH, height,
            TRANSPOSE, EVEN, PTX,
        )  # fmt: skip
        tops = max_abs(max_abs(v0, v1), max_abs(v2, v3))
        top = max_abs(top, tl.reduce(tl.reshape(tops, (BM // 4, BK // 4, 4)), 2, max_abs))
        if OBSERVE:
            small = flushed(v0, used, FLUSHES_TO) + flushed(v1, used, FLUSHES_TO)
            small += flushed(v2, used, FLUSHES_TO) + flushed(v3, used, FLUSHES_TO)
            lost += _by_fours(small)
        r0, r1, r2, r3 = n0, n1, n2, n3
        k = n
    top_bits = tl.max(bits_of(top))
    if OBSERVE:
        raise_amax(amax, top_bits)
        add_count(counts, 1, lost)
    # What only an outlier needs is done again, from memory, in the rare parts that hold one.
    if exceeds(top_bits, used, CLIPS):
        # Other threads have written what is read here.
        tl.debug_barrier()
        for part in range(0, last + 1):
            k = part * BK + tl.arange(0, BK)
            v0 = load_row(y, m0, k, rows, COLS, COLS, 1, EVEN)
            v1 = load_row(y, m1, k, rows, COLS, COLS, 1, EVEN)
            v2 = load_row(y, m2, k, rows, COLS, COLS, 1, EVEN)
            v3 = load_row(y, m3, k, rows, COLS, COLS, 1, EVEN)
            part_bits = tl.max(bits_of(max_abs(max_abs(v0, v1), max_abs(v2, v3))))
            if exceeds(part_bits, used, CLIPS):
                cast_again(
                    y, y, 1.0, x_fp8, x_fp8_t, counts, used,
                    w, k, rows, COLS, WIDTH, height, COLS, 1,
                    LARGEST, CLIPS, OBSERVE, TRANSPOSE, EVEN, "", PTX,
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
