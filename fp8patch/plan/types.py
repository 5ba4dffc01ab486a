"""What a plan is: one decision for each candidate, with the reason and what it is worth.

No torch in here, so that a plan on disk can be read and shown without it.
N is out_features, K in_features, M the tokens of one forward.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from fp8patch.errors import PlanError
from fp8patch.plan.values import real, shown, typed, whole
from fp8patch.recipe import Recipe

__all__ = ["CODES", "GEMM_KINDS", "NORM_KINDS", "Action", "Decision", "Group", "Kind", "Plan"]

Kind = Literal["linear", "norm", "rmsnorm", "conv1d", "mha", "experts"]
Action = Literal["convert", "skip"]

# The kinds that are matrix products, which FLOPs are counted over.
GEMM_KINDS: tuple[Kind, ...] = ("linear", "conv1d", "mha", "experts")
# The kinds that keep their arithmetic: converted for the output that they make.
NORM_KINDS: tuple[Kind, ...] = ("norm", "rmsnorm")
# The kinds that have an FP8 form, and the codes of what is converted.
_CONVERTIBLE: tuple[Kind, ...] = ("linear", "conv1d", *NORM_KINDS)
_CONVERTED = ("ok", "hooked")
# What is left in BF16 for itself, and not because somebody asked for it; and the outputs from which
# on a misaligned one is slow enough to matter (modules/aligned.py).
_ALIGNED = ("head", "tied_head", "classifier", "misaligned")
_LARGE_HEAD = 1024

# Every reason code, with what it means in general; a decision's `reason` says it of one module.
CODES: dict[str, str] = {
    "ok": "runs in FP8",
    "hooked": "runs in FP8, through accelerate's hook",
    "pattern": "skipped by a pattern of the user or the recipe",
    "not_selected": "outside --only",
    "quantized": "already quantised, or a layer of another FP8 library",
    "dtype": "float64 weights stay as they are; FP8 takes float32, bfloat16 and float16",
    "subclass": "a class that may compute something else than its base",
    "bypassed": "its parent reads the weight and never calls it",
    "unsupported": "no FP8 form of it yet",
    "instance_forward": "its forward was replaced on the instance",
    "parametrized": "weight is computed, not a plain Parameter",
    "meta_weight": "the weights are not loaded",
    "empty": "no rows or no columns, so there is nothing to multiply",
    "lora": "an adapter, small and the only thing that trains",
    "tied_head": "shares its weight with an embedding",
    "head": "output head, whose logits need more digits",
    "router": "chooses experts: rounding would change the choice",
    "keep_in_fp32": "the model asks for FP32 here",
    "classifier": "task head, small and sensitive",
    "misaligned": "a dimension that FP8 GEMMs do not take",
    "slower": "predicted to lose more in casts than the GEMM gains",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one candidate, and why.

    Attributes:
        path: Dotted name in the model; for experts the parameter's name; "" for the root itself.
        code: One of `CODES`.
        reason: A sentence on this candidate, without its path; `str(decision)` puts both together.
        out_features, in_features: N and K. For a norm both are the width, for experts one expert's.
        params: Elements of its own parameters, shared ones included.
        param_share: Part of the model's parameters; what several candidates share counts once.
        flops_share: Part of the model's static GEMM FLOPs; 0 for a norm.
        gain: Predicted BF16 time over FP8 time of its three GEMMs; None where nothing is predicted.
        class_name: The stock class, also for a module that is converted already.
        overrides: Patterns of the recipe's overrides that choose it, in the recipe's order.
    """

    path: str
    kind: Kind
    action: Action
    code: str
    reason: str
    out_features: int
    in_features: int
    params: int
    flops_share: float
    param_share: float
    gain: float | None
    class_name: str
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path or '(root)'}: {self.reason}"

    @property
    def aligned_to(self) -> int | None:
        """Rows of the copy that its BF16 GEMM runs on; None: on the weight itself."""
        left = self.action == "skip" and self.code in _ALIGNED
        if not left or self.class_name != "Linear" or self.out_features < _LARGE_HEAD:
            return None
        return -(-self.out_features // 8) * 8 if self.out_features % 8 else None


@dataclass(frozen=True, slots=True)
class Group:
    """Decisions that differ only in numbers of their path: `layers.*.mlp.up_proj`, 32 of them.

    `first` stands for all of them: kind, action, code, shape, class and overrides are equal.
    """

    path: str
    count: int
    first: Decision
    params: int
    param_share: float
    flops_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All decisions on one model, in the order of its modules, with the recipe they are made for.

    Attributes:
        tokens: M that gains are predicted for.
        gpu: Name of the GPU they are predicted for; None where nothing is predicted.
        model: Class name of the model.
        params: Elements of all its parameters, each counted once.
        min_gain: Layers predicted below it were skipped.
    """

    recipe: Recipe
    decisions: tuple[Decision, ...]
    tokens: int
    gpu: str | None
    model: str = ""
    params: int = 0
    min_gain: float = 0.0
    _index: dict[str, Decision] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._index.update((decision.path, decision) for decision in self.decisions)

    def recipe_of(self, decision: Decision) -> Recipe:
        """The recipe of one layer: the plan's, as the overrides that choose it change it."""
        return self.recipe.for_layer(decision.overrides)

    def converted(self) -> list[Decision]:
        """The decisions that `convert` applies."""
        return [decision for decision in self.decisions if decision.action == "convert"]

    def __getitem__(self, path: str) -> Decision:
        """The decision on the candidate at `path`; KeyError when it is none."""
        return self._index[path]

    def groups(self) -> list[Group]:
        """Repeated blocks collapsed, in the order in which each group first comes up."""
        return _group(self.decisions)

    def summary(self) -> dict[str, Any]:
        """Totals, JSON-safe: counts, reason codes, shares in FP8, and the predicted overall gain.

        `gemm_gain` is over all GEMMs of a step, those that stay in BF16 included, weighted by their
        FLOPs; None where nothing is predicted.
        """
        chosen = self.converted()
        gemms = [d for d in self.decisions if d.kind in GEMM_KINDS]
        gemms_chosen = [d for d in chosen if d.kind in GEMM_KINDS]
        gain = None
        if any(d.gain is not None for d in gemms):
            share = sum(d.flops_share for d in gemms)
            kept = sum(d.flops_share * (1 - 1 / (d.gain or 1.0)) for d in gemms_chosen)
            gain = share / (share - kept) if share > kept else 1.0
        return {
            "candidates": len(self.decisions),
            "gemms": len(gemms),
            "converted": len(chosen),
            "converted_gemms": len(gemms_chosen),
            "codes": dict(Counter(d.code for d in self.decisions)),
            "param_share": sum(d.param_share for d in chosen),
            "flops_share": sum(d.flops_share for d in chosen),
            "gemm_gain": gain,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-safe; `Plan.from_dict` gives an equal plan back."""
        return {
            "model": self.model,
            "params": self.params,
            "tokens": self.tokens,
            "gpu": self.gpu,
            "min_gain": self.min_gain,
            "recipe": self.recipe.to_dict(),
            "decisions": [_decision_to_dict(decision) for decision in self.decisions],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The plan that `to_dict` wrote; keys that are not a plan's are left to their owner.

        Raises:
            PlanError: A key is missing, or holds what `to_dict` never writes.
            RecipeError: The recipe in it is not valid.
        """
        try:
            plan = cls(
                recipe=Recipe.from_dict(values["recipe"]),
                decisions=tuple(map(_decision, typed(values, "decisions", list))),
                tokens=whole(values, "tokens", 1),
                gpu=None if values["gpu"] is None else typed(values, "gpu", str),
                model=typed(values, "model", str),
                params=whole(values, "params"),
                min_gain=real(values, "min_gain"),
            )
        except KeyError as error:
            raise PlanError(
                f"not a plan: {error.args[0]!r} is missing. Plan.to_dict() writes it."
            ) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"not a plan: {error}. Plan.to_dict() writes one.") from None
        if len(plan._index) < len(plan.decisions):
            path, times = Counter(d.path for d in plan.decisions).most_common(1)[0]
            raise PlanError(
                f"not a plan: it has {times} decisions on {path!r}. Plan.to_dict() writes one each."
            )
        known = {override.pattern for override in plan.recipe.overrides}
        for decision in plan.decisions:
            for pattern in set(decision.overrides) - known:
                raise PlanError(
                    f"not a plan: {decision.path!r:.200} has an override {pattern!r:.60}, which "
                    "its recipe does not have. Plan.to_dict() writes both."
                )
            plan.recipe_of(decision)  # A RecipeError where they make no sense together.
        return plan


def _decision_to_dict(decision: Decision) -> dict[str, Any]:
    values = dataclasses.asdict(decision)
    patterns = values.pop("overrides")
    # Most have none, and a plan has thousands of decisions.
    return {**values, "overrides": list(patterns)} if patterns else values


def _decision(values: Any) -> Decision:
    if not isinstance(values, Mapping):
        raise ValueError(f"a decision is {shown(values)}, not an object")
    known = [item.name for item in dataclasses.fields(Decision)]
    strange = [name for name in values if name not in known]
    if strange:
        raise ValueError(f"a decision has no {strange[0]!r:.60}")
    try:
        fields: dict[str, Any] = {
            **{name: typed(values, name, str) for name in _TEXTS},
            **{name: whole(values, name) for name in ("out_features", "in_features", "params")},
            **{name: real(values, name) for name in ("flops_share", "param_share")},
            "gain": None if values["gain"] is None else real(values, "gain"),
            "overrides": _overrides(values),
        }
        decision = Decision(**fields)
        _check_choices(decision)
    except ValueError as error:
        raise ValueError(f"{values.get('path')!r:.200}: {error}") from None
    return decision


def _overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    patterns = values.get("overrides", [])
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise ValueError(f"overrides is {shown(patterns)}, not a list of patterns")
    return tuple(patterns)


_TEXTS = ("path", "kind", "action", "code", "reason", "class_name")


def _check_choices(decision: Decision) -> None:
    """ValueError for what no rule decides."""
    for name, allowed in (("kind", get_args(Kind)), ("action", get_args(Action))):
        if getattr(decision, name) not in allowed:
            raise ValueError(f"{name} {getattr(decision, name)!r:.60} is unknown")
    if decision.code not in CODES:
        raise ValueError(f"reason code {decision.code!r:.60} is unknown")
    converted = decision.action == "convert"
    if converted and decision.kind not in _CONVERTIBLE:
        raise ValueError(f"a module of kind {decision.kind!r} has no FP8 form to convert to")
    if converted != (decision.code in _CONVERTED):
        raise ValueError(f"action {decision.action!r} does not go with code {decision.code!r}")


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _group(decisions: tuple[Decision, ...]) -> list[Group]:
    """Group by path with its numbers taken out, and by everything that a row shows."""
    members: dict[tuple[Any, ...], list[Decision]] = {}
    # All the numbers seen at each place of a generic path: a group that has all of them shows "*".
    seen: dict[str, list[set[int]]] = {}
    for d in decisions:
        generic, numbers = _generic(d.path)
        places = seen.setdefault(generic, [set() for _ in numbers])
        for place, number in zip(places, numbers, strict=True):
            place.add(number)
        size = d.out_features, d.in_features
        key = (generic, d.kind, d.action, d.code, *size, d.class_name, d.overrides)
        members.setdefault(key, []).append(d)
    return [
        Group(
            path=_shown_path(key[0], group, seen[key[0]]),
            count=len(group),
            first=group[0],
            params=sum(d.params for d in group),
            param_share=sum(d.param_share for d in group),
            flops_share=sum(d.flops_share for d in group),
        )
        for key, group in members.items()
    ]


def _generic(path: str) -> tuple[str, list[int]]:
    return _NUMBER.sub("*", path), [int(number) for number in _NUMBER.findall(path)]


def _shown_path(generic: str, group: list[Decision], seen: list[set[int]]) -> str:
    """`generic` with each star filled in: the number, `*` for all numbers seen, or their ranges."""
    columns = zip(*(_generic(d.path)[1] for d in group), strict=True)
    shown = []
    for numbers, everything in zip(map(set, columns), seen, strict=True):
        if len(numbers) == 1:
            shown.append(str(min(numbers)))
        elif numbers == everything:
            shown.append("*")
        else:
            shown.append("{" + _ranges(sorted(numbers)) + "}")
    pieces = generic.split("*")
    return pieces[0] + "".join(a + b for a, b in zip(shown, pieces[1:], strict=True))


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
