"""The recipe that the advice on a run asks for: the run's own, with overrides that help. No torch.

Overrides of the run's recipe stay, and new ones come after them, so that they win on a layer that
both name. What a layer was given otherwise is kept, but for a history that its new scaling lacks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8patch.errors import CheckpointError, RecipeError
from fp8patch.inspect.advice import (
    Advice,
    Remedy,
    advise,
    exact,
    fields_of,
    patterns,
    remedies,
    what_is_wrong,
)
from fp8patch.inspect.run import slots_of
from fp8patch.inspect.slots import Layer, layers_of
from fp8patch.inspect.source import Source
from fp8patch.messages import printable
from fp8patch.plan.patterns import matches
from fp8patch.recipe import Recipe, builtin_names
from fp8patch.recipe_facts import differences, override_line, yaml_value
from fp8patch.recipe_fields import DELAYED_DEFAULTS
from fp8patch.recipe_yaml import MOST_BYTES

__all__ = ["Tuned", "recipe_file", "tune"]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a run's report advises, as a recipe.

    Attributes:
        source: The file's name, and the name of the recipe that it ran with.
        recipe: The run's own where `reasons` is empty.
        reasons: {pattern of a new override: why}.
        helpless: "layer: why", where no recipe helps.
    """

    source: tuple[str, str]
    recipe: Recipe
    reasons: Mapping[str, str]
    helpless: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Model:
    """A model that ran in FP8: its layers there, worst first, and those that it left in BF16."""

    name: str
    layers: list[Layer]
    skipped: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        return [layer.path for layer in self.layers]


def tune(source: Source) -> Tuned:
    """The recipe for a run like that of `source`.

    Raises:
        CheckpointError: No report, of a run without FP8 or of one that has no numbers yet; it
            names layers that it has no numbers of, or holds no recipe; or its models need
            overrides that not all of them have a layer for, with which `train` does not run.
    """
    base = _recipe_of(source)
    models = _models(source)
    known = list(dict.fromkeys(path for model in models for path in model.paths))
    found = {model.name: advise(model.layers) for model in models}
    advice = [item for items in found.values() for item in items]
    wanted = remedies(advice)
    for path in wanted:
        if path not in known:
            raise CheckpointError(
                f"{source.path}: damaged: it holds no numbers of the layer {path!r:.80}, which it "
                "says reads the same tensor as another. Give the report of another run."
            )
    skipped = [path for model in models for path in model.skipped]
    changes = _Changes(base, [*known, *skipped])
    for pattern, remedy in patterns(wanted, known).items():
        if pattern in wanted:
            continue  # as every layer below that no pattern stands for
        covered = [path for path in known if matches(pattern, [path])]
        if all(wanted.get(path) == remedy for path in covered):
            changes.add(pattern, covered, remedy)
    for path, remedy in wanted.items():
        changes.add(exact(path), [path], remedy)
    for pattern in changes.new:
        _check_all_match(source, pattern, models)
    why = _reasons(models, found, several=len(models) > 1)
    return Tuned(
        source=(source.path.name, source.recipe),
        recipe=base.replace(overrides=changes.merged()),
        reasons={
            pattern: _worst([why[path] for path in covered])
            for pattern, covered in changes.covered.items()
        },
        helpless=tuple(
            f"{item.path or '(the model itself)'}: {item.why}"
            for item in advice
            if item.remedy == "none"
        ),
    )


class _Changes:
    """New overrides, next to those of a recipe."""

    def __init__(self, base: Recipe, layers: Sequence[str]) -> None:
        self._base, self._layers = base, layers
        self._old = {each.pattern: dict(each.changes) for each in base.overrides}
        self._done: set[str] = set()
        self.new: dict[str, dict[str, Any]] = {}
        self.covered: dict[str, list[str]] = {}

    def add(self, pattern: str, covered: list[str], remedy: Remedy) -> None:
        """`remedy` for the layers `covered`, unless they have theirs, or lose by `pattern`."""
        fields = self._fields(pattern, covered, fields_of(remedy))
        if fields is None or not self._done.isdisjoint(covered):
            return
        self._done.update(covered)
        self.new[pattern], self.covered[pattern] = fields, covered

    def merged(self) -> dict[str, dict[str, Any]]:
        kept = {pattern: values for pattern, values in self._old.items() if pattern not in self.new}
        return {**kept, **self.new}

    def _fields(
        self, pattern: str, covered: Iterable[str], remedy: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """Of the override; None where layers that an old one of its name chooses differ by now."""
        kept: dict[str, Any] = {}
        if pattern in self._old:
            # It moves behind the others, and must not undo what those say of its layers.
            chosen = [path for path in self._layers if matches(pattern, [path])]
            layers = [self._base.for_layer(self._patterns_of(path)) for path in chosen]
            for field in self._old[pattern]:
                first, *more = [getattr(layer, field) for layer in layers]
                if any(value != first for value in more):
                    return None
                kept[field] = first
        fields = {**kept, **remedy}
        if "scaling" in remedy:
            others = {name for path in covered for name in self._patterns_of(path)} - {pattern}
            set_there = {field for name in others for field in self._old[name]}
            for field, default in DELAYED_DEFAULTS.items():
                fields.pop(field, None)
                if field in set_there:
                    fields[field] = default
        return fields

    def _patterns_of(self, path: str) -> list[str]:
        return [pattern for pattern in self._old if matches(pattern, [path])]


def _recipe_of(source: Source) -> Recipe:
    if source.kind != "run":
        raise CheckpointError(
            f"{source.path}: is a patched folder, which holds no run to tune. Give the file of "
            f"`fp8patch train --report`; `fp8patch inspect {source.path}` shows a folder."
        )
    if all(model.get("history") is None for model in source.values["models"]):
        raise CheckpointError(
            f"{source.path}: nothing ran in FP8 (backend: {source.values['backend']}), so there is "
            "nothing to tune. Give the report of a run in FP8."
        )
    if not source.slots:
        raise CheckpointError(
            f"{source.path}: holds no numbers yet: the run is, or ended, before its first step of "
            "the optimizer. Wait, or give the report of a longer run."
        )
    values = source.values.get("settings", {}).get("recipe")
    name = source.values["recipe"]
    if not values and name not in builtin_names():
        raise CheckpointError(
            f"{source.path}: does not hold the recipe that it ran with, {name!r:.80}. Run again."
        )
    try:
        return Recipe.from_dict(values) if values else Recipe.load(name)
    except (RecipeError, TypeError) as error:
        raise CheckpointError(f"{source.path}: the run's recipe: {error}") from None


def _models(source: Source) -> list[_Model]:
    found = []
    for name, model in zip(source.models, source.values["models"], strict=True):
        layers = layers_of(slots_of(model))
        if layers:
            skipped = tuple(path for paths in model.get("skipped", {}).values() for path in paths)
            found.append(_Model(name, layers, skipped))
    return found


def _check_all_match(source: Source, pattern: str, models: list[_Model]) -> None:
    for model in models:
        if not any(matches(pattern, [path]) for path in (*model.paths, *model.skipped)):
            raise CheckpointError(
                f'{source.path}: "{pattern}" needs an override, and {model.name} has no such '
                "layer: a run has one recipe for all its models, each of which has to have every "
                f"layer that it names. `fp8patch inspect {source.path}` shows what is wrong; "
                "--recipe rowwise is for all layers."
            )


def _reasons(
    models: list[_Model], found: Mapping[str, list[Advice]], *, several: bool
) -> dict[str, tuple[float, str]]:
    """{path: (severity, what is wrong there, and when it was worst)}"""
    reasons: dict[str, tuple[float, str]] = {}
    for model in models:
        layers = {layer.path: layer for layer in model.layers}
        for item in found[model.name]:
            layer = layers[item.path]
            bad = [what_is_wrong(s, times=1) for s in layer.slots if s.severity >= 1]
            name = f"{model.name}: {item.path}" if several else item.path
            text = f"{name or '(the model itself)'}: {'; '.join(bad)}"
            for path in item.paths:
                said = text if path == item.path else f"{path} reads the input of {text}"
                if item.remedy != "none" and layer.severity > reasons.get(path, (0.0,))[0]:
                    reasons[path] = (layer.severity, said)
    return reasons


def _worst(reasons: list[tuple[float, str]]) -> str:
    _, text = max(reasons, key=lambda each: each[0])
    return text if len(reasons) == 1 else f"{text} (the worst of {len(reasons)} layers)"


def recipe_file(tuned: Tuned, name: str) -> str:
    """`tuned` as YAML, for a file whose name without its suffix is `name`.

    Raises:
        RecipeError: It needs more overrides than a recipe file holds.
    """
    text = _text(tuned, name, comments=True)
    if len(text.encode("utf-8", "replace")) > MOST_BYTES:
        text = _text(tuned, name, comments=False)
    if len(text.encode("utf-8", "replace")) > MOST_BYTES:
        raise RecipeError(
            f"{len(tuned.recipe.overrides)} overrides are more than a recipe file holds: too much "
            "of the model loses to FP8. Try a recipe for all of it, such as rowwise."
        )
    return text


def _text(tuned: Tuned, name: str, *, comments: bool) -> str:
    run, ran = map(printable, tuned.source)
    recipe = tuned.recipe.replace(overrides={})
    # A file can't build on the recipe that it is named after.
    bases = [base for base in builtin_names() if base != name]
    base = min(bases, key=lambda each: len(differences(recipe, Recipe.load(each))))
    changed = differences(recipe, Recipe.load(base))
    lines = [f"# Recipe {ran}, with what `fp8patch tune` read in {run}.", f"base: {base}"]
    lines += [f"{field}: {yaml_value(mine)}" for field, (mine, _) in changed.items()]
    lines.append("overrides:")
    for each in tuned.recipe.overrides:
        if comments and each.pattern in tuned.reasons:
            lines.append(f"  # {printable(tuned.reasons[each.pattern])}")
        lines.append(override_line(each))
    return "\n".join(lines) + "\n"
