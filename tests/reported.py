"""Reports of runs that never were, as `fp8patch train --report` writes them."""

import json
from pathlib import Path
from typing import Any

from fp8patch.inspect.run import slots_of
from fp8patch.inspect.slots import SlotPoints

POINTS = 20


def slot(path: str = "a", role: str = "input", **changes: Any) -> dict[str, Any]:
    """A healthy slot over 20 points, as a report has it."""
    wide = role == "grad_output"
    limit = 57344.0 if wide else 448.0
    return {
        "path": path,
        "role": role,
        "scaling": "delayed",
        "format": "e5m2" if wide else "e4m3",
        "limit": limit,
        "amax": [2.0] * POINTS,
        "scale": [limit / 2] * POINTS,
        "saturated": [0] * POINTS,
        "flushed": [0] * POINTS,
        "non_finite": [0] * POINTS,
        "seen": [1000] * POINTS,
        **changes,
    }


def report(*slots: dict[str, Any], **changes: Any) -> dict[str, Any]:
    steps = list(range(5, 5 * POINTS + 5, 5))
    history = {"steps": steps, "ranks": [1] * POINTS, "shared": {}, "slots": list(slots)}
    model = {"class": "Net", "plan": {"converted": 3}, "skipped": {}, "history": history}
    return {
        "format_version": 2,
        "fp8patch_version": "0.1.0",
        "state": "finished",
        "backend": "emulate",
        "execution": "emulate",
        "device": "CPU",
        "world_size": 1,
        "recipe": "delayed",
        "models": [model],
        "steps": 100,
        "step_seconds": [0.5] * 100,
        "median_step_seconds": 0.5,
        "losses": [[step, 3 - step / 100] for step in range(1, 101)],
        "peak_memory_bytes": 2**30,
        "peak_memory_kind": "resident in memory",
        "coverage": {},
        "ratios": {},
        **changes,
    }


def written(path: Path, *slots: dict[str, Any], **changes: Any) -> Path:
    path.write_text(json.dumps(report(*slots, **changes)))
    return path


def at(*steps: int, value: int, zero: int = 0) -> list[int]:
    return [value if i in steps else zero for i in range(POINTS)]


def points(**changes: Any) -> SlotPoints:
    (found,) = slots_of(report(slot(**changes))["models"][0])
    return found
