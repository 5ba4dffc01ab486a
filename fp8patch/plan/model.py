"""Decide what of a model would run in FP8, and say why: pure, and total.

Pure: the model is read and never run or changed; norms are probed in copies. Total: every candidate
gets exactly one decision, with a reason. `convert` applies a plan and decides nothing.

Shares of FLOPs are a static estimate: 2 * M * N * K for each Linear, Conv1D and attention
projection, each taken to be called once per forward, and for as many experts as one token visits.
The products inside attention are not in it, nor are layers that a model calls twice.
"""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from fp8patch.errors import PlanError
from fp8patch.plan.overrides import LayerRecipes
from fp8patch.plan.patterns import Selection, check_patterns
from fp8patch.plan.rules import Verdict, decide, gather_facts, padded
from fp8patch.plan.types import CODES, NORM_KINDS, Decision, Group, Plan
from fp8patch.plan.walk import Candidate, Place, find_candidates, stock_class, walk
from fp8patch.recipe import Recipe
from fp8patch.roofline import Gpu, predict_gain, resolve_gpu

__all__ = ["CODES", "Decision", "Group", "Plan", "plan_model", "stock_class"]

# Names under which configurations say how many experts one token visits.
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "num_selected_experts",
    "top_k",
)


def plan_model(
    model: nn.Module,
    recipe: Recipe | str | Path | None = None,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    include: Iterable[str] = (),
    tokens: int = 4096,
    gpu: str | None = "auto",
    min_gain: float | None = None,
    meta: bool = False,
) -> Plan:
    """Plan `model`, which stays as it is.

    Args:
        model: Any module; one that is converted already is planned as the stock model.
        recipe: A Recipe, a built-in's name or a file; its `skip` and `include` join those here.
        only: Patterns; where there are any, nothing else is converted.
        skip: Patterns never to convert; wins over `include`.
        include: Patterns to convert although a head, router, classifier or slow layer would be
            skipped. What cannot run in FP8, for its shape or class, it does not change.
        tokens: M, for the predicted gain.
        gpu: A name of the roofline's table, `auto`, or None to predict nothing.
        min_gain: Skip layers that are predicted to gain less; None is the recipe's, else 0.
        meta: The model is a skeleton on the meta device on purpose: weights that are not loaded are
            no reason to skip.

    Raises:
        PlanError: `model` is no module, a pattern matches nothing, an unknown GPU, tokens below 1,
            or a min_gain that is no number of at least 0.
        RecipeError: No such recipe, or not a valid one.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"plan_model takes a torch.nn.Module, not {type(model).__name__} ({model!r:.60}). Load "
            "the model first; `fp8patch plan` takes a directory, a config.json or a hub name."
        )
    recipe = Recipe.load(recipe)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise PlanError(f"tokens: {tokens!r} is not allowed. Use a whole number of at least 1.")
    figures = None if gpu is None else resolve_gpu(gpu)
    if min_gain is None:
        min_gain = 0.0 if recipe.min_gain is None else recipe.min_gain
    number = isinstance(min_gain, int | float) and not isinstance(min_gain, bool)
    if not number or not 0 <= min_gain < math.inf:
        raise PlanError(
            f"min_gain: {min_gain!r} is not allowed. Use a number of at least 0, or None."
        )
    places = walk(model)
    candidates = find_candidates(places)
    selection = _selection(recipe, only, skip, include)
    candidate_paths = [candidate.paths for candidate in candidates]
    check_patterns(selection, candidate_paths, _others(places, candidate_paths))
    facts = gather_facts(places, candidates)
    shares = _Shares(model, places, candidates, tokens)
    layers = LayerRecipes(recipe, selection, candidates)
    decisions = []
    for candidate in candidates:
        patterns, layer = layers.of(candidate)
        verdict = decide(candidate, facts, selection, recipe, meta=meta)
        verdict = layers.refine(verdict, patterns, layer)
        gain = _gain(candidate, verdict, tokens, figures, layer)
        if gain is not None and gain < min_gain and not selection.includes(candidate.paths):
            verdict = _slower(verdict, gain, tokens, min_gain)
        decisions.append(shares.decision(candidate, verdict, gain, patterns))
    return Plan(
        recipe=recipe,
        decisions=tuple(decisions),
        tokens=tokens,
        gpu=None if figures is None else figures.name,
        model=stock_class(model).__name__,
        params=shares.total,
        min_gain=float(min_gain),
    )


def _selection(
    recipe: Recipe, only: Iterable[str], skip: Iterable[str], include: Iterable[str]
) -> Selection:
    return Selection(
        only=_patterns("only", only),
        skip=(*recipe.skip, *_patterns("skip", skip)),
        include=(*recipe.include, *_patterns("include", include)),
        override=tuple(override.pattern for override in recipe.overrides),
    )


def _others(places: list[Place], chosen: list[tuple[str, ...]]) -> dict[str, str]:
    """{path: class name} of the modules that are no candidates."""
    candidates = {path for paths in chosen for path in paths}
    return {
        path: type(place.module).__name__
        for place in places
        for path in place.paths
        if path not in candidates
    }


def _patterns(option: str, values: Iterable[str]) -> tuple[str, ...]:
    # A lone string is an iterable of its letters, each of them a pattern that matches nothing.
    patterns = (values,) if isinstance(values, str) else tuple(values)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise PlanError(
                f"{option}: {pattern!r} is not a pattern. Use globs over module paths, such as "
                f'"*.mlp.*".'
            )
    return patterns


def _gain(
    candidate: Candidate, verdict: Verdict, tokens: int, gpu: Gpu | None, recipe: Recipe
) -> float | None:
    """Predicted for every Linear and Conv1D that could run in FP8, skipped or not."""
    if gpu is None or candidate.kind not in ("linear", "conv1d") or not candidate.n * candidate.k:
        return None
    n, k = candidate.n, candidate.k
    if verdict.action == "convert":
        n, k = padded(n), padded(k)
    return predict_gain(tokens, n, k, gpu, recipe)


def _slower(verdict: Verdict, gain: float, tokens: int, min_gain: float) -> Verdict:
    if verdict.action == "skip":
        return verdict
    if min_gain == 1.0:
        return Verdict("skip", "slower", f"slower: {gain:.2g}x at M={tokens}")
    return Verdict("skip", "slower", f"too little: {gain:.3g}x at M={tokens}, min_gain {min_gain}")


class _Shares:
    """Parts of the whole: parameters, each counted once, and static GEMM FLOPs."""

    def __init__(
        self, model: nn.Module, places: list[Place], candidates: list[Candidate], tokens: int
    ) -> None:
        self.total = sum(_numel(p) for p in model.parameters())
        self._counted: set[int] = set()
        per_token = _experts_per_token(places)
        self._flops = {
            id(candidate): 2 * tokens * candidate.n * candidate.k * _visits(candidate, per_token)
            for candidate in candidates
        }
        self._all_flops = sum(self._flops.values())

    def decision(
        self,
        candidate: Candidate,
        verdict: Verdict,
        gain: float | None,
        overrides: tuple[str, ...],
    ) -> Decision:
        fresh = [p for p in candidate.parameters if id(p) not in self._counted]
        self._counted.update(id(p) for p in fresh)
        own = sum(_numel(p) for p in fresh)
        decision = Decision(
            path=candidate.path,
            kind=candidate.kind,
            action=verdict.action,
            code=verdict.code,
            reason=verdict.reason,
            out_features=candidate.n,
            in_features=candidate.k,
            params=sum(_numel(p) for p in candidate.parameters),
            flops_share=self._flops[id(candidate)] / self._all_flops if self._all_flops else 0.0,
            param_share=own / self.total if self.total else 0.0,
            gain=gain,
            class_name=candidate.stock.__name__,
            overrides=overrides,
        )
        if (rows := decision.aligned_to) is None:
            return decision
        aligned = f"{decision.reason}; its BF16 GEMM runs on a copy padded to {rows} rows"
        return dataclasses.replace(decision, reason=aligned)


def _numel(parameter: torch.Tensor) -> int:
    return 0 if isinstance(parameter, nn.parameter.UninitializedParameter) else parameter.numel()


def _visits(candidate: Candidate, experts_per_token: int) -> int:
    """How often one token passes the candidate's N x K product."""
    if candidate.kind in NORM_KINDS:
        return 0
    if candidate.kind == "experts":
        return min(experts_per_token, int(candidate.parameters[0].shape[0]))
    return 1


def _experts_per_token(places: list[Place]) -> int:
    for place in places:
        config = vars(place.module).get("config")
        for name in _EXPERTS_PER_TOKEN:
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 1
