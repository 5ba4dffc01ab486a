"""What a recipe's overrides make of each candidate."""

from collections.abc import Iterable

from fp8patch.errors import PlanError, RecipeError
from fp8patch.plan.patterns import Selection, matches
from fp8patch.plan.rules import Verdict
from fp8patch.plan.walk import Candidate
from fp8patch.recipe import Recipe
from fp8patch.recipe_overrides import PRECISIONS, Override

__all__ = ["LayerRecipes"]

# What an override can change: how a GEMM is computed.
_GEMMS = ("linear", "conv1d")


class LayerRecipes:
    """The recipe of each layer of a model."""

    def __init__(
        self, recipe: Recipe, selection: Selection, candidates: Iterable[Candidate]
    ) -> None:
        """Raises PlanError for an override that chooses no Linear and no Conv1D.

        That a pattern matches something at all, `check_patterns` has made sure of.
        """
        self._recipe, self._selection = recipe, selection
        known = list(candidates)
        for pattern in selection.override:
            chosen = [c for c in known if matches(pattern, c.paths)]
            if not any(c.kind in _GEMMS for c in chosen):
                raise PlanError(
                    f'override pattern "{pattern}" chooses no Linear and no Conv1D: '
                    f"{chosen[0].path or '(root)'} is a {chosen[0].stock.__name__}. An override "
                    "changes how a GEMM is computed; `norm_output` is for all norms."
                )

    def of(self, candidate: Candidate) -> tuple[tuple[str, ...], Recipe]:
        """The patterns that choose `candidate`, and the recipe that they give it.

        Raises:
            RecipeError: Two overrides that make no sense together.
        """
        if candidate.kind not in _GEMMS:
            return (), self._recipe
        patterns = self._selection.overridden_by(candidate.paths)
        try:
            return patterns, self._recipe.for_layer(patterns)
        except RecipeError as error:
            raise RecipeError(f"{candidate.path}: {error}") from None

    def refine(self, verdict: Verdict, patterns: tuple[str, ...], layer: Recipe) -> Verdict:
        """`verdict`, as the overrides change it or with what they say."""
        if verdict.action == "skip" or not self._selection.override:
            return verdict
        mine = [each for each in self._recipe.overrides if each.pattern in patterns]
        if not layer.in_fp8:
            mine = [each for each in mine if set(dict(each.changes)) & set(PRECISIONS)]
            whose = f"the override {_quoted(mine)}" if mine else "the recipe"
            return Verdict("skip", "pattern", f"kept in BF16 by {whose}")
        if not mine:
            return verdict
        changes = ", ".join(map(str, mine))
        reason = f"{verdict.reason}, with {changes} (override {_quoted(mine)})"
        return Verdict(verdict.action, verdict.code, reason)


def _quoted(overrides: Iterable[Override]) -> str:
    return " and ".join(f'"{override.pattern}"' for override in overrides)
