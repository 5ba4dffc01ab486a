"""Sums over rows: a program adds up a few columns, so that there are enough programs."""

import triton
import triton.language as tl
from torch import Tensor

from fp8patch.ops.triton.launch import Launcher, blocks_of, size_class

_WARPS = 8
# Numbers that a program holds at once, 32 a thread.
_HELD = 8192
# Columns of a program, the most for which there are about as many programs as multiprocessors. (A
# memory access is 32 bytes at least: 8 columns.)
_COLUMNS, _PROGRAMS = (64, 32, 16, 8), 128


@triton.jit
def _kernel(partial, sums, rows, cols, across, BM: tl.constexpr, BK: tl.constexpr):
    matrix = (tl.program_id(0) // across).to(tl.int64)
    k = (tl.program_id(0) % across) * BK + tl.arange(0, BK)
    start = partial + matrix * rows * cols
    total = tl.zeros((BM, BK), tl.float32)
    for first in range(0, rows, BM):
        m = first + tl.arange(0, BM)
        inside = (m[:, None] < rows) & (k[None, :] < cols)
        total += tl.load(start + m[:, None] * cols + k[None, :], mask=inside, other=0.0)
    tl.store(sums + matrix * cols + k, tl.sum(total, 0), mask=k < cols)


_launch = Launcher(_kernel)


def add_rows(partial: Tensor, columns: int = 0) -> Tensor:
    """`ops.add_rows` on the GPU; at least one element. `columns` of a program: for tuning."""
    *several, rows, cols = partial.shape
    sums = partial.new_empty((*several, cols))
    matrices = sums.numel() // cols
    fitting = (each for each in _COLUMNS if matrices * blocks_of(cols, each) >= _PROGRAMS)
    width = columns or next(fitting, _COLUMNS[-1])
    across = blocks_of(cols, width)
    sizes = rows, cols, across
    variant = width, partial.data_ptr() % 16, sums.data_ptr() % 16, *map(size_class, sizes)
    constants = {"BM": _HELD // width, "BK": width}
    _launch(variant, matrices * across, (partial, sums), sizes, constants, _WARPS)
    return sums
