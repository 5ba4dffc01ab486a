"""What page and picture of a report draw: curves and maps of runs, of any length. No torch."""

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

from fp8patch.errors import CheckpointError
from fp8patch.inspect.run import last_loss
from fp8patch.inspect.slots import SlotPoints
from fp8patch.inspect.source import Source

__all__ = [
    "FACTS",
    "METRICS",
    "ROLES",
    "check_runs",
    "drawing",
    "facts_of",
    "names_of",
    "part",
    "title_of",
]

METRICS = {"flushed": "flushed to zero", "saturated": "clipped", "non_finite": "not finite"}
ROLES = {"input": "inputs", "weight": "weights", "grad_output": "gradients"}

# Of each run, in this order; from the fourth on they are numbers.
FACTS = (
    "run", "ran in", "recipe", "steps", "last loss", "median step", "peak memory", "FLOPs in FP8"
)  # fmt: skip

_MOST_POINTS = 600
# A cell of a map has 16 bits: 0 nothing cast, 1 nothing lost, from 2 on a part of 1e-8 to 1.
_FLOOR = -8.0
_LEVELS = 65533


def names_of(sources: Sequence[Source]) -> list[str]:
    """A short name for each: the file's, with its folder's where two are the same."""
    names = [source.path.stem for source in sources]
    if len(set(names)) < len(names):
        names = [f"{source.path.resolve().parent.name}/{source.path.stem}" for source in sources]
    seen: dict[str, int] = {}
    for at, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        names[at] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names


def title_of(names: Sequence[str], sources: Sequence[Source]) -> str:
    """What the first run trained, and its name."""
    return f"{', '.join(sources[0].models) or 'No model'}: {names[0]}"


def facts_of(name: str, source: Source) -> list[str]:
    """A text for each of `FACTS`, empty where the report has none."""
    values = source.values
    seconds, memory = values["median_step_seconds"], values["peak_memory_bytes"]
    share = values["coverage"].get("fp8_flops_share")
    where = f"{values['execution'] or values['backend']}, {values['device'] or 'no device'}"
    ranks = values["world_size"]
    return [
        name,
        where + (f", {ranks} ranks" if ranks > 1 else ""),
        source.recipe if values["execution"] in ("fp8", "emulate") else "",
        f"{values['steps']} ({values['state']})",
        last_loss(values),
        "" if seconds is None else f"{1000 * seconds:.1f} ms",
        f"{memory / 2**30:.2f} GiB" if memory else "",
        "" if not share else f"{100 * share:.1f}%",
    ]


def drawing(sources: Sequence[Source]) -> dict[str, Any]:
    """JSON-safe; `page/report.js` and `report_picture.py` draw it."""
    runs = []
    for name, source in zip(names_of(sources), sources, strict=True):
        values = source.values
        each = values.get("step_seconds_each", 1)
        seconds = [((at + 1) * each, 1000 * s) for at, s in enumerate(values["step_seconds"])]
        runs.append(
            {
                "name": name,
                "losses": _thinned([(step, loss) for step, loss in values["losses"]]),
                "milliseconds": _thinned(seconds),
                "heat": _heat(source),
            }
        )
    return {"runs": runs, "said": METRICS}


def _thinned(points: Sequence[tuple[int, float | None]]) -> list[list[Any]]:
    """At most `_MOST_POINTS`, each the mean of its group at the group's last step."""
    size = math.ceil(len(points) / _MOST_POINTS) if points else 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [[group[-1][0], _mean([value for _, value in group])] for group in groups]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    # A loss that became nan is a hole in its curve.
    return float(f"{sum(known) / len(known):.6g}") if len(known) == len(values) else None


def _heat(source: Source) -> dict[str, Any] | None:
    """Rows are layers in the order of the model, columns the points of the run."""
    slots = [slot for slot in source.slots if slot.steps]
    if not slots:
        return None
    steps = max((list(slot.steps) for slot in slots), key=len)
    layers = list(dict.fromkeys(slot.path for slot in slots))
    by_place = {(slot.path, slot.role): slot for slot in slots}
    followed = {path: slot for slot in slots for path in slot.shared_by}
    cells: dict[str, dict[str, str]] = {metric: {} for metric in METRICS}
    for role in ROLES:
        rows = [
            by_place.get((layer, role)) or (followed.get(layer) if role == "input" else None)
            for layer in layers
        ]
        for metric in METRICS:
            codes = array("H", chain.from_iterable(_row(slot, metric, steps) for slot in rows))
            if sys.byteorder == "big":
                codes.byteswap()
            cells[metric][role] = base64.b64encode(codes.tobytes()).decode()
    return {"layers": [layer or "(root)" for layer in layers], "steps": steps, "cells": cells}


def _row(slot: SlotPoints | None, metric: str, steps: list[int]) -> list[int]:
    if slot is None:
        return [0] * len(steps)
    counts: Sequence[int] = getattr(slot, metric)
    codes = dict(zip(slot.steps, map(_code, counts, slot.seen), strict=True))
    return [codes.get(step, 0) for step in steps]


def _code(count: int, seen: int) -> int:
    if not seen:
        return 0
    if not count:
        return 1
    place = 1 - math.log10(count / seen) / _FLOOR
    return 2 + round(_LEVELS * min(max(place, 0.0), 1.0))


def part(code: int) -> float:
    """The part of the values cast that a cell's code stands for; nan where nothing was cast."""
    if code < 2:
        return 0.0 if code else math.nan
    return float(10 ** (_FLOOR * (1 - (code - 2) / _LEVELS)))


def check_runs(sources: Sequence[Source], most: int) -> None:
    """Raise unless these are reports that one page can show.

    Raises:
        CheckpointError: A folder, or more than `most`.
    """
    for source in sources:
        if source.kind != "run":
            raise CheckpointError(
                f"{source.path}: is a patched folder, of which there is no run to show. Give the "
                f"file of `fp8patch train --report`; `fp8patch inspect {source.path}` shows a "
                "folder."
            )
    if len(sources) > most:
        raise CheckpointError(
            f"{len(sources)} runs are more than one page can tell apart: give at most {most}."
        )
