"""Slots: the scale, the observed amax and the history of every FP8 tensor, in a few flat tensors.

One row a slot, three slots a module (input, weight, grad_output). A row is handed out as views, and
always as the *same* Tensor objects: two modules that share a slot share the objects, which is what
lets the compiler see one graph input and merge their casts.

Scales and amax lie 16 bytes apart: cuBLASLt answers NOT_SUPPORTED for a scale whose address is not
a multiple of 16 (seen on an H200).
"""

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops import quantize as quantize_op
from fp8patch.ops.fused import delayed_update
from fp8patch.ops.quantize import preserved_version
from fp8patch.recipe import Recipe

ROLES = ("input", "weight", "grad_output")
INPUT, WEIGHT, GRAD_OUTPUT = range(3)

# What a slot is made for: its history, and the scale that is made of it.
_SLOT_FIELDS = ("scaling", "amax_history_len", "amax_compute_algo", "margin")

# FP32 values from one row to the next: 16 bytes.
_STRIDE = 4


class Slot(NamedTuple):
    """Views of one row: FP32 scalar, FP32 scalar, int64 [4] (`numerics.counts`)."""

    scale: Tensor
    amax: Tensor
    counts: Tensor


class Rows(NamedTuple):
    """Views of some rows next to each other: FP32 [n, 4], FP32 [n, 4], int64 [n, 4]."""

    scale: Tensor
    amax: Tensor
    counts: Tensor

    def slot(self, row: int) -> Slot:
        """One of them."""
        return Slot(self.scale[row, 0], self.amax[row, 0], self.counts[row])


class Place(NamedTuple):
    """Where the slots of a module are in rows that others share: for what is traced, to which
    three tensors for a block are fewer than three for each slot."""

    rows: Rows
    input: int
    grad: int


class SlotState(NamedTuple):
    """One slot as it is saved: all on the CPU.

    history is FP32 [n <= L], oldest first; scale (0: never set) and amax (pending) are FP32
    scalars; counts is int64 [4].
    """

    history: Tensor
    scale: Tensor
    amax: Tensor
    counts: Tensor

    def numbers(self) -> list[float]:
        """[last amax, scale, *counts]."""
        newest = self.history[-1:] if float(self.amax) == 0 else self.amax[None]
        return [float(newest) if len(newest) else 0.0, float(self.scale), *self.counts.tolist()]


NEVER_SET = SlotState(
    torch.zeros(0), torch.zeros(()), torch.zeros(()), torch.zeros(4, dtype=torch.int64)
)


def grad_is_e5m2(recipe: Recipe) -> bool:
    """HYBRID gives gradients the range of E5M2; `e4m3` and rowwise scaling keep them in E4M3."""
    return recipe.fp8_format == "hybrid"


def limit(recipe: Recipe, role: int) -> float:
    """What amax is scaled to in this role: the largest FP8 value times 2^-margin."""
    e5m2 = role == GRAD_OUTPUT and grad_is_e5m2(recipe)
    largest = numerics.FP8_MAX[numerics.E5M2 if e5m2 else numerics.E4M3]
    return float(largest * 2.0**-recipe.margin)


def _length(recipe: Recipe, algo: str) -> int:
    """Of the history of a layer, in slots whose scales are made by `algo`."""
    if recipe.scaling != "delayed":
        return 1
    # The most recent amax is the largest of one.
    return 1 if recipe.amax_compute_algo != algo else recipe.amax_history_len


class Slots:
    """All rows of one bank on one device.

    Rows with a shorter history than others use the front of theirs.
    """

    def __init__(
        self,
        rows: int,
        recipe: Recipe,
        device: torch.device,
        layers: Mapping[int, Recipe] | None = None,
    ) -> None:
        """`layers` are the recipes of those modules that have another one than `recipe`, by number
        (row // 3)."""
        recipes = [(layers or {}).get(row // 3, recipe) for row in range(rows)]
        algos = {each.amax_compute_algo for each in recipes if each.scaling == "delayed"}
        self._algo = algos.pop() if len(algos) == 1 else "max"
        self._lengths = [_length(each, self._algo) for each in recipes]
        mixed = len(set(self._lengths)) > 1
        # Slots may be made while a model runs under inference_mode; tensors born there could never
        # be written again outside it.
        with torch.inference_mode(False), torch.no_grad():
            self._scale = torch.zeros(rows, _STRIDE, device=device)
            self._amax = torch.zeros(rows, _STRIDE, device=device)
            self._counts = torch.zeros(rows, 4, dtype=torch.int64, device=device)
            self._history = torch.zeros(rows, max(self._lengths, default=1), device=device)
            self._length = torch.tensor(self._lengths, device=device) if mixed else None
            self._cursor = torch.zeros(rows, dtype=torch.int64, device=device)
            limits = [limit(each, row % 3) for row, each in enumerate(recipes)]
            self._limit = torch.tensor(limits, device=device)
            self._views = [
                Slot(self._scale[row, 0], self._amax[row, 0], self._counts[row])
                for row in range(rows)
            ]
        self.device = device
        self._scales = scales = [view.scale for view in self._views]
        quantize_op.mark_cold(scales)
        # The next owner of this memory must not inherit the mark.
        weakref.finalize(self, quantize_op.mark_warm, scales)

    @staticmethod
    def can_share(one: Recipe, other: Recipe) -> bool:
        """Whether an input slot means the same to layers of these two recipes."""
        return all(getattr(one, name) == getattr(other, name) for name in _SLOT_FIELDS)

    def __getitem__(self, row: int) -> Slot:
        return self._views[row]

    def rows(self, start: int, stop: int) -> Rows:
        """Some rows as tensors. Make them once: equal views made twice are two graph inputs."""
        return Rows(self._scale[start:stop], self._amax[start:stop], self._counts[start:stop])

    def _written(self) -> AbstractContextManager[None]:
        return preserved_version(self._scale, self._amax, self._counts, self._history, self._cursor)

    @property
    def pending(self) -> Tensor:
        """FP32 [S]: the amax observed since the last update, one a slot."""
        return self._amax[:, 0]

    def reduce(self, group: Any) -> None:
        """Let every rank of `group` know the largest pending amax of each slot."""
        # MAX over nan is undefined in NCCL; inf says the same to the update ("keep the scale").
        reduced = torch.where(torch.isnan(self.pending), torch.inf, self.pending)
        torch.distributed.all_reduce(reduced, torch.distributed.ReduceOp.MAX, group=group)
        with preserved_version(self.pending):
            self.pending.copy_(reduced)

    def update(self) -> None:
        """Roll every pending amax and set the scales of the next step."""
        with torch.no_grad(), self._written():
            delayed_update(
                self._history,
                self._cursor,
                self.pending,
                self._scale[:, 0],
                self._limit,
                self._algo,
                self._length,
            )
        self._refresh_cold()

    def _refresh_cold(self) -> None:
        # A read of the device, but only after a step in which a cold slot was used: the first one,
        # and those in which a layer runs that never ran before.
        if quantize_op.cold_was_used(self._scales):
            is_set = (self._scale[:, 0] > 0).tolist()
            pairs = zip(self._scales, is_set, strict=True)
            quantize_op.mark_warm(scale for scale, warm in pairs if warm)

    def merge_pending(self, source: int, target: int) -> None:
        """Let row `target` know what `source` observed (siblings become one slot)."""
        with torch.no_grad(), self._written():
            self._amax[target].copy_(torch.maximum(self._amax[target], self._amax[source]))

    def read(self, row: int) -> SlotState:
        """A copy of one row, on the CPU."""
        return self._read(row, row + 1)[0]

    def read_all(self) -> list[SlotState]:
        """A copy of every row, on the CPU: a read a tensor instead of four a slot."""
        return self._read(0, len(self._views))

    def _read(self, start: int, stop: int) -> list[SlotState]:
        tensors = (self._history, self._scale[:, 0], self._amax[:, 0], self._counts, self._cursor)
        read = (tensor[start:stop].cpu() for tensor in tensors)
        lengths = self._lengths[start:stop]
        states = []
        for row, scale, amax, counts, cursor, length in zip(*read, lengths, strict=True):
            count, ring = int(cursor), row[:length]
            history = ring[:count] if count <= length else torch.roll(ring, -(count % length))
            states.append(SlotState(*(t.clone() for t in (history, scale, amax, counts))))
        return states

    def table(self) -> Tensor:
        """FP64 [S, 6]: last amax, scale, *counts of every row; a copy on the device, no sync."""
        length = self._history.shape[1] if self._length is None else self._length
        place = (self._cursor - 1).clamp(min=0) % length
        last = self._history.gather(1, place.unsqueeze(1))
        amax = torch.where(self._amax[:, :1] > 0, self._amax[:, :1], last)
        columns = (amax.double(), self._scale[:, :1].double(), self._counts.double())
        return torch.cat(columns, 1)

    def write(self, row: int, state: SlotState) -> None:
        """Set one row. A history longer than the recipe's keeps its newest part."""
        history = state.history[-self._lengths[row] :]
        with torch.no_grad(), self._written():
            self._history[row].zero_()
            self._history[row, : len(history)] = history.to(self.device)
            self._cursor[row] = len(history)
            self._scale[row, 0] = state.scale.to(self.device)
            self._amax[row, 0] = state.amax.to(self.device)
            self._counts[row] = state.counts.to(self.device)
        scale = self._views[row].scale
        (quantize_op.mark_warm if float(state.scale) > 0 else quantize_op.mark_cold)([scale])
