"""The weights of a whole model cast in one launch, into the memory that holds them.

One program a tile, over all weights: a table says which tile of which weight it is. With a launch a
weight, a step of a small model would spend more time on launching these casts than on running them.

Where a scale may not fit any more (`fits`), it is tried: casting with it shows the amax, and a
second launch casts again, scaled by that, what it did not fit. As a rule that is nothing, and the
amax has not cost a read of all weights.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

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
    raise_amax,
)
from fp8patch.ops.triton.launch import Launcher
from fp8patch.ops.triton.packed import packs
from fp8patch.ops.triton.packed_tile import REGISTERS, packed_rows, quantize_packed
from fp8patch.ops.triton.packing import ASSEMBLY

# Rows, columns and warps of a tile, and as packed.py casts, found with scripts/tune_quantize.py on
# an H200: 87 % of a copy's speed from FP32, 89 to 90 from BF16; and of one that amax is taken of.
TILE, TILE_PACKED = (32, 64, 2), (64, 64, 2)
_AMAX_TILE = (32, 256, 8)
# Columns of the table of addresses, int64.
_COLUMNS = 9
# What a tried scale shows of a weight, int64: a slot's four counts, and the bits of the amax.
_SEEN = tl.constexpr(5)
# Which one casts: that of the slot, that of the weight's own amax, the slot's unless it clips most.
Scales = Literal["slot", "live", "fits"]
_POINTERS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Job(NamedTuple):
    """One weight [R, C] in FP32, BF16 or FP16, contiguous, R and C multiples of 16.

    rows (FP8 [R, C]), rows_t ([C, R]) and scale_inv are written (empty where each run is given new
    ones); scale, amax and counts are the slot.
    """

    weight: Tensor
    rows: Tensor
    rows_t: Tensor
    scale_inv: Tensor
    scale: Tensor
    amax: Tensor
    counts: Tensor


@triton.jit
def _field(table, index, column: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.load(table + index * COLUMNS + column)


@triton.jit
def _amax_kernel(
    tiles, table, bits, TYPE: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    index = tl.load(tiles + tl.program_id(0) * 3)
    x = tl.multiple_of(_field(table, index, 0, COLUMNS).to(tl.pointer_type(TYPE)), 16)
    rows = tl.multiple_of(_field(table, index, 7, COLUMNS).to(tl.int32), 16)
    cols = tl.multiple_of(_field(table, index, 8, COLUMNS).to(tl.int32), 16)
    m = tl.load(tiles + tl.program_id(0) * 3 + 1) * BM + tl.arange(0, BM)
    k = tl.load(tiles + tl.program_id(0) * 3 + 2) * BK + tl.arange(0, BK)
    top = tl.max(bits_of(load_row(x, m, k, rows, cols, cols, 1, False)))
    tl.atomic_max(bits + index, top, sem="relaxed")


@triton.jit
def _cast_kernel(
    tiles, table, bits, seen, limit, TYPE: tl.constexpr, COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    SCALES: tl.constexpr, OBSERVE: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    PTX: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    index = tl.load(tiles + pid * 3)
    down, across = tl.load(tiles + pid * 3 + 1), tl.load(tiles + pid * 3 + 2)
    x = tl.multiple_of(_field(table, index, 0, COLUMNS).to(tl.pointer_type(TYPE)), 16)
    fp8 = tl.pointer_type(tl.float8e4nv)
    x_fp8 = tl.multiple_of(_field(table, index, 1, COLUMNS).to(fp8), 16)
    x_fp8_t = tl.multiple_of(_field(table, index, 2, COLUMNS).to(fp8), 16)
    scale_inv = _field(table, index, 3, COLUMNS).to(tl.pointer_type(tl.float32))
    scale = _field(table, index, 4, COLUMNS).to(tl.pointer_type(tl.float32))
    amax = _field(table, index, 5, COLUMNS).to(tl.pointer_type(tl.float32))
    counts = _field(table, index, 6, COLUMNS).to(tl.pointer_type(tl.int64))
    rows = tl.multiple_of(_field(table, index, 7, COLUMNS).to(tl.int32), 16)
    cols = tl.multiple_of(_field(table, index, 8, COLUMNS).to(tl.int32), 16)
    w = down * (BM // 4) + tl.arange(0, BM // 4)
    k = across * BK + tl.arange(0, BK)
    if SCALES == "live":
        used = live_scale(bits + index, limit, FLOOR)
    else:
        used = tl.load(scale)
    if SCALES == "fits":
        # What is seen counts if the scale turns out to fit.
        counts = seen + index * _SEEN
        amax = (counts + _SEEN - 1).to(tl.pointer_type(tl.float32), bitcast=True)
    if PACKED:
        p0, p1, p2, p3 = packed_rows(x, x, 1.0, w, k, rows, cols, cols, 1, EVEN, "", PTX)
        quantize_packed(
            p0, p1, p2, p3, x, x, 1.0, x_fp8, x_fp8_t, amax, counts, used, w, k, rows, cols, cols,
            rows, cols, 1, LARGEST, CLIPS, FLUSHES_TO, OBSERVE, True, EVEN, "", PTX,
        )  # fmt: skip
    else:
        quantize_tile(
            x, x, 1.0, x_fp8, x_fp8_t, amax, counts, used, w, k, rows, cols, cols, rows, cols, 1,
            LARGEST, CLIPS, FLUSHES_TO, OBSERVE, True, EVEN, "", PTX,
        )  # fmt: skip
    if (down == 0) & (across == 0):
        tl.store(scale_inv, tl.div_rn(1.0, used))
        if OBSERVE and SCALES != "fits":
            tl.atomic_add(counts + 3, rows.to(tl.int64) * cols, sem="relaxed")


@triton.jit
def _settle_kernel(
    strips, table, seen, limit, TYPE: tl.constexpr, COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr, FLOOR: tl.constexpr,
    OBSERVE: tl.constexpr, PTX: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """After a cast with scales that were tried: a program to a strip of rows."""
    pid = tl.program_id(0)
    index, down = tl.load(strips + pid * 3), tl.load(strips + pid * 3 + 1)
    tried = seen + index * _SEEN
    bits = (tried + _SEEN - 1).to(tl.pointer_type(tl.int32), bitcast=True)
    top_bits = tl.load(bits)
    scale = tl.load(_field(table, index, 4, COLUMNS).to(tl.pointer_type(tl.float32)))
    amax = _field(table, index, 5, COLUMNS).to(tl.pointer_type(tl.float32))
    counts = _field(table, index, 6, COLUMNS).to(tl.pointer_type(tl.int64))
    rows = tl.multiple_of(_field(table, index, 7, COLUMNS).to(tl.int32), 16)
    cols = tl.multiple_of(_field(table, index, 8, COLUMNS).to(tl.int32), 16)
    fits = (scale > 0.0) & (top_bits.to(tl.float32, bitcast=True) * scale <= 2.0 * limit)
    if OBSERVE and down == 0:
        tl.atomic_add(counts + 3, rows.to(tl.int64) * cols, sem="relaxed")
        if fits:
            raise_amax(amax, top_bits)
            for column in tl.static_range(3):
                tl.atomic_add(counts + column, tl.load(tried + column), sem="relaxed")
    if fits == 0:
        x = tl.multiple_of(_field(table, index, 0, COLUMNS).to(tl.pointer_type(TYPE)), 16)
        fp8 = tl.pointer_type(tl.float8e4nv)
        x_fp8 = tl.multiple_of(_field(table, index, 1, COLUMNS).to(fp8), 16)
        x_fp8_t = tl.multiple_of(_field(table, index, 2, COLUMNS).to(fp8), 16)
        used = live_scale(bits, limit, FLOOR)
        w = down * (BM // 4) + tl.arange(0, BM // 4)
        for start in range(0, cols, BK):
            quantize_tile(
                x, x, 1.0, x_fp8, x_fp8_t, amax, counts, used, w, start + tl.arange(0, BK), rows,
                cols, cols, rows, cols, 1, LARGEST, CLIPS, FLUSHES_TO, OBSERVE, True, False, "",
                PTX,
            )  # fmt: skip
        if down == 0:
            scale_inv = _field(table, index, 3, COLUMNS).to(tl.pointer_type(tl.float32))
            tl.store(scale_inv, tl.div_rn(1.0, used))


def _cast_constants(
    dtype: torch.dtype,
    on_gpu: bool,
    scales: Scales,
    flags: tuple[bool, bool, bool],
    bm: int,
    bk: int,
) -> dict[str, Any]:
    observe, even, packed = flags
    return {
        "TYPE": _POINTERS[dtype],
        "COLUMNS": _COLUMNS,
        **CONSTANTS[numerics.E4M3],
        "FLOOR": numerics.AMAX_FLOOR,
        "SCALES": scales,
        "OBSERVE": observe,
        "EVEN": even,
        "PACKED": packed,
        "PTX": ASSEMBLY[numerics.E4M3] if on_gpu else "",
        "BM": bm,
        "BK": bk,
    }


_amax = Launcher(_amax_kernel)
_cast = Launcher(_cast_kernel)
_cast_packed = Launcher(_cast_kernel, maxnreg=REGISTERS)
_settle = Launcher(_settle_kernel)


class ManyCasts:
    """Casts to E4M3 that are repeated every step; the tables are made once.

    All jobs on one device and of one weight dtype. The addresses are what is kept: the tensors have
    to stay alive and in place for as long as `run` is called.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._dtype, device = jobs[0].weight.dtype, jobs[0].weight.device
        self._packed = packs(self._dtype, device)
        self._tile = TILE_PACKED if self._packed else TILE
        self._shapes = [job.weight.shape for job in jobs]
        bm, bk, _ = self._tile
        self._even = all(rows % bm == 0 and cols % bk == 0 for rows, cols in self._shapes)
        self._addresses = [
            [*(tensor.data_ptr() for tensor in job), *job.weight.shape] for job in jobs
        ]
        self._table = torch.tensor(self._addresses, dtype=torch.int64, device=device)
        self._tiles = _tiles(self._shapes, self._tile, device)
        self._amax_tiles: Tensor | None = None
        self._strips: Tensor | None = None
        self._bits = torch.zeros(len(jobs), dtype=torch.int32, device=device)
        self._seen = torch.zeros(len(jobs), _SEEN.value, dtype=torch.int64, device=device)
        # What a backward that still has to run may hold, and must not find changed unnoticed.
        self._written = [t for job in jobs for t in (job.rows, job.rows_t, job.scale_inv)]

    def run(self, limit: float, *, live: bool, observe: bool) -> None:
        """Cast every weight as it is now; arguments as in `ops.quantize.quantize`."""
        self._launch(limit, "live" if live else "slot", observe)
        torch.autograd.graph.increment_version(self._written)

    def run_into(
        self,
        outputs: Sequence[tuple[Tensor, Tensor, Tensor]],
        limit: float,
        *,
        live: bool,
        observe: bool,
    ) -> None:
        """Cast into new tensors: the (rows, rows_t, scale_inv) of each job, which has empty ones.

        The scale of a slot gives way to the live one where the weight times it passes twice
        `limit`, or where it is not positive.
        """
        self._aim(outputs)
        self._launch(limit, "live" if live else "fits", observe)

    def _aim(self, outputs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        addresses = [
            [*row[:1], *(tensor.data_ptr() for tensor in made), *row[4:]]
            for row, made in zip(self._addresses, outputs, strict=True)
        ]
        # (As a rule the allocator returns what the last ones have left.)
        if addresses != self._addresses:
            # Pinned, so that no one waits; it stays allocated until the copy has run.
            pinned = self._table.is_cuda
            table = torch.tensor(addresses, dtype=torch.int64, pin_memory=pinned)
            self._table.copy_(table, non_blocking=True)
            self._addresses = addresses

    def _launch(self, limit: float, scales: Scales, observe: bool) -> None:
        (bm, bk, warps), dtype = self._tile, self._dtype
        tensors = self._tiles, self._table, self._bits, self._seen
        if scales == "live":
            self._take_amax()
        elif scales == "fits":
            self._seen.zero_()
        flags = observe or scales == "fits", self._even, self._packed
        constants = _cast_constants(dtype, self._tiles.is_cuda, scales, flags, bm, bk)
        variant = dtype, scales, flags, self._tile
        cast = _cast_packed if self._packed else _cast
        cast(variant, self._tiles.shape[0], tensors, (limit,), constants, warps)
        if scales == "fits":
            self._cast_again_what_did_not_fit(limit, observe)

    def _cast_again_what_did_not_fit(self, limit: float, observe: bool) -> None:
        bm, bk, warps = TILE
        if self._strips is None:
            strips = bm, max(cols for _, cols in self._shapes), warps
            self._strips = _tiles(self._shapes, strips, self._table.device)
        constants = _cast_constants(
            self._dtype, self._tiles.is_cuda, "fits", (observe, False, False), bm, bk
        )
        constants = {k: v for k, v in constants.items() if k not in ("SCALES", "EVEN", "PACKED")}
        tensors = self._strips, self._table, self._seen
        variant = self._dtype, observe
        _settle(variant, self._strips.shape[0], tensors, (limit,), constants, warps)

    def _take_amax(self) -> None:
        if self._amax_tiles is None:
            self._amax_tiles = _tiles(self._shapes, _AMAX_TILE, self._table.device)
        self._bits.zero_()
        bm, bk, warps = _AMAX_TILE
        constants = {"TYPE": _POINTERS[self._dtype], "COLUMNS": _COLUMNS, "BM": bm, "BK": bk}
        tensors = self._amax_tiles, self._table, self._bits
        _amax((self._dtype,), self._amax_tiles.shape[0], tensors, (), constants, warps)


def _tiles(
    shapes: Sequence[torch.Size], tile: tuple[int, int, int], device: torch.device
) -> Tensor:
    """Which weight, which tile down and which across, of every tile of all: int32 [tiles, 3]."""
    found = []
    for index, (rows, cols) in enumerate(shapes):
        down, across = torch.arange(-(-rows // tile[0])), torch.arange(-(-cols // tile[1]))
        found.append(torch.cartesian_prod(torch.tensor([index]), down, across))
    return torch.cat(found).to(device, torch.int32)
