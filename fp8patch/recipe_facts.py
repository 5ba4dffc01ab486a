"""What a recipe needs and costs, and how it reads as a file. No torch in here."""

import json
from dataclasses import dataclass
from typing import Any

from fp8patch.hardware import least_capability
from fp8patch.recipe import Recipe
from fp8patch.recipe_overrides import PRECISIONS, Override
from fp8patch.roofline import Gpu, predict_gain, reads_of_a_cast

__all__ = [
    "Facts",
    "differences",
    "facts_of",
    "layers_of",
    "override_line",
    "to_yaml",
    "yaml_value",
]

# The layer that gains are predicted for.
SIZE = 4096
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one layer of a recipe needs and costs.

    Attributes:
        needs: Least compute capability that runs it in FP8; None where no GEMM is in FP8.
        gemms: The GEMMs that run in FP8, of fprop, dgrad and wgrad.
        reads: How often an activation is read to be cast.
        history_bytes: Memory of the amax history, a tensor.
        gain: Predicted over BF16, for one layer of SIZE^3; None without a GPU's figures.
    """

    needs: tuple[int, int] | None
    gemms: tuple[str, ...]
    reads: int
    history_bytes: int
    gain: float | None


def facts_of(recipe: Recipe, gpu: Gpu | None) -> Facts:
    """Of `recipe` without its overrides."""
    gemms = tuple(gemm for gemm in PRECISIONS if getattr(recipe, gemm) == "fp8")
    delayed = recipe.scaling == "delayed"
    return Facts(
        needs=least_capability(rowwise=recipe.scaling == "rowwise") if gemms else None,
        gemms=gemms,
        reads=reads_of_a_cast(recipe),
        history_bytes=_FP32_BYTES * recipe.amax_history_len if delayed and gemms else 0,
        gain=None if gpu is None else predict_gain(SIZE, SIZE, SIZE, gpu, recipe),
    )


def layers_of(recipe: Recipe) -> dict[str, Recipe]:
    """{"": the recipe without overrides, pattern: that of a layer which only it matches, …}"""
    each = {override.pattern: recipe.for_layer([override.pattern]) for override in recipe.overrides}
    return {"": recipe.for_layer([]), **each}


def differences(recipe: Recipe, base: Recipe) -> dict[str, tuple[Any, Any]]:
    """{field: (value in `recipe`, value in `base`)}, the name left out."""
    mine, other = recipe.to_dict(), base.to_dict()
    return {
        field: (value, other[field])
        for field, value in mine.items()
        if field != "name" and value != other[field]
    }


def to_yaml(recipe: Recipe) -> str:
    """A recipe file that says every field; `Recipe.load` of it gives an equal recipe back, but for
    its name, which is that of the file."""
    default = Recipe()
    lines = []
    for field, value in recipe.to_dict().items():
        if field in ("name", "overrides"):
            continue
        usual = getattr(default, field)
        usual = list(usual) if isinstance(usual, tuple) else usual
        remark = "" if value == usual else f"  # {default.name}: {yaml_value(usual)}"
        lines.append(f"{field}: {yaml_value(value)}{remark}")
    if not recipe.overrides:
        return "\n".join([*lines, "overrides: {}"]) + "\n"
    listed = [override_line(each) for each in recipe.overrides]
    return "\n".join([*lines, "overrides:", *listed]) + "\n"


def override_line(override: Override) -> str:
    """One override, as a line below `overrides:`."""
    fields = ", ".join(f"{field}: {yaml_value(value)}" for field, value in override.changes)
    return f"  {json.dumps(override.pattern)}: {{{fields}}}"


def yaml_value(value: Any) -> str:
    """One value, as YAML reads it back: words as they are, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
