"""When a call runs as the stock class although FP8 is on, and how that is said."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp8patch import messages, regions
from fp8patch.errors import HardwareError, RecipeError
from fp8patch.ops.quantize import ALIGNMENT
from fp8patch.recipe import Recipe

_FIXED_BY_CONVERSION = (
    "scaling",
    "fp8_format",
    "amax_history_len",
    "amax_compute_algo",
    "margin",
    "misaligned",
    "norm_output",
    "loss",
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@cache
def check_override(converted: Recipe, wanted: Recipe) -> None:
    """A recipe given to `autocast` may change the precision of the GEMMs, and nothing that the
    slots were made for.

    Raises:
        RecipeError: It differs in another field.
    """
    for name in _FIXED_BY_CONVERSION:
        was, now = getattr(converted, name), getattr(wanted, name)
        if was != now:
            raise RecipeError(
                f"autocast(recipe=…) says {name}: {now}, and the model was converted with {name}: "
                f"{was}. A region may change fprop, dgrad and wgrad only: start from the model's "
                f"own recipe with .replace(), or convert with {wanted.name!r}."
            )
    if wanted.overrides not in ((), converted.overrides):
        raise RecipeError(
            "autocast(recipe=…) has overrides that the model was not converted with. They are "
            "settled by conversion: convert with them, or give a recipe without."
        )


def precision_of(module: Any, region: regions.Region) -> Recipe:
    """The recipe that says which GEMMs of `module` run in FP8 in this region.

    A region's own, but for a layer that has overrides of its own: what is said of one layer is not
    undone by what is said of all.
    """
    recipe: Recipe = module._fp8_recipe
    if region.recipe is None or recipe is not module._fp8_bank.recipe:
        return recipe
    return region.recipe


def find_obstacle(
    module: Any, input: Tensor, region: regions.Region, precision: Recipe
) -> str | None:
    """Why this call must run as the stock class, or None. Looks only, so that it can be traced.

    Returns:
        "stock" where that is what was asked for, or where the stock class has to decide (it may
        refuse, or compute in FP64); "misaligned", "rowwise" or "device" where the user can't know.
    """
    weight, device = module.weight, input.device.type
    if (precision.fprop, precision.dgrad, precision.wgrad) == ("bf16", "bf16", "bf16"):
        return "stock"
    if input.dtype not in _FLOATS or weight.dtype not in _FLOATS or input.dim() == 0:
        return "stock"
    in_features, out_features = _features(module)
    elsewhere = device == "meta" or input.device != weight.device
    if elsewhere or input.shape[-1] != in_features or not in_features * out_features:
        return "stock"
    if not torch.is_autocast_enabled(device) and input.dtype != weight.dtype:
        return "stock"
    recipe: Recipe = module._fp8_recipe
    if recipe.misaligned == "skip" and (in_features % ALIGNMENT or out_features % ALIGNMENT):
        return "misaligned"
    if recipe.scaling == "rowwise" and not region.rowwise:
        return "rowwise"
    if region.execution == "fp8" and device != "cuda":
        return "device"
    return None


def _features(module: Any) -> tuple[int, int]:
    rows, cols = module.weight.shape
    return (rows, cols) if module._fp8_in_out else (cols, rows)


def report_obstacle(obstacle: str, module: Any, input: Tensor, region: regions.Region) -> None:
    """Say why a call ran as the stock class, once; an error where FP8 was asked for by name."""
    path = module._fp8_path
    if obstacle == "misaligned":
        k, n = _features(module)
        messages.once(
            f"misaligned {path} {n} {k}",
            f"{path}: out_features={n}, in_features={k} is no longer a multiple of 16 (resized "
            "after conversion?), so it runs in the model's own precision. A recipe with "
            "`misaligned: pad` keeps it in FP8.",
        )
    elif obstacle == "rowwise":
        lacks = "this GPU has no FP8 GEMM with one scale a row (that needs compute capability 9.0)"
        if region.strict:
            raise HardwareError(
                f"{path}: backend='fp8' was asked for with a rowwise recipe, but {lacks}. Convert "
                "with the recipe 'delayed' or 'current', or use backend='emulate'."
            )
        if module._fp8_bank.recipe.scaling == "rowwise":
            messages.once("no rowwise", f"FP8 is off: {lacks}; 'delayed' and 'current' run here.")
        else:
            messages.once(
                f"no rowwise {path}",
                f"{path} runs in its own precision: the recipe's override asks for rowwise, and "
                f"{lacks}.",
            )
    elif obstacle == "device":
        if region.strict:
            raise HardwareError(
                f"{path}: backend='fp8' was asked for, but the module is on {input.device}. Move "
                "the model to a CUDA device, or use backend='emulate'."
            )
        messages.once(
            "fp8 off device", f"{path} is on {input.device}: it runs in its own precision."
        )
