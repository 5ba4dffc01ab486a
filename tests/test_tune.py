"""`fp8patch tune`: what the advised recipe is, next to what a run had; what can't be tuned.

That it mends a run is in test_advice.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from directories import run
from reported import POINTS, report, slot, written

from fp8patch.errors import CheckpointError, RecipeError
from fp8patch.inspect.source import Source
from fp8patch.inspect.tune import Tuned, recipe_file, tune
from fp8patch.plan.patterns import matches
from fp8patch.recipe import Recipe

BF16 = {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
# More than a scale that is late: what BF16 helps, and a scale of its own.
WIDE: dict[str, Any] = {"flushed": [600] * POINTS}
LATE: dict[str, Any] = {"saturated": [30] * POINTS, "scale": [4480.0] * POINTS}


def settings(**recipe: Any) -> dict[str, Any]:
    name = recipe.pop("name", "mine")
    return {
        "recipe": f"/runs/{name}.yaml",
        "settings": {"recipe": Recipe.from_dict({"name": name, **recipe}).to_dict()},
    }


def tuned(folder: Path, *slots: dict[str, Any], **changes: Any) -> Recipe:
    """The recipe that `tune` writes for a run with these slots."""
    path, out = written(folder / "run.json", *slots, **changes), folder / "recipe.yaml"
    done = run("tune", path, "-o", out)
    assert done.exit_code == 0, done.output
    assert sorted(each.name for each in folder.iterdir()) == ["recipe.yaml", "run.json"]
    assert run("recipes", "check", out).exit_code == 0
    recipe = Recipe.load(out)
    said = json.loads(run("tune", path, "--json", "-o", out).stdout)
    assert said["text"] == out.read_text("utf-8")
    assert Recipe.from_dict(said["recipe"]).replace(name="recipe") == recipe
    return recipe


def layer(recipe: Recipe, path: str) -> Recipe:
    return recipe.for_layer([o.pattern for o in recipe.overrides if matches(o.pattern, [path])])


def test_a_built_in_is_the_base(tmp_path: Path) -> None:
    for name in ("delayed", "rowwise_bf16_wgrad"):
        folder = tmp_path / name
        folder.mkdir()
        slots = [slot("h.0.up"), slot("h.1.up", **WIDE)]
        recipe = tuned(folder, *slots, recipe=name)
        text = (folder / "recipe.yaml").read_text()
        assert f"\nbase: {name}\noverrides:\n" in text
        assert "  # h.1.up: 60% of the inputs flushed to zero (at worst 60%, step 5)\n" in text
        assert recipe.replace(overrides={}) == Recipe.load(name).replace(name="recipe")
        assert not layer(recipe, "h.1.up").in_fp8
        assert layer(recipe, "h.0.up").in_fp8


def test_every_field_of_a_file_is_there_again(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "fp8_format": "e4m3", "amax_history_len": 16, "amax_compute_algo": "most_recent",
        "margin": 2, "wgrad": "bf16", "skip": ["*.gate", "a: b"], "include": ["lm_head"],
        "misaligned": "pad", "min_gain": 1.5, "norm_output": "bf16",
    }  # fmt: skip
    recipe = tuned(tmp_path, slot("a", **LATE), **settings(**fields))
    want = Recipe.from_dict({**fields, "overrides": {"a": {"scaling": "rowwise"}}})
    assert recipe == want.replace(name="recipe")


OLD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the same pattern": {"h.*.up": {"margin": 1}},
    "a wider one": {"h.*": {"amax_history_len": 1, "fp8_format": "e4m3"}},
    "one layer": {"h.1.up": {"margin": 3, "wgrad": "bf16"}},
    "a remedy before": {"h.1.up": {"scaling": "current"}, "h.2": {"margin": 1}},
    "one that a later one undoes": {
        "h.1.up": {"fp8_format": "e4m3"},
        "h": {"fp8_format": "hybrid"},
    },
    "layers that differ": {"h.*.up": {"margin": 1}, "h.0": {"margin": 2}},
    "in the wrong order": {"h.*.up": {"scaling": "rowwise"}, "h.1": {"scaling": "delayed"}},
}
WRONG = {"one": [1], "all": [0, 1, 2]}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("old", OLD)
def test_each_layer_has_what_it_had_and_the_remedy(old: str, wrong: str, tmp_path: Path) -> None:
    """Worked out layer by layer, where `tune` thinks in patterns."""
    before = settings(overrides=OLD[old])
    ran = Recipe.from_dict(before["settings"]["recipe"])
    for kind, trouble in (("bf16", WIDE), ("rowwise", LATE)):
        folder = tmp_path / kind
        folder.mkdir()
        at = [f"h.{i}.up" for i in WRONG[wrong]]
        names = [f"h.{i}.{part}" for i in range(3) for part in ("up", "down")]
        slots = [slot(name, **(trouble if name in at else {})) for name in names]
        recipe = tuned(folder, *slots, **before)
        for name in names:
            want: dict[str, Any] = layer(ran, name).to_dict()
            if name in at:
                gone = {"amax_history_len": 1024, "amax_compute_algo": "max", "margin": 0}
                want |= BF16 if kind == "bf16" else {"scaling": "rowwise", **gone}
            got = layer(recipe, name).to_dict()
            assert {**got, "name": ""} == {**want, "name": ""}, name


def test_layers_that_read_one_tensor_are_kept_together(tmp_path: Path) -> None:
    values = report(slot("q", **WIDE), slot("k", "weight"))
    values["models"][0]["history"]["shared"] = {"k": "q"}
    recipe = tuned(tmp_path, models=values["models"])
    assert {o.pattern: dict(o.changes) for o in recipe.overrides} == {"q": BF16, "k": BF16}
    assert "# k reads the input of q: 60%" in (tmp_path / "recipe.yaml").read_text()


def models(*names: str) -> list[dict[str, Any]]:
    """Two models, the first of which is in trouble in `h.0`; `names` are the second's layers."""
    first = report(slot("h.0", **WIDE), slot("h.1"))["models"][0]
    return [first, report(*map(slot, names))["models"][0]]


def test_models_that_share_the_layer_share_the_recipe(tmp_path: Path) -> None:
    recipe = tuned(tmp_path, models=models("h.0", "h.1"))
    assert [o.pattern for o in recipe.overrides] == ["h.0"]
    assert "# Net: h.0: 60%" in (tmp_path / "recipe.yaml").read_text()


def test_names_that_are_patterns_or_none(tmp_path: Path) -> None:
    for at, (name, pattern) in enumerate({"a[0]\n": "a[[]0]\n", "": "*"}.items()):
        folder = tmp_path / str(at)
        folder.mkdir()
        recipe = tuned(folder, slot(name, **WIDE), slot(name, "weight"))
        assert [o.pattern for o in recipe.overrides] == [pattern]
        assert not layer(recipe, name).in_fp8


@pytest.mark.parametrize("name", ["delayed", "rowwise"])
def test_a_file_named_as_its_base(name: str, tmp_path: Path) -> None:
    path, out = written(tmp_path / "run.json", slot(**WIDE), recipe=name), tmp_path / f"{name}.yaml"
    assert run("tune", path, "-o", out).exit_code == 0
    assert Recipe.load(out).replace(overrides={}) == Recipe.load(name)


def test_where_there_is_nothing_to_do_nothing_is_written(tmp_path: Path) -> None:
    for slots, said in (
        ([slot()], "run.json: nothing to change: no layer loses more"),
        ([slot(non_finite=[9] * POINTS)], "no recipe helps that.\n"),
    ):
        path, out = written(tmp_path / "run.json", *slots), tmp_path / "recipe.yaml"
        done = run("tune", path, "-o", out)
        assert (done.exit_code, done.stderr) == (0, "")
        assert said in done.stdout
        assert "nothing to change" in done.stdout
        assert not out.exists()
        assert json.loads(run("tune", path, "--json").stdout)["changed"] is False


def test_what_is_there_stays_without_force(tmp_path: Path) -> None:
    path, out = written(tmp_path / "run.json", slot(**WIDE)), tmp_path / "recipe.yaml"
    out.write_text("mine")
    before = path.read_bytes()
    for to, words, said in (
        (out, [], "exists already. Name another, or replace it with --force."),
        (path, ["--force"], "is the report itself"),
        (tmp_path, ["--force"], "is a folder"),
        (tmp_path / "none" / "a.yaml", [], "cannot be written: No such file"),
    ):
        done = run("tune", path, "-o", to, *words)
        assert (done.exit_code, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert str(to) in line
        assert said in line
    assert (out.read_text(), path.read_bytes()) == ("mine", before)
    assert run("tune", path, "-o", out, "--force").exit_code == 0
    assert not Recipe.load(out).for_layer(["a"]).in_fp8
    assert sorted(each.name for each in tmp_path.iterdir()) == ["recipe.yaml", "run.json"]


def test_a_large_model_fits_a_recipe_file(tmp_path: Path) -> None:
    """Comments go before overrides do; and what no file holds is said to be too much."""

    def text(count: int) -> str:
        names = [f"model.layers.{i}.mlp.up_proj" for i in range(count)]
        recipe = Recipe.from_dict({"overrides": dict.fromkeys(names, BF16)})
        reasons = dict.fromkeys(names, "60% of the inputs flushed to zero (at worst 80%, step 5)")
        return recipe_file(Tuned(("run.json", "delayed"), recipe, reasons, ()), "recipe")

    assert text(300).count("#") == 301
    (tmp_path / "recipe.yaml").write_text(text(600))
    assert text(600).count("#") == 1
    assert len(Recipe.load(tmp_path / "recipe.yaml").overrides) == 600
    with pytest.raises(RecipeError, match="1500 overrides are more than a recipe file holds"):
        text(1500)


def bad() -> dict[str, dict[str, Any]]:
    """{what is said: the report}"""
    follows = report(slot("q", **WIDE))
    follows["models"][0]["history"]["shared"] = {"k": "q"}
    bf16 = report(backend="bf16")
    bf16["models"][0].update(plan=None, history=None)
    unknown = settings()
    unknown["settings"]["recipe"]["scalin"] = 1
    return {
        "nothing ran in FP8 (backend: bf16)": bf16,
        "holds no numbers yet": report(),
        "numbers of the layer 'k'": follows,
        "the run's recipe: unknown recipe field 'scalin'": report(slot(), **unknown),
        "does not hold the recipe that it ran with, '/x.yaml'": report(slot(), recipe="/x.yaml"),
        '"h.0" needs an override, and Net#2 has no such layer': report(models=models("g")),
    }


@pytest.mark.parametrize("said", bad())
def test_what_cannot_be_tuned_is_one_line(said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(bad()[said]))
    one_line(path, said)


def one_line(path: Path, said: str) -> None:
    for words in (["-o", path.parent / "recipe.yaml"], ["--json"]):
        done = run("tune", path, *words)
        assert (done.exit_code, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert str(path) in line
        assert said in line
    assert not (path.parent / "recipe.yaml").exists()


def test_no_report_is_one_line(tmp_path: Path) -> None:
    good = written(tmp_path / "run.json", slot(**WIDE)).read_text()
    (tmp_path / "cut.json").write_text(good[: len(good) // 2])
    one_line(tmp_path / "cut.json", "no whole JSON file")
    one_line(tmp_path / "none.json", "no such file")
    (tmp_path / "fp8patch.json").write_text('{"bank": {}, "plan": {}}')
    one_line(tmp_path / "fp8patch.json", "it is a checkpoint's sidecar")
    (tmp_path / "empty").mkdir()
    one_line(tmp_path / "empty", "holds no fp8patch.json")
    patched = Source(path=tmp_path, kind="checkpoint", models=("Net",), recipe="delayed", slots=())
    with pytest.raises(CheckpointError, match="is a patched folder, which holds no run to tune"):
        tune(patched)
