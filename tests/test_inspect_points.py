"""What the points of a run say: ratios, drift, advice, sparklines."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from reported import POINTS, at, points, report, slot

from fp8patch.cli.inspect_view import sparkline
from fp8patch.inspect.advice import advise, overrides, recipe_line, recipe_lines
from fp8patch.inspect.run import slots_of
from fp8patch.inspect.slots import layers_of
from fp8patch.recipe_yaml import read_yaml


def test_ratios_are_of_the_run_and_of_its_end() -> None:
    early = points(saturated=at(0, 1, value=500), flushed=at(16, 19, value=40))
    clipped, flushed = early.ratios["saturated"], early.ratios["flushed"]
    # The first tenth is what scales take to settle; it is the worst point all the same.
    assert (clipped.whole, clipped.recent, clipped.worst, clipped.step) == (0, 0, 0.5, 5)
    assert flushed.whole == 80 / 18_000
    assert flushed.recent == 80 / 5_000
    assert flushed.value == flushed.recent
    assert (flushed.worst, flushed.step) == (0.04, 85)
    assert early.severity == pytest.approx(flushed.recent / 0.02)


def test_how_far_a_scale_was_off() -> None:
    assert points().fill == 0
    late = points(amax=[2.0] * 10 + [2.0**-11] * 10)
    assert late.fill == -12
    assert points(amax=[2.0] * 10 + [16.0] + [2.0] * 9).fill == 3
    # Of a scale that was made from the tensor itself there is nothing to be off.
    assert points(scaling="current", amax=[2.0] * 10 + [9.0] * 10).fill is None
    assert points(scale=[0.0] * POINTS).fill is None
    # It ranks, and is no trouble by itself.
    assert 0.5 < late.severity < 1
    assert not advise(layers_of([late]))


def test_what_is_not_finite_counts_while_it_lasts() -> None:
    over, lasting = (points(non_finite=at(p, value=1), amax=[None] * POINTS) for p in (8, 19))
    assert over.severity == 0.5
    assert lasting.severity > 1
    (said,) = advise(layers_of([lasting]))
    assert said.remedy == "none"
    assert "0.02% of the inputs not finite" in said.why


def test_a_moving_scale_is_told_from_a_wide_tensor() -> None:
    def remedy(**changes: Any) -> str:
        return advise(layers_of([points(**changes)]))[0].remedy

    half = [500] * POINTS
    assert remedy(saturated=half) == "rowwise"
    assert remedy(flushed=half, amax=[2.0**-15] * POINTS) == "rowwise"
    assert remedy(flushed=half) == "bf16"
    assert remedy(flushed=half, scaling="current") == "bf16"
    assert remedy(flushed=half, scaling="rowwise", amax=[2.0**-15] * POINTS) == "bf16"


def test_recipe_lines_name_all_alike_by_one_pattern() -> None:
    half = [500] * POINTS
    layers = [
        *(slot(f"layers.{i}.down", saturated=half) for i in range(12)),
        *(slot(f"layers.{i}.up", flushed=half if i == 3 else at(value=0)) for i in range(12)),
        slot("head", "grad_output", flushed=half),
        slot("head", "input", saturated=half),
    ]
    slots = slots_of(report(*layers)["models"][0])
    advice = advise(layers_of(slots))
    chosen = overrides(advice, [s.path for s in slots])
    bf16 = dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16")
    wanted = {"layers.*.down": {"scaling": "rowwise"}, "layers.3.up": bf16, "head": bf16}
    for text in ("\n".join(recipe_lines(chosen)), recipe_line(chosen)):
        path = Path("recipe.yaml")
        assert yaml(text, path) == {"overrides": wanted}
    assert recipe_lines({}) == []


def test_recipe_lines_choose_names_that_hold_signs_of_patterns() -> None:
    half = [500] * POINTS
    names = ["b.a[0]", "b.st*r", "b.1[x]", "b.2[x]"]
    slots = slots_of(report(*(slot(n, saturated=half) for n in names), slot("b.a0"))["models"][0])
    chosen = overrides(advise(layers_of(slots)), [s.path for s in slots])
    for name in names:
        assert any(fnmatchcase(name, pattern) for pattern in chosen)
    assert not any(fnmatchcase(other, p) for p in chosen for other in ("b.a0", "b.star", "b.1x"))


def test_recipe_lines_name_layers_as_their_model_does() -> None:
    """A run with two models of one class: a recipe is for both."""
    half = [500] * POINTS
    slots = [
        *slots_of(report(slot("up", saturated=half), slot("down"))["models"][0], "Net:"),
        *slots_of(report(slot("up", flushed=half), slot("down"))["models"][0], "Net#2:"),
    ]
    advice = advise(layers_of(slots))
    assert {path for item in advice for path in item.paths} == {"Net:up", "Net#2:up"}
    chosen = overrides(advice, [s.path for s in slots])
    assert list(chosen) == ["up"]
    assert set(chosen["up"]) == {"fprop: bf16", "dgrad: bf16", "wgrad: bf16"}


def yaml(text: str, path: Path) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path
        file.write_text(text)
        return read_yaml(file)


def test_what_shares_an_input_is_advised_with_it() -> None:
    values = report(slot("q", saturated=[500] * POINTS), slot("k", "weight"), slot("v", "weight"))
    values["models"][0]["history"]["shared"] = {"k": "q", "v": "q"}
    slots = slots_of(values["models"][0])
    advice = advise(layers_of(slots))
    assert set(overrides(advice, [s.path for s in slots])) == {"q", "k", "v"}


def test_sparklines() -> None:
    assert sparkline([1.0, 2.0, 4.0, 128.0]) == "▁▂▃█"
    assert sparkline([1.0, 1.01, 1.0]) == "▁▁▁"
    assert sparkline([1.0, None, 256.0]) == "▁!█"
    assert sparkline([None] * 3) == "!!!"
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([]) == ""
    # A peak is not averaged away.
    assert sparkline([1.0] * 500 + [99.0] + [1.0] * 499, width=10).count("█") == 1
    assert sparkline([1.0, 256.0], plain=True) == "_#"
