"""What the user asked for: scaling, formats, and the precision of each GEMM. No torch in here.

A recipe is a built-in name, a YAML file, or a `Recipe`. The built-ins are the files of `recipes/`,
their single source; a file may start from one of them with `base:` and override its fields.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from fp8patch.errors import RecipeError
from fp8patch.recipe_fields import (
    DELAYED_DEFAULTS,
    check_history,
    check_value,
    nearest,
    plain,
    shown,
)
from fp8patch.recipe_overrides import PRECISIONS, Override, applied, read_overrides
from fp8patch.recipe_yaml import read_yaml

__all__ = ["Precision", "Recipe", "builtin_names", "describe"]

Precision = Literal["fp8", "bf16"]

# Keys of a file that are not fields.
_FILE_KEYS = ("base", "description")


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
        loss: A cross entropy in the model's training forward, on a GPU: `fused`, which makes no
            FP32 copy of the logits, or PyTorch's own.
        overrides: Other values for single layers (recipe_overrides.py); given as a mapping
            {pattern: {field: value}}.

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
    loss: Literal["fused", "stock"] = "fused"
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        values = {field: getattr(self, field) for field in _DEFAULTS}
        for field, value in values.items():
            if field != "overrides":
                check_value(field, value)
        check_history(values)
        # Frozen for everybody else.
        object.__setattr__(self, "overrides", read_overrides(self.overrides))
        for override in self.overrides:
            applied(values, (override,))

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
                f"no recipe is named {shown(source)}.{nearest(source, builtin_names())} "
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
                    f"unknown recipe field {shown(key)}.{nearest(key, list(_DEFAULTS))} "
                    f"Allowed: {', '.join(_DEFAULTS)}."
                )
        return cls(**{key: plain(key, value) for key, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON and YAML hold them; `Recipe.from_dict` gives an equal recipe back."""
        values = {field: getattr(self, field) for field in _DEFAULTS}
        values["overrides"] = {each.pattern: dict(each.changes) for each in self.overrides}
        return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}

    def replace(self, **changes: Any) -> "Recipe":
        """A copy with some fields changed and everything checked again.

        Raises:
            RecipeError: As for `from_dict`.
        """
        return type(self).from_dict({**self.to_dict(), **changes})

    def for_layer(self, patterns: Collection[str]) -> "Recipe":
        """The recipe of one layer: this one as the overrides with these `patterns` change it.

        It has no overrides of its own.

        Raises:
            RecipeError: Two of them together make no sense.
        """
        return _for_layer(self, tuple(patterns)) if self.overrides else self

    @property
    def in_fp8(self) -> bool:
        """Whether any of the three GEMMs runs in FP8."""
        return any(getattr(self, gemm) == "fp8" for gemm in PRECISIONS)


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Recipe)}


# One object for equal arguments: what compiles layers tells their recipes apart by it.
@cache
def _for_layer(recipe: Recipe, patterns: tuple[str, ...]) -> Recipe:
    chosen = tuple(each for each in recipe.overrides if each.pattern in patterns)
    values = {field: getattr(recipe, field) for field in _DEFAULTS}
    return Recipe(**{**applied(values, chosen), "overrides": ()})


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
                f"base: {shown(base)} is not a built-in recipe to start from."
                f"{nearest(base, builtin_names())} Allowed: {', '.join(builtin_names())}."
            )
        if values.get("scaling", "delayed") != "delayed":
            # What the base says about its history does not survive a change of scaling.
            fields.update(DELAYED_DEFAULTS)
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
            f"{path}: unknown recipe field {shown(unknown[0])}.{nearest(unknown[0], allowed)} "
            f"Allowed: {', '.join(allowed)}."
        )
    return values
