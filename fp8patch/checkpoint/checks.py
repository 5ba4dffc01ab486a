"""What a sidecar's two files may hold: they are read as if somebody had edited them by hand.

Each function raises ValueError with a clause that says what is wrong, and knows no path on disk.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp8patch.plan.model import Plan
from fp8patch.plan.types import NORM_KINDS
from fp8patch.slots import ROLES, SlotState

__all__ = [
    "SLOT_PARTS",
    "check_modules",
    "check_siblings",
    "flag",
    "format_version",
    "json_object",
    "slot_states",
    "text",
    "texts",
]

# {part of a slot's name on disk, and field of SlotState: its dimensions}
SLOT_PARTS = {"history": 1, "scale": 0, "amax": 0, "counts": 1}


def json_object(data: str) -> dict[str, Any]:
    """The object that `data` is."""
    try:
        values = json.loads(data, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error})") from None
    except RecursionError:
        raise ValueError("not valid JSON (nested too deeply)") from None
    except ValueError as error:  # of int(): more digits than Python reads
        raise ValueError(f"not valid JSON ({str(error).split(';')[0]})") from None
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def format_version(values: Mapping[str, Any]) -> int:
    """The format that the sidecar is written in."""
    version = values.get("format_version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        what = f"format_version is {version!r:.40}" if "format_version" in values else "it has none"
        raise ValueError(f"it names no format_version ({what}, not a number from 1)")
    return version


def text(values: Mapping[str, Any], name: str) -> str:
    """The text under `name`."""
    value = values[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.40}, not a text")
    return value


def texts(values: Mapping[str, Any], name: str) -> dict[str, str]:
    """The {text: text} under `name`."""
    found = values[name]
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ValueError(f"{name} is {found!r:.40}, not an object of texts")
    return found


def flag(values: Any, name: str) -> bool:
    """The truth value under `name`."""
    value = values[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.40}, not true or false")
    return value


def check_siblings(siblings: Mapping[str, str]) -> None:
    """Raise unless every module follows one that follows none."""
    for path, leader in siblings.items():
        if leader in siblings:
            raise ValueError(f"siblings: {path!r} follows {leader!r}, which follows another itself")


def slot_states(tensors: Mapping[str, Tensor]) -> dict[tuple[str, int], SlotState]:
    """{(path, index into ROLES): state} from the tensors of the state file."""
    found: dict[tuple[str, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        place, _, part = name.rpartition(".")
        module, _, role = place.rpartition(".")
        dtype = torch.int64 if part == "counts" else torch.float32
        known = role in ROLES and part in SLOT_PARTS
        if not known or tensor.dtype != dtype or tensor.dim() != SLOT_PARTS[part]:
            shape = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise ValueError(f"{name!r} is {shape}, which no slot has")
        wrong = _wrong_values(part, tensor)
        if wrong:
            raise ValueError(f"{name!r} holds {wrong}")
        found.setdefault((module, ROLES.index(role)), {})[part] = tensor
    for (module, index), slot in found.items():
        if set(slot) != set(SLOT_PARTS) or slot["counts"].numel() != 4:
            raise ValueError(f"the {ROLES[index]} slot of {module!r} is incomplete")
    return {key: SlotState(**slot) for key, slot in found.items()}


def _wrong_values(part: str, tensor: Tensor) -> str:
    """What of `tensor` no slot ever holds, or ''."""
    if bool((tensor < 0).any()):
        return f"a negative {part}"
    # A pending amax may be inf or nan: of a step that overflowed just before the model was saved.
    # The next update leaves it out of the history.
    if part in ("history", "scale") and not bool(torch.isfinite(tensor).all()):
        return f"an infinite or undefined {part}"
    return ""


def check_modules(
    plan: Plan,
    bank: Any,
    state: Mapping[tuple[str, int], SlotState],
    fingerprint: Mapping[str, str],
) -> None:
    """Raise unless everything is said of modules that `plan` converts; `bank` is a `BankMeta`."""
    converted = plan.converted()
    gemms = {d.path for d in converted if d.kind not in NORM_KINDS}
    normed = {d.path for d in converted} - gemms
    claims: dict[str, Any] = {
        "siblings": {*bank.siblings, *bank.siblings.values()} - gemms,
        "low_precision_norms": set(bank.low_precision_norms) - normed,
        "norm_readers": {*bank.norm_readers} - normed | {*bank.norm_readers.values()} - gemms,
        "the state file": {path for path, _ in state} - gemms,
        "fingerprint": set(fingerprint) - gemms,
    }
    for what, strange in claims.items():
        if strange:
            raise ValueError(f"{what} names {min(strange)!r}, which its plan does not convert")
