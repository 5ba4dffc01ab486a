"""What each field of a recipe may hold, and the words for what it may not."""

import difflib
from collections.abc import Mapping
from typing import Any

from fp8patch.errors import RecipeError

__all__ = [
    "DELAYED_DEFAULTS",
    "check_history",
    "check_value",
    "nearest",
    "one_of",
    "plain",
    "shown",
]

_CHOICES: dict[str, tuple[str, ...]] = {
    "scaling": ("delayed", "current", "rowwise"),
    "fp8_format": ("hybrid", "e4m3"),
    "amax_compute_algo": ("max", "most_recent"),
    "fprop": ("fp8", "bf16"),
    "dgrad": ("fp8", "bf16"),
    "wgrad": ("fp8", "bf16"),
    "misaligned": ("skip", "pad"),
    "norm_output": ("auto", "bf16", "fp32"),
    "loss": ("fused", "stock"),
}
_INTEGERS: dict[str, tuple[int, int]] = {
    "amax_history_len": (1, 65536),
    # 2^-margin has to leave something of E4M3's 18 binades.
    "margin": (0, 16),
}
_PATTERNS = ("skip", "include")
# Fields that only the history reads, with their defaults. The other scalings take the live amax,
# which needs no room for growth: a value there would be ignored, and nothing is ignored without a
# word.
DELAYED_DEFAULTS: dict[str, Any] = {
    "amax_history_len": 1024,
    "amax_compute_algo": "max",
    "margin": 0,
}
# Characters of a wrong value that a message repeats.
_MOST_SHOWN = 80
# No float has as many digits, and no layer gains as much.
_HUGE = 1e300


def plain(field: str, value: Any) -> Any:
    """A JSON or YAML value as the dataclass holds it."""
    if field in _PATTERNS and isinstance(value, list):
        return tuple(value)
    if field == "min_gain" and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < _HUGE else value
    return value


def check_value(field: str, value: Any) -> None:
    """Raise unless `value` is one that `field` may have, whatever the other fields say.

    Raises:
        RecipeError: With the value, and what is allowed.
    """
    if field in _CHOICES:
        choices = _CHOICES[field]
        if not isinstance(value, str) or value not in choices:
            hint = nearest(value.lower() if isinstance(value, str) else value, choices)
            raise RecipeError(
                f"{field}: {shown(value)} is not allowed.{hint} Use {one_of(choices)}."
            )
    elif field in _INTEGERS:
        low, high = _INTEGERS[field]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise RecipeError(
                f"{field}: {shown(value)} is not allowed. Use a whole number from {low} to {high}."
            )
    elif field in _PATTERNS:
        if not isinstance(value, tuple) or not all(isinstance(p, str) and p for p in value):
            raise RecipeError(
                f"{field}: {shown(value)} is not allowed. Use a list of glob patterns over module "
                f'paths, such as ["*.gate"].'
            )
    elif field == "min_gain":
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < _HUGE):
            raise RecipeError(
                f"min_gain: {shown(value)} is not allowed. Use a number of at least 0 (1.0 skips "
                f"what would get slower), or null."
            )
    elif not isinstance(value, str) or not value.strip():
        raise RecipeError(f"{field}: {shown(value)} is not allowed. Use a non-empty text.")


def check_history(values: Mapping[str, Any]) -> None:
    """Raise where a field is set that only the history reads, and the scaling keeps none.

    Raises:
        RecipeError: With the field, and the two ways out.
    """
    scaling = values["scaling"]
    for field, default in DELAYED_DEFAULTS.items():
        if scaling != "delayed" and values[field] != default:
            raise RecipeError(
                f"{field}: {shown(values[field])} has no meaning with scaling: {scaling}, which "
                f"keeps no amax history. Remove it, or use scaling: delayed."
            )


def shown(value: Any) -> str:
    """`value` as a message names it: cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits, or more levels, than Python writes
        return f"a huge {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def nearest(word: Any, choices: "list[str] | tuple[str, ...]", cutoff: float = 0.5) -> str:
    """' Did you mean X?' for the choice most like `word`, or '' when none is close."""
    if not isinstance(word, str):
        return ""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def one_of(choices: tuple[str, ...]) -> str:
    """("a", "b", "c") as "a, b or c"."""
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
