"""The plan of one model of a script, made from the run's options and the first batch."""

from typing import TYPE_CHECKING, Any

from torch import nn

from fp8patch import messages
from fp8patch.errors import PlanError
from fp8patch.inject.conflicts import check_plan
from fp8patch.inject.outputs import tokens_of
from fp8patch.plan.types import NORM_KINDS

if TYPE_CHECKING:
    from fp8patch.plan.model import Plan
    from fp8patch.train_options import TrainOptions

__all__ = ["make_plan"]

_DEFAULT_TOKENS = 4096


def make_plan(
    model: nn.Module,
    options: "TrainOptions",
    execution: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    others: bool,
) -> "Plan | None":
    """What of `model` to convert; None, and a line that says why, for nothing.

    Args:
        args, kwargs: The call, for M where the options name none.
        others: Other models of the script are converted already.

    Raises:
        ConversionError: A part of the model is quantised already.
        PlanError: A pattern matches nothing, in a script's only model.
        RecipeError: The recipe can't be loaded.
    """
    from fp8patch.plan.model import plan_model
    from fp8patch.recipe import Recipe

    recipe = Recipe.load(options.recipe)
    # Emulation is no faster for anything.
    floor = 1.0 if execution == "fp8" else 0.0
    tokens = options.tokens or tokens_of(model, args, kwargs) or _DEFAULT_TOKENS
    try:
        plan = plan_model(
            model,
            recipe,
            only=options.only,
            skip=options.skip,
            include=options.include,
            tokens=tokens,
            min_gain=floor if recipe.min_gain is None else recipe.min_gain,
        )
    except PlanError as error:
        # A pattern for one model of several matches nothing in the others.
        if not others:
            raise
        messages.note(f"{type(model).__name__} is left alone: {error}")
        return None
    if any(d.kind not in NORM_KINDS for d in plan.converted()):
        check_plan(plan)
        return plan
    found = plan.summary()["codes"]
    codes = ", ".join(f"{count} {code}" for code, count in found.items())
    hint = "`--include PATTERN` overrides most of these."
    if set(found) == {"pattern"}:
        hint = "`skip` or `overrides` of the recipe, or --skip, choose all of them."
    messages.warn(
        f"{plan.model} is left alone, nothing in it is to run in FP8 at M={tokens}: {codes}. {hint}"
    )
    return None
