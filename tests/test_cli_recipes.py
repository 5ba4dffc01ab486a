"""`fp8patch recipes`, and overrides as a recipe file holds them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from directories import run, write

from fp8patch.cli import output
from fp8patch.errors import RecipeError
from fp8patch.inspect.advice import recipe_line, recipe_lines
from fp8patch.recipe import Recipe, builtin_names, describe
from fp8patch.recipe_facts import facts_of, layers_of, to_yaml
from fp8patch.recipe_overrides import FIELDS, Override
from fp8patch.roofline import GPUS, predict_gain

OVERRIDES: dict[str, dict[str, Any]] = {
    "*.down_proj": {"scaling": "rowwise", "fp8_format": "e4m3"},
    'odd "name": # *': {"margin": 3, "amax_history_len": 7},
    "model.layers.0": {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"},
}
RECIPES = [
    *map(Recipe.load, builtin_names()),
    Recipe(skip=("*.gate", "a: b"), include=("é",), min_gain=1.25, overrides=OVERRIDES),  # type: ignore[arg-type]
    Recipe(amax_compute_algo="most_recent", amax_history_len=1, margin=16, misaligned="pad"),
]


# -- overrides ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_round_trips(recipe: Recipe, tmp_path: Path) -> None:
    """JSON, and the file that `recipes show` prints."""
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert hash(recipe) == hash(recipe.replace(name=recipe.name))
    file = tmp_path / "mine.yaml"
    file.write_text(to_yaml(recipe), encoding="utf-8")
    assert Recipe.load(file) == recipe.replace(name="mine")


def test_overrides_are_in_their_order() -> None:
    recipe = RECIPES[-2]
    assert [each.pattern for each in recipe.overrides] == list(OVERRIDES)
    assert recipe.overrides[0] == Override(
        "*.down_proj", (("scaling", "rowwise"), ("fp8_format", "e4m3"))
    )
    assert str(recipe.overrides[1]) == "margin: 3, amax_history_len: 7"
    later = Recipe(overrides={"a": {"margin": 1}, "b": {"margin": 2}})  # type: ignore[arg-type]
    assert later.for_layer(["a", "b"]).margin == later.for_layer(["b", "a"]).margin == 2
    assert later.for_layer(["a"]) == Recipe(margin=1)
    assert later.for_layer([]) == Recipe()
    assert Recipe().for_layer(["a"]) is not None


def test_another_scaling_gives_up_the_history() -> None:
    recipe = Recipe.from_dict(
        {"amax_history_len": 16, "margin": 1, "overrides": {"a": {"scaling": "current"}}}
    )
    assert recipe.for_layer(["a"]) == Recipe(name=recipe.name, scaling="current")


LINE = [
    ("overrides: 3", "overrides: 3 is not allowed. Use a mapping of patterns to fields"),
    ("overrides: [a]", "overrides: ['a'] is not allowed"),
    ("overrides:", "overrides: None is not allowed"),
    ("overrides: {3: {margin: 1}}", "overrides: 3 is not a pattern"),
    ('overrides: {"": {margin: 1}}', "overrides: '' is not a pattern"),
    ("overrides: {a: {}}", "'a': {} is not allowed. Use the fields to change"),
    ("overrides: {a: bf16}", "'a': 'bf16' is not allowed"),
    ("overrides: {a: {marginn: 1}}", "'a': unknown field 'marginn'. Did you mean 'margin'?"),
    ("overrides: {a: {skip: [b]}}", "'a': unknown field 'skip'. An override sets scaling, fp8_"),
    ("overrides: {a: {overrides: {}}}", "'a': unknown field 'overrides'"),
    ("overrides: {a: {margin: 1.5}}", "'a': margin: 1.5 is not allowed. Use a whole number"),
    (
        "overrides: {a: {scaling: row}}",
        "'a': scaling: 'row' is not allowed. Did you mean 'rowwise'",
    ),
    ("overrides: {a: {scaling: [rowwise]}}", "'a': scaling: ['rowwise'] is not allowed"),
    (
        "overrides: {a: {scaling: current, margin: 1}}",
        "'a': margin: 1 has no meaning with scaling: current",
    ),
    ("scaling: current\noverrides: {a: {margin: 1}}", "'a': margin: 1 has no meaning"),
    ("overrides: {a: {margin: 1}, a: {margin: 2}}", "'a' is given twice"),
    ("overrides: {*.a: {margin: 1}}", "a pattern that starts with * is written in quotes"),
    ("override: {}", "unknown recipe field 'override'. Did you mean 'overrides'?"),
    ("scaling: delayd", "scaling: 'delayd' is not allowed. Did you mean 'delayed'?"),
    ("- a", "a recipe is a mapping such as 'scaling: delayed', but this file is a list"),
    ("", "but this file is empty"),
]


@pytest.mark.parametrize(("text", "words"), LINE)
def test_check_says_what_is_wrong_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    for more in ([], ["--json"]):
        result = run("recipes", "check", file, *more)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"fp8patch: error: {file}: ")
        assert result.stderr.count("\n") == 1
        assert words in result.stderr
        assert len(result.stderr) < 600


@pytest.mark.parametrize("kind", ["missing", "folder", "binary", "huge"])
def test_files_that_are_no_recipes(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    if kind == "folder":
        file.mkdir()
    elif kind != "missing":
        file.write_bytes(b"\xff\xfe\x00" if kind == "binary" else b"#" * 100_000)
    result = run("recipes", "check", file)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1


def test_the_lines_that_inspect_advises_are_read(tmp_path: Path) -> None:
    chosen = {"*.a": ("scaling: rowwise",), "b": ("fprop: bf16", "dgrad: bf16", "wgrad: bf16")}
    for lines in (recipe_lines(chosen), [recipe_line(chosen)]):
        (tmp_path / "mine.yaml").write_text("\n".join(lines))
        recipe = Recipe.load(tmp_path / "mine.yaml")
        assert recipe.for_layer(["*.a"]).scaling == "rowwise"
        assert not recipe.for_layer(["b"]).in_fp8


def test_mistakes_in_python() -> None:
    with pytest.raises(RecipeError, match="overrides: 'a' is not allowed"):
        Recipe(overrides="a")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="unknown field 'nope'"):
        Recipe().replace(overrides={"a": {"nope": 1}})


# -- the commands ---------------------------------------------------------------------------------


def test_the_list_says_needs_and_costs() -> None:
    result = run("recipes")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    for name in builtin_names():
        (line,) = [line for line in lines if line.split(" ")[0] == name]
        gain = predict_gain(4096, 4096, 4096, GPUS["h100"], Recipe.load(name))
        assert ("9.0" if "rowwise" in name else "8.9") in line
        assert f"{gain:.2f}x" in line
        assert describe(name) in line
    assert "delayed (default)" in result.stdout
    found = json.loads(run("recipes", "--json", "--gpu", "b200").stdout)
    assert found["gpu"] == "NVIDIA B200"
    assert [each["recipe"]["name"] for each in found["recipes"]] == list(builtin_names())
    reads = {each["recipe"]["name"]: each["reads_a_cast"] for each in found["recipes"]}
    assert reads == {"delayed": 1, "current": 2, "rowwise": 3, "rowwise_bf16_wgrad": 1}


def test_the_list_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_PIPE_WIDTH", 80)
    text = run("recipes").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert re.search(r"^rowwise +9\.0 +3 +fprop dgrad wgrad", text, re.MULTILINE)
    assert "current: Per-tensor scales from the tensor itself." in text


@pytest.mark.parametrize("name", builtin_names())
def test_show_prints_a_file_that_is_the_recipe(name: str, tmp_path: Path) -> None:
    file = tmp_path / "copy.yaml"
    file.write_text(run("recipes", "show", name).stdout)
    assert Recipe.load(file) == Recipe.load(name).replace(name="copy")
    assert run("recipes", "check", file).exit_code == 0
    shown = json.loads(run("recipes", "show", name, "--json").stdout)
    assert Recipe.from_dict(shown["recipe"]) == Recipe.load(name)


def test_check_says_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text('base: current\noverrides: {"*.a": {scaling: rowwise}}\n')
    text = run("recipes", "check", file).stdout
    assert "valid, needs compute capability 9.0." in text
    assert "scaling: current  (delayed: delayed)" in text
    assert 'override "*.a": scaling: rowwise' in text
    found = json.loads(run("recipes", "check", file, "--json").stdout)
    assert (found["needs"], found["differs"]["scaling"]) == ("9.0", "current")
    assert found["overrides"] == [
        {"pattern": "*.a", "changes": {"scaling": "rowwise"}, "needs": "9.0", "modules": None}
    ]
    file.write_text("base: delayed\n")
    assert "The same as the default" in run("recipes", "check", file).stdout


def test_check_with_a_model(tmp_path: Path) -> None:
    model, file = write(tmp_path / "model", "llama"), tmp_path / "mine.yaml"
    file.write_text('overrides: {"*.down_proj": {margin: 1}}\n')
    result = run("recipes", "check", file, "--model", model)
    assert result.exit_code == 0, result.output
    assert "(2 modules)" in result.stdout
    file.write_text('overrides: {"*.down_prj": {margin: 1}}\n')
    refused = run("recipes", "check", file, "--model", model)
    assert refused.exit_code == 1
    assert 'override pattern "*.down_prj" matches none' in refused.stderr
    assert 'Nearest: "*.down_proj"' in refused.stderr
    assert run("recipes", "check", file).exit_code == 0  # nothing to compare it with


def test_check_says_why_a_model_has_nothing_in_fp8(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "llama")
    file = tmp_path / "strict.yaml"
    file.write_text("name: strict\nmin_gain: 50\n")
    result = run("recipes", "check", file, "--model", model)
    assert result.exit_code == 0
    assert "No GEMM would run in FP8." in result.stdout
    assert "slower" in result.stdout
    assert "--min-gain 50" in result.stdout


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["shwo", "x"], 2, "Did you mean 'show'"),
        (["show"], 2, "Missing argument"),
        (["show", "rowise"], 1, "no recipe is named 'rowise'. Did you mean 'rowwise'?"),
        (["--gpu", "h1000"], 1, "no figures for a GPU named 'h1000'. Did you mean 'h100'?"),
        (["--json", "show", "delayed"], 2, "give options after 'show', not before"),
        (["check", "x.yaml", "--model"], 2, "--model"),
    ],
)
def test_wrong_usage(words: list[str], code: int, text: str) -> None:
    result = run("recipes", *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in " ".join(result.stderr.split())


def test_what_layers_need_and_cost() -> None:
    recipe = RECIPES[-2]
    layers = {name: facts_of(layer, None) for name, layer in layers_of(recipe).items()}
    assert layers[""].needs == (8, 9)
    assert layers[""].history_bytes == 4 * 1024
    assert layers["*.down_proj"].needs == (9, 0)
    assert layers["*.down_proj"].history_bytes == 0
    assert layers["model.layers.0"].needs is None
    assert layers["model.layers.0"].reads == 0


def test_every_field_of_an_override_is_one_of_a_recipe() -> None:
    fields = Recipe().to_dict()
    assert set(FIELDS) < set(fields)
    never = {
        "name",
        "skip",
        "include",
        "misaligned",
        "min_gain",
        "norm_output",
        "loss",
        "overrides",
    }
    assert set(fields) - set(FIELDS) == never
