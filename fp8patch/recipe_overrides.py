"""Overrides: what a recipe says about single layers.

    overrides:
      "*.down_proj": {scaling: rowwise, fp8_format: e4m3}
      "model.layers.0": {fprop: bf16, dgrad: bf16, wgrad: bf16}

A pattern is a glob over module paths, as in `skip`. Where several match one layer, all of them
count, and of two that set the same field the later one does. What a scale is made from may be
changed, and which GEMMs run in FP8; what the plan decides (skip, include, misaligned, min_gain) and
what norms write may not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8patch.errors import RecipeError
from fp8patch.recipe_fields import (
    DELAYED_DEFAULTS,
    check_history,
    check_value,
    nearest,
    plain,
    shown,
)

__all__ = ["FIELDS", "PRECISIONS", "Override", "applied", "read_overrides"]

PRECISIONS = ("fprop", "dgrad", "wgrad")
FIELDS = ("scaling", "fp8_format", *DELAYED_DEFAULTS, *PRECISIONS)


@dataclass(frozen=True, slots=True)
class Override:
    """One pattern, and the fields that it sets, in their order: ((name, value), …)."""

    pattern: str
    changes: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        """As YAML writes the fields: "scaling: rowwise, margin: 1"."""
        return ", ".join(f"{field}: {value}" for field, value in self.changes)


def read_overrides(value: Any) -> tuple[Override, ...]:
    """Overrides from what JSON, YAML or the user's Python holds, or as they are.

    Raises:
        RecipeError: Not a mapping of patterns to fields, an unknown field (the nearest is named),
            or a value that the field may not have.
    """
    if isinstance(value, tuple) and all(isinstance(each, Override) for each in value):
        return value
    if not isinstance(value, Mapping):
        raise RecipeError(
            f"overrides: {shown(value)} is not allowed. Use a mapping of patterns to fields, such "
            'as {"*.down_proj": {scaling: rowwise}}.'
        )
    return tuple(_read_one(pattern, fields) for pattern, fields in value.items())


def _read_one(pattern: Any, fields: Any) -> Override:
    if not isinstance(pattern, str) or not pattern:
        raise RecipeError(
            f"overrides: {shown(pattern)} is not a pattern. Use globs over module paths, such as "
            '"*.down_proj".'
        )
    where = f"overrides: {shown(pattern)}: "
    if not isinstance(fields, Mapping) or not fields:
        raise RecipeError(
            f"{where}{shown(fields)} is not allowed. Use the fields to change, such as "
            "{scaling: rowwise}."
        )
    for field, value in fields.items():
        if field not in FIELDS:
            raise RecipeError(
                f"{where}unknown field {shown(field)}.{nearest(field, FIELDS)} An override sets "
                f"{', '.join(FIELDS)}."
            )
        try:
            check_value(field, plain(field, value))
        except RecipeError as error:
            raise RecipeError(f"{where}{error}") from None
    return Override(pattern, tuple(fields.items()))


def applied(values: Mapping[str, Any], overrides: tuple[Override, ...]) -> dict[str, Any]:
    """`values` (fields of a recipe) as `overrides` change them, in their order.

    A layer that is given another scaling gives up what the recipe says about its history.

    Raises:
        RecipeError: An override sets a field of the history where the layer keeps none.
    """
    changed = dict(values)
    for override in overrides:
        changed.update(override.changes)
    if changed["scaling"] != "delayed":
        set_here = {field for override in overrides for field, _ in override.changes}
        changed.update((f, v) for f, v in DELAYED_DEFAULTS.items() if f not in set_here)
    try:
        check_history(changed)
    except RecipeError as error:
        patterns = " with ".join(shown(override.pattern) for override in overrides)
        raise RecipeError(f"overrides: {patterns}: {error}") from None
    return changed
