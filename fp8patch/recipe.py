"""What the user asked for: scaling, formats, and the precision of each GEMM. No torch in here.

A recipe is a built-in name, a YAML file, or a `Recipe`. The built-ins are the files of `recipes/`,
their single source; a file may start from one of them with `base:` and override its fields.
"""

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from fp8patch.errors import RecipeError
from fp8patch.recipe_yaml import read_yaml

__all__ = ["Precision", "Recipe", "builtin_names", "describe"]

Precision = Literal["fp8", "bf16"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "scaling": ("delayed", "current", "rowwise"),
    "fp8_format": ("hybrid", "e4m3"),
    "amax_compute_algo": ("max", "most_recent"),
    "fprop": ("fp8", "bf16"),
    "dgrad": ("fp8", "bf16"),
    "wgrad": ("fp8", "bf16"),
    "misaligned": ("skip", "pad"),
    "norm_output": ("auto", "bf16", "fp32"),
}
_INTEGERS: dict[str, tuple[int, int]] = {
    "amax_history_len": (1, 65536),
    # 2^-margin has to leave something of E4M3's 18 binades.
    "margin": (0, 16),
}
_PATTERNS = ("skip", "include")
# Fields that only the history reads. The other scalings take the live amax, which needs no room
# for growth: a value there would be ignored, and nothing is ignored without a word.
_DELAYED_ONLY = ("amax_history_len", "amax_compute_algo", "margin")
# Keys of a file that are not fields.
_FILE_KEYS = ("base", "description")
# Characters of a wrong value that a message repeats.
_MOST_SHOWN = 80
# No float has as many digits, and no layer gains as much.
_HUGE = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How converted modules compute. The defaults are the built-in `delayed`.

    Attributes:
        name: The built-in's name, or the file's stem; only shown.
        scaling: `delayed` (per tensor, from earlier steps), `current` (per tensor, from the tensor
            itself) or `rowwise` (per row of each operand).
        fp8_format: `hybrid` (E4M3, with E5M2 for gradients) or `e4m3` (for all three). The rowwise
            built-ins use `e4m3`: a row's own scale gives the range that E5M2 is for.
        amax_history_len: Optimizer steps that a delayed scale looks back on.
        amax_compute_algo: `max` over the history, or its `most_recent` entry.
        margin: Powers of two kept free below the largest FP8 number; delayed only.
        fprop, dgrad, wgrad: Precision of the output, the input's and the weight's gradient.
        skip, include: Globs over module paths: never convert; convert in spite of a default skip.
        misaligned: What to do when a feature count is not a multiple of 16.
        min_gain: Skip layers predicted to gain less; None leaves it to the caller.
        norm_output: Precision of a converted norm's output under autocast.

    Raises:
        RecipeError: A value of the wrong type, out of range, or without a meaning here.
    """

    name: str = "delayed"
    scaling: Literal["delayed", "current", "rowwise"] = "delayed"
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    margin: int = 0
    fprop: Precision = "fp8"
    dgrad: Precision = "fp8"
    wgrad: Precision = "fp8"
    skip: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    misaligned: Literal["skip", "pad"] = "skip"
    min_gain: float | None = None
    norm_output: Literal["auto", "bf16", "fp32"] = "auto"

    def __post_init__(self) -> None:
        for field, default in _DEFAULTS.items():
            value = getattr(self, field)
            _check_value(field, value)
            if field in _DELAYED_ONLY and self.scaling != "delayed" and value != default:
                raise RecipeError(
                    f"{field}: {_shown(value)} has no meaning with scaling: {self.scaling}, which "
                    f"keeps no amax history. Remove it, or use scaling: delayed."
                )

    @classmethod
    def load(cls, source: "str | Path | Recipe | None" = None) -> "Recipe":
        """The recipe that `source` means: a built-in's name, a YAML file, a Recipe, or the default.

        Raises:
            RecipeError: No such built-in or file, not YAML, or an unknown or impossible field.
        """
        if source is None:
            return cls()
        if isinstance(source, Recipe):
            return source
        if not isinstance(source, str | Path):
            raise RecipeError(
                f"a recipe is a built-in name, a YAML file or a Recipe, not "
                f"{type(source).__name__}. Recipe.from_dict reads a dict."
            )
        if isinstance(source, str) and source in builtin_names():
            return _load_builtin(source)
        path = Path(source).expanduser()
        looks_like_file = isinstance(source, Path) or path.suffix != "" or "/" in str(source)
        if not looks_like_file and not os.path.isfile(path):
            raise RecipeError(
                f"no recipe is named {_shown(source)}.{_nearest(source, builtin_names())} "
                f"Built in: {', '.join(builtin_names())}; or give the path of a YAML file."
            )
        return _load_file(path)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A recipe from field values, as `to_dict` or YAML gives them; absent fields are default.

        Raises:
            RecipeError: An unknown field (the nearest is named), or a value that is not allowed.
        """
        if not isinstance(values, Mapping):
            raise RecipeError(f"a recipe is a mapping of fields, not {type(values).__name__}.")
        for key in values:
            if key not in _DEFAULTS:
                raise RecipeError(
                    f"unknown recipe field {_shown(key)}.{_nearest(key, list(_DEFAULTS))} "
                    f"Allowed: {', '.join(_DEFAULTS)}."
                )
        return cls(**{key: _plain(key, value) for key, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON and YAML hold them; `Recipe.from_dict` gives an equal recipe back."""
        values = {field: getattr(self, field) for field in _DEFAULTS}
        return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}

    def replace(self, **changes: Any) -> "Recipe":
        """A copy with some fields changed and everything checked again.

        Raises:
            RecipeError: As for `from_dict`.
        """
        return type(self).from_dict({**self.to_dict(), **changes})


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Recipe)}


@cache
def builtin_names() -> tuple[str, ...]:
    """Names of the recipes that come with fp8patch, the default first."""
    names = sorted(path.stem for path in _recipes_dir().glob("*.yaml"))
    return tuple(sorted(names, key=lambda name: name != "delayed"))


def describe(name: str) -> str:
    """One sentence on a built-in recipe, from its file.

    Raises:
        RecipeError: No built-in recipe has this name.
    """
    if name not in builtin_names():
        raise RecipeError(f"no built-in recipe is named {name!r}: {', '.join(builtin_names())}.")
    return str(_read(_recipes_dir() / f"{name}.yaml").get("description", ""))


def _recipes_dir() -> Path:
    """The folder of the built-ins: inside the wheel, or beside the package in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "recipes", here.parent / "recipes"):
        if (folder / "delayed.yaml").is_file():
            return folder
    raise RecipeError(
        f"the built-in recipes are missing beside {here}: this installation is incomplete. "
        f"Install fp8patch again."
    )


@cache
def _load_builtin(name: str) -> Recipe:
    return _load_file(_recipes_dir() / f"{name}.yaml")


def _load_file(path: Path) -> Recipe:
    values = _read(path)
    base = values.pop("base", None)
    values.pop("description", None)
    try:
        if base is None:
            fields: dict[str, Any] = {}
        elif isinstance(base, str) and base in builtin_names() and base != path.stem:
            fields = _load_builtin(base).to_dict()
        else:
            raise RecipeError(
                f"base: {_shown(base)} is not a built-in recipe to start from."
                f"{_nearest(base, builtin_names())} Allowed: {', '.join(builtin_names())}."
            )
        if values.get("scaling", "delayed") != "delayed":
            # What the base says about its history does not survive a change of scaling.
            fields.update({field: _DEFAULTS[field] for field in _DELAYED_ONLY})
        return Recipe.from_dict({**fields, "name": path.stem, **values})
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path)
    except FileNotFoundError:
        raise RecipeError(
            f"{path}: no such recipe file. Built in: {', '.join(builtin_names())}."
        ) from None
    if not isinstance(values, dict):
        found = "empty" if values is None else f"a {type(values).__name__}"
        raise RecipeError(
            f"{path}: a recipe is a mapping such as 'scaling: delayed', but this file is {found}."
        )
    unknown = [key for key in values if key not in _DEFAULTS and key not in _FILE_KEYS]
    if unknown:
        allowed = [*_FILE_KEYS, *_DEFAULTS]
        raise RecipeError(
            f"{path}: unknown recipe field {_shown(unknown[0])}.{_nearest(unknown[0], allowed)} "
            f"Allowed: {', '.join(allowed)}."
        )
    return values


def _plain(field: str, value: Any) -> Any:
    """A JSON or YAML value as the dataclass holds it."""
    if field in _PATTERNS and isinstance(value, list):
        return tuple(value)
    if field == "min_gain" and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < _HUGE else value
    return value


def _check_value(field: str, value: Any) -> None:
    """Raise unless `value` is one that `field` may have, whatever the other fields say."""
    if field in _CHOICES:
        choices = _CHOICES[field]
        if not isinstance(value, str) or value not in choices:
            hint = _nearest(value.lower() if isinstance(value, str) else value, choices)
            raise RecipeError(f"{field}: {_shown(value)} is not allowed.{hint} Use {_or(choices)}.")
    elif field in _INTEGERS:
        low, high = _INTEGERS[field]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise RecipeError(
                f"{field}: {_shown(value)} is not allowed. Use a whole number from {low} to {high}."
            )
    elif field in _PATTERNS:
        if not isinstance(value, tuple) or not all(isinstance(p, str) and p for p in value):
            raise RecipeError(
                f"{field}: {_shown(value)} is not allowed. Use a list of glob patterns over module "
                f'paths, such as ["*.gate"].'
            )
    elif field == "min_gain":
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < _HUGE):
            raise RecipeError(
                f"min_gain: {_shown(value)} is not allowed. Use a number of at least 0 (1.0 skips "
                f"what would get slower), or null."
            )
    elif not isinstance(value, str) or not value.strip():
        raise RecipeError(f"{field}: {_shown(value)} is not allowed. Use a non-empty text.")


def _shown(value: Any) -> str:
    """`value` as a message names it: cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits, or more levels, than Python writes
        return f"a huge {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _nearest(word: Any, choices: "list[str] | tuple[str, ...]") -> str:
    """' Did you mean X?' for the choice most like `word`, or '' when none is close."""
    if not isinstance(word, str):
        return ""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _or(choices: tuple[str, ...]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
