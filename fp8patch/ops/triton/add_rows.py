"""Sums over rows of partial sums: a program adds up a few columns, so that there are many of them.

The kernel may be launched while the one before still runs ("programmatic dependent launch", sm_90):
it waits for that one's end itself, and its own start is out of the way by then.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from fp8patch.ops.triton.launch import Launcher, blocks_of, size_class

# Numbers that a program holds at once, 32 a thread, and its warps.
_HELD, _WARPS = 8192, 8
# Columns of a program, the most for which there are about as many programs as multiprocessors. (A
# memory access is 32 bytes at least: 8 columns.)
_COLUMNS, _PROGRAMS = (64, 32, 16, 8), 128


@triton.jit
def _kernel(
    partial, sums, rows, cols, width, across,
    EARLY: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    matrix = (tl.program_id(0) // across).to(tl.int64)
    k = (tl.program_id(0) % across) * BK + tl.arange(0, BK)
    start = partial + matrix * rows * width
    total = tl.zeros((BM, BK), tl.float32)
    if EARLY:
        # For all of the kernel before, which this one was launched beside.
        gdc_wait()
    for first in range(0, rows, BM):
        m = first + tl.arange(0, BM)
        inside = (m[:, None] < rows) & (k[None, :] < width)
        total += tl.load(start + m[:, None] * width + k[None, :], mask=inside, other=0.0)
    tl.store(sums + matrix * cols + k, tl.sum(total, 0), mask=k < cols)


_launch = Launcher(_kernel)
_launch_early = Launcher(_kernel, launch_pdl=True)


def add_up(
    partial: Tensor,
    sums: Tensor,
    sizes: tuple[int, int, int],
    tile: tuple[int, int, int],
    early: bool = False,
) -> None:
    """Write the sums of each matrix of `partial`.

    Args:
        partial, sums: FP32, contiguous.
        sizes: R, K and padded K: matrices of [R, padded K], sums of [K].
        tile: Rows, columns and warps.
        early: Launch it beside the kernel before. Only where `capability` is 9.0 or more.
    """
    rows, cols, width = sizes
    bm, bk, warps = tile
    across = blocks_of(cols, bk)
    numbers = rows, cols, width, across
    starts = partial.data_ptr() % 16, sums.data_ptr() % 16
    variant = (tile, starts, *map(size_class, numbers))
    constants = {"EARLY": early, "BM": bm, "BK": bk}
    launch = _launch_early if early else _launch
    matrices = sums.numel() // cols
    launch(variant, matrices * across, (partial, sums), numbers, constants, warps)


def add_rows(partial: Tensor, columns: int = 0) -> Tensor:
    """`ops.add_rows` on the GPU; at least one element. `columns` of a program: for tuning."""
    *several, rows, cols = partial.shape
    sums = partial.new_empty((*several, cols))
    matrices = sums.numel() // cols
    fitting = (each for each in _COLUMNS if matrices * blocks_of(cols, each) >= _PROGRAMS)
    width = columns or next(fitting, _COLUMNS[-1])
    add_up(partial, sums, (rows, cols, cols), (_HELD // width, width, _WARPS))
    return sums
