"""A report of `fp8patch train`, read back as if somebody had edited it by hand. No torch.

What a slot saw is in `models[i]["history"]`:

    steps   [50, 100, …]        of each point, at most 128; evenly apart but for the last
    ranks   [8, 8, …, 1]        how many ranks a point's counts are summed over
    shared  {"…k_proj": "…q_proj"}   modules that read one tensor, whose input slot is the latter's
    slots   [{"path", "role": "input" | "weight" | "grad_output",
              "scaling", "format": "e4m3" | "e5m2", "limit": what amax is scaled to,
              and one value a point of
              "amax": the largest since the point before, null where it was not finite,
              "scale": of the point's step, 0 where the tensor's own amax was used,
              "saturated", "flushed", "non_finite", "seen": elements since the point before}, …]

Elements that are recomputed in backward, or read by several layers, count each time: use ratios.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8patch import __version__
from fp8patch.errors import CheckpointError
from fp8patch.inspect.slots import SlotPoints

__all__ = ["FORMAT_VERSION", "last_loss", "read_report", "slots_of"]

# Of the reports that this version writes. 1 had no history.
FORMAT_VERSION = 2

# Bytes within which a JSON file has begun.
_START = 4096

# No number of a report comes near: FP32 ends at 3.4e38, and a scale is held in it.
_MOST = 1e40

_ROLES = ("input", "weight", "grad_output")
_COUNTS = ("saturated", "flushed", "non_finite", "seen")
_CHOICES = {
    "role": _ROLES,
    "scaling": ("delayed", "current", "rowwise"),
    "format": ("e4m3", "e5m2"),
}
_KEYS: dict[str, type | tuple[type, ...]] = {
    "fp8patch_version": str,
    "state": str,
    "backend": str,
    "execution": (str, type(None)),
    "device": str,
    "recipe": str,
    "world_size": int,
    "steps": int,
    "models": list,
    "losses": list,
    "step_seconds": list,
    "coverage": dict,
    "ratios": dict,
    "peak_memory_bytes": int,
}


def read_report(path: Path) -> dict[str, Any]:
    """The report at `path`, checked: what is used of it has the type that `train` writes.

    Raises:
        CheckpointError: It cannot be read, is cut short, newer than this, or no report at all.
    """
    try:
        values = json.loads(_text(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "no JSON"
        raise CheckpointError(
            f"{path}: no whole JSON file ({where}): cut short, damaged, or none of ours. Copy it "
            "again, or give the report of another run."
        ) from None
    try:
        _check(values)
        _check_numbers(values)
        for model in values["models"]:
            slots_of(model)
    except _Newer as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        said = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{path}: not a report of `fp8patch train --report` ({said:.200})."
        ) from None
    return dict(values)


def last_loss(values: Mapping[str, Any]) -> str:
    """The loss that a run ended with, to show: no number there is as much of an answer."""
    losses = values.get("losses")
    if not losses:
        return ""
    return "not finite" if losses[-1][1] is None else f"{losses[-1][1]:.4f}"


def _text(path: Path) -> str:
    """What `path` holds, if it can be a report at all: weights may be larger than this machine."""
    with path.open("rb") as file:
        start = file.read(_START)
        if start.strip()[:1] not in (b"{", b"[", b""):
            raise ValueError("no JSON")
        return (start + file.read()).decode("utf-8")


class _Newer(Exception):
    pass


def _check(values: Any) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}")
    if "bank" in values and "plan" in values:
        raise ValueError("it is a checkpoint's sidecar: give the folder that it is in, to inspect")
    version = values["format_version"]
    if type(version) is not int or version < 1:
        raise ValueError(f"format_version is {version!r:.40}")
    if version > FORMAT_VERSION:
        raise _Newer(
            f"written by fp8patch {values.get('fp8patch_version')} in format {version}; this is "
            f"fp8patch {__version__}, which reads formats up to {FORMAT_VERSION}. Upgrade fp8patch."
        )
    for key, kind in _KEYS.items():
        if not isinstance(values[key], kind) or isinstance(values[key], bool):
            raise ValueError(f"{key} is {values[key]!r:.40}")


def _check_numbers(values: Mapping[str, Any]) -> None:
    for step, loss in values["losses"]:
        _number(step, "losses")
        _number(loss, "losses", none=True)
    for seconds in values["step_seconds"]:
        _number(seconds, "step_seconds")
    for key in ("median_step_seconds",):
        _number(values[key], key, none=True)
    share = values["coverage"].get("fp8_flops_share")
    _number(share, "coverage: fp8_flops_share", none=True)
    for key in ("peak_memory_bytes", "steps", "world_size"):
        _number(values[key], key)
    _check_settings(values.get("settings", {}))
    if not 1 <= values.get("step_seconds_each", 1) <= _MOST:
        raise ValueError(f"step_seconds_each is {values['step_seconds_each']!r:.40}")
    for model in values["models"]:
        if not isinstance(model["class"], str):
            raise ValueError(f"a model's class is {model['class']!r:.40}")
        for code, paths in model.get("skipped", {}).items():
            if not all(isinstance(text, str) for text in (code, *paths)):
                raise ValueError(f"skipped is {paths!r:.40}")
    for role, ratios in values["ratios"].items():
        for value in ratios.values():
            _number(value, f"ratios of {role}")


def _check_settings(settings: Mapping[str, Any]) -> None:
    for key in ("options", "recipe", "versions"):
        if not isinstance(settings.get(key, {}), dict):
            raise ValueError(f"settings: {key} is {settings[key]!r:.40}")
    for key in ("only", "skip", "include", "roots"):
        patterns = settings.get("options", {}).get(key, [])
        if not isinstance(patterns, list):
            raise ValueError(f"settings: {key} is {patterns!r:.40}")


def _number(value: Any, name: str, *, none: bool = False) -> None:
    if none and value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} holds {value!r:.40}")
    if not -_MOST <= value <= _MOST:  # nan too
        raise ValueError(f"{name} holds {value!r:.40}, which no run measures")


def slots_of(model: Mapping[str, Any], prefix: str = "") -> list[SlotPoints]:
    """The slots of one entry of a report's `models`; none where it ran without FP8.

    `prefix` goes in front of every path.

    Raises:
        ValueError, TypeError, KeyError: It holds what no run writes.
    """
    history = model.get("history")
    if history is None:
        return []
    steps = history["steps"]
    if not all(type(step) is int for step in steps):
        raise ValueError("history: a step is no number")
    followers: dict[str, list[str]] = {}
    for path, leader in history["shared"].items():
        followers.setdefault(leader, []).append(prefix + path)
    return [_slot(values, steps, followers, prefix) for values in history["slots"]]


def _slot(
    values: Any, steps: list[int], followers: Mapping[str, list[str]], prefix: str
) -> SlotPoints:
    path, role = values["path"], values["role"]
    for key, allowed in _CHOICES.items():
        if values[key] not in allowed:
            raise ValueError(f"history: {key} of {path!r:.80} is {values[key]!r:.40}")
    columns = {name: values[name] for name in ("amax", "scale", *_COUNTS)}
    for name, column in columns.items():
        if not isinstance(column, list) or len(column) != len(steps):
            raise ValueError(f"history: {name} of {path!r:.80} has not one value a step")
        for value in column:
            _number(value, f"history: {name} of {path!r:.80}", none=name == "amax")
            if value is not None and value < 0:
                raise ValueError(f"history: {name} of {path!r:.80} is negative")
            if name in _COUNTS and type(value) is not int:
                raise ValueError(f"history: {name} of {path!r:.80} holds {value!r:.40}, no count")
    _number(values["limit"], "history: limit")
    if values["limit"] <= 0:
        raise ValueError(f"history: limit is {values['limit']!r:.40}")
    return SlotPoints(
        path=prefix + path,
        role=role,
        scaling=values["scaling"],
        format=values["format"],
        limit=float(values["limit"]),
        steps=steps,
        shared_by=tuple(followers.get(path, ())) if role == "input" else (),
        **columns,
    )
