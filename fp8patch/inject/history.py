"""What the slots of a model saw over a run, read at no cost and in a bounded number of points.

A point holds for each slot the scale of its optimizer step and, since the point before, the largest
amax and the numbers of elements that were clipped, flushed to zero, not finite, and cast at all. It
is taken just before scales move, where the slots hold exactly what one step saw, and nobody waits
for it (readback.py). After 128 points every two become one, and half as many are taken.

Under DDP the counts of a point are summed over the ranks, in the call in which amax are reduced
anyway: the one place where every rank is known to take part, the same number of times. What comes
after the last such call is counted on each rank alone; `ranks` tells the two apart.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8patch import messages
from fp8patch.numerics import FLUSHED, NON_FINITE, SATURATED, SEEN
from fp8patch.readback import Readback
from fp8patch.recipe import Recipe
from fp8patch.scaling import Bank
from fp8patch.slots import INPUT, ROLES, grad_is_e5m2, limit

__all__ = ["History", "ratios"]

MOST_POINTS = 128

# Columns of `Slots.table` before the four counts.
_AMAX, _SCALE, _COUNTS = 0, 1, 2
_NAMES = {"saturated": SATURATED, "flushed": FLUSHED, "non_finite": NON_FINITE, "seen": SEEN}


@dataclass(slots=True)
class _Point:
    """`values` is FP64 [S, 6]: largest amax, last scale, and what each count grew by."""

    step: int
    ranks: int
    values: Any


@dataclass(slots=True)
class _Reading:
    step: int
    ranks: int
    rows: list[list[int]]
    readback: Readback


class History:
    """The points of one bank; `bank` calls it at every update of its scales.

    Args:
        bank: Any bank, before its first update.
        every: Optimizer steps from one point to the next, at first.
        fresh: Keep what each point has counted until `take` is called, after every step.

    Attributes:
        steps: Updates of the scales so far: optimizer steps that another forward has followed.
        seconds: Host time that the reading has taken.
    """

    def __init__(self, bank: Bank, every: int = 1, *, fresh: bool = False) -> None:
        self.steps = 0
        self.seconds = 0.0
        self._bank = bank
        self._every = every
        # A function of the steps alone, so that all ranks take part in the same readings.
        self._stride, self._taken = 1, 0
        self._underway: deque[_Reading] = deque()
        self._points: list[_Point] = []
        self._fresh: list[tuple[int, Any]] | None = [] if fresh else None
        self._seen_before: dict[torch.device, Tensor] = {}
        self._peaks: dict[torch.device, Tensor] = {}
        self.replaced()
        bank.watcher = self

    # -- the bank's side ----------------------------------------------------------------------

    def before_update(self, group: Any) -> None:
        """The slots hold one whole step; amax are reduced over `group`, counts are not."""
        if _capturing():
            return
        started = time.perf_counter()
        self.steps += 1
        self._raise_peaks()
        if self.steps % (self._every * self._stride) == 0:
            self._taken += 1
            if self._taken == MOST_POINTS:
                self._stride, self._taken = 2 * self._stride, MOST_POINTS // 2
            self._start(self.steps, group)
        self._collect()
        self.seconds += time.perf_counter() - started

    def replaced(self) -> None:
        """The slots were restored from a checkpoint: what they had counted there is not ours."""
        self._underway.clear()
        self._seen_before = {}
        self._restored = np.zeros((len(ROLES) * len(self._bank.paths), 4))
        rows = {path: len(ROLES) * i for i, path in enumerate(self._bank.paths)}
        for path, role, numbers in self._bank.numbers():
            self._restored[rows[path] + role] = numbers[_COUNTS:]

    # -- reading ------------------------------------------------------------------------------

    def _raise_peaks(self) -> None:
        for pending in self._bank.pending():
            peak = self._peaks.get(pending.device)
            if peak is None:
                self._peaks[pending.device] = pending.clone()
            else:
                torch.maximum(peak, pending, out=peak)

    def _start(self, step: int, group: Any) -> None:
        rows, tables = [], []
        for used, table in self._bank.tables():
            counts = table[:, _COUNTS:].clone()
            before = self._before(table.device, counts)
            # A slot that was forgotten since (its weight is another one) has begun at zero again.
            begun = counts[:, SEEN:] < before[:, SEEN:]
            table[:, _COUNTS:] = torch.where(begun, counts, counts - before)
            self._seen_before[table.device] = counts
            peak = self._peaks.pop(table.device)
            # What was not used since keeps its last amax; nan is no zero.
            table[:, _AMAX] = torch.where(peak == 0, table[:, _AMAX], peak)
            if group is not None:
                grown = table[:, _COUNTS:].contiguous()
                torch.distributed.all_reduce(grown, group=group)
                table[:, _COUNTS:] = grown
            rows.append(used)
            tables.append(table)
        ranks = 1 if group is None else torch.distributed.get_world_size(group)
        self._underway.append(_Reading(step, ranks, rows, Readback(tables)))

    def _before(self, device: torch.device, now: Tensor) -> Tensor:
        """The counts at the last reading."""
        if device in self._seen_before:
            return self._seen_before[device]
        if self._seen_before:  # on another device: what was counted on the way is lost
            return now
        if not self._restored.any():
            return torch.zeros_like(now)
        return torch.from_numpy(self._restored).to(device)

    def _collect(self, wait: bool = False) -> None:
        while self._underway and (wait or self._underway[0].readback.ready()):
            reading = self._underway.popleft()
            values = np.zeros((len(ROLES) * len(self._bank.paths), 6))
            for rows, table in zip(reading.rows, reading.readback.tensors(), strict=True):
                values[rows] = table.numpy()[rows]
            if not values[:, _COUNTS + SEEN].any():
                continue
            self._points.append(_Point(reading.step, reading.ranks, values))
            if self._fresh is not None:
                self._fresh.append((reading.step, self._counts_of(self._points[-1])))
            if len(self._points) >= MOST_POINTS:
                pairs = zip(self._points[::2], self._points[1::2], strict=True)
                self._points = [_merged(a, b) for a, b in pairs]

    def take(self) -> list[tuple[int, Any]]:
        """(step, FP64 [modules, 3, 4] counts) of each point that has come since; waits for none."""
        if self._fresh is None or _capturing():
            return []
        self._collect()
        taken, self._fresh = self._fresh, []
        return taken

    def finish(self) -> None:
        """Take what has come since the last point, on this rank alone, and wait for all of it."""
        try:
            self._raise_peaks()
            self._start(self.steps + self._bank.due, None)
            self._collect(wait=True)
        except RuntimeError as error:  # the device is lost: the script has told why
            messages.once("no numbers", f"scales can't be read any more: {error}")

    # -- what there is to tell ----------------------------------------------------------------

    def sums(self) -> Any:
        """FP64 [3, 4]: the four counts of each role, over all points that have arrived."""
        totals = np.zeros((len(ROLES), 4))
        for point in self._points:
            totals += self._counts_of(point).sum(0)
        return totals

    def _counts_of(self, point: _Point) -> Any:
        """FP64 [modules, 3, 4]; an input that modules share counts once."""
        counts = point.values[:, _COUNTS:].reshape(-1, len(ROLES), 4).copy()
        for index, path in enumerate(self._bank.paths):
            if path in self._bank.siblings:
                counts[index, INPUT] = 0
        return counts

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; `inspect.run` tells its keys."""
        bank = self._bank
        slots = []
        for index, path in enumerate(bank.paths):
            recipe = bank.recipe_of(path)
            for role, name in enumerate(ROLES):
                columns = [point.values[len(ROLES) * index + role] for point in self._points]
                shared = role == INPUT and path in bank.siblings
                if shared or not any(column[_COUNTS + SEEN] for column in columns):
                    continue
                slots.append(
                    {
                        "path": path,
                        "role": name,
                        "scaling": recipe.scaling,
                        "format": _format(recipe, role),
                        "limit": limit(recipe, role),
                        "amax": [_short(column[_AMAX]) for column in columns],
                        "scale": [_short(column[_SCALE]) for column in columns],
                        **{
                            key: [int(column[_COUNTS + at]) for column in columns]
                            for key, at in _NAMES.items()
                        },
                    }
                )
        return {
            "steps": [point.step for point in self._points],
            "ranks": [point.ranks for point in self._points],
            "shared": dict(bank.siblings),
            "slots": slots,
        }


def ratios(histories: Iterable[History]) -> dict[str, dict[str, float]]:
    """{role: {saturated, flushed, non_finite}} as parts of all elements cast."""
    sums = sum((history.sums() for history in histories), np.zeros((len(ROLES), 4)))
    return {
        role: {
            key: float(sums[index, at] / sums[index, SEEN])
            for key, at in _NAMES.items()
            if at != SEEN
        }
        for index, role in enumerate(ROLES)
        if sums[index, SEEN]
    }


def _merged(first: _Point, second: _Point) -> _Point:
    values = second.values.copy()
    values[:, _AMAX] = np.maximum(first.values[:, _AMAX], second.values[:, _AMAX])
    values[:, _COUNTS:] += first.values[:, _COUNTS:]
    return _Point(second.step, min(first.ranks, second.ranks), values)


def _format(recipe: Recipe, role: int) -> str:
    wide = ROLES[role] == "grad_output" and grad_is_e5m2(recipe)
    return "e5m2" if wide else "e4m3"


def _short(value: float) -> float | None:
    """Four digits; None for what JSON has no number for."""
    return float(f"{value:.4g}") if np.isfinite(value) else None


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
