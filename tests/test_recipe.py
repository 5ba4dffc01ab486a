"""Recipes: the built-in files, files that build on them, and what is refused with which words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fp8patch import recipe as recipe_module
from fp8patch.errors import RecipeError
from fp8patch.recipe import Recipe, builtin_names, describe

BUILTINS = ("delayed", "current", "rowwise", "rowwise_bf16_wgrad")


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        Recipe.load(write(folder, text))
    message = str(caught.value)
    assert "mine.yaml" in message
    assert "\n" not in message
    return message


def test_the_builtins_are_the_files_of_the_recipes_folder() -> None:
    assert set(builtin_names()) == set(BUILTINS)
    assert builtin_names()[0] == "delayed"


def test_the_defaults_are_the_builtin_delayed() -> None:
    assert Recipe() == Recipe.load("delayed") == Recipe.load(None)


def test_delayed_yaml_documents_every_field() -> None:
    values = yaml.safe_load((recipe_module._recipes_dir() / "delayed.yaml").read_text("utf-8"))
    assert values.keys() - {"description"} == recipe_module._DEFAULTS.keys() - {"name"}


@pytest.mark.parametrize(
    ("name", "scaling", "fp8_format", "wgrad"),
    [
        ("delayed", "delayed", "hybrid", "fp8"),
        ("current", "current", "hybrid", "fp8"),
        ("rowwise", "rowwise", "e4m3", "fp8"),
        ("rowwise_bf16_wgrad", "rowwise", "e4m3", "bf16"),
    ],
)
def test_what_a_builtin_says(name: str, scaling: str, fp8_format: str, wgrad: str) -> None:
    recipe = Recipe.load(name)
    assert recipe.name == name
    assert (recipe.scaling, recipe.fp8_format, recipe.wgrad) == (scaling, fp8_format, wgrad)
    assert (recipe.fprop, recipe.dgrad) == ("fp8", "fp8")
    assert describe(name).endswith(".")


def test_describe_refuses_what_is_not_built_in() -> None:
    with pytest.raises(RecipeError, match="'nope'"):
        describe("nope")


def test_a_recipe_is_its_own_source() -> None:
    recipe = Recipe(margin=2)
    assert Recipe.load(recipe) is recipe


def test_a_file_overrides_its_base(tmp_path: Path) -> None:
    text = "base: rowwise\ndescription: mine\nwgrad: bf16\nskip: ['*.gate']\nmin_gain: 1\n"
    recipe = Recipe.load(str(write(tmp_path, text)))
    expected = Recipe.load("rowwise").replace(
        name="mine", wgrad="bf16", skip=["*.gate"], min_gain=1.0
    )
    assert recipe == expected
    assert isinstance(recipe.min_gain, float)


def test_a_file_without_a_base_starts_from_the_defaults(tmp_path: Path) -> None:
    recipe = Recipe.load(write(tmp_path, "name: short\namax_history_len: 16\n"))
    assert recipe == Recipe(name="short", amax_history_len=16)


def test_a_builtin_name_wins_over_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "margin: 3", "delayed")
    write(tmp_path, "margin: 4", "other")
    monkeypatch.chdir(tmp_path)
    assert Recipe.load("delayed").margin == 0
    assert Recipe.load(Path("delayed")).margin == 3
    assert Recipe.load("other").margin == 4


@pytest.mark.parametrize("name", BUILTINS)
def test_a_dict_round_trips_through_json(name: str) -> None:
    recipe = Recipe.load(name).replace(skip=("a.*", "b"), min_gain=1.25)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@given(
    scaling=st.sampled_from(["delayed", "current", "rowwise"]),
    fp8_format=st.sampled_from(["hybrid", "e4m3"]),
    gemms=st.tuples(*[st.sampled_from(["fp8", "bf16"])] * 3),
    patterns=st.lists(st.text(min_size=1), max_size=3),
    min_gain=st.none() | st.floats(0, 100) | st.integers(0, 100),
)
def test_whatever_is_allowed_round_trips(
    scaling: Any, fp8_format: Any, gemms: Any, patterns: list[str], min_gain: Any
) -> None:
    recipe = Recipe.from_dict(
        {
            "scaling": scaling,
            "fp8_format": fp8_format,
            "fprop": gemms[0],
            "dgrad": gemms[1],
            "wgrad": gemms[2],
            "include": patterns,
            "min_gain": min_gain,
        }
    )
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert hash(recipe) == hash(recipe.replace())


def test_an_unknown_field_names_the_nearest_and_all() -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict({"amax_history_length": 16})
    message = str(caught.value)
    assert "unknown recipe field 'amax_history_length'" in message
    assert "Did you mean 'amax_history_len'?" in message
    assert all(field in message for field in recipe_module._DEFAULTS)


def test_an_unknown_field_of_a_file_names_the_file(tmp_path: Path) -> None:
    message = refusal(tmp_path, "bases: delayed\n")
    assert "Did you mean 'base'?" in message


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="'rowise'. Did you mean 'rowwise'.*delayed, current"):
        Recipe.load("rowise")


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="none.yaml: no such recipe file. Built in: delayed"):
        Recipe.load(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="no such recipe file"):
        Recipe.load("some/where")


def test_a_folder_or_bytes_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.load(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(RecipeError, match="not UTF-8"):
        Recipe.load(tmp_path / "b.yaml")


def test_a_dict_is_no_source() -> None:
    with pytest.raises(RecipeError, match=r"not dict. Recipe\.from_dict"):
        Recipe.load({"margin": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "this file is empty"),
        ("- delayed\n", "this file is a list"),
        ("delayed\n", "this file is a str"),
        ("scaling: delayed\nskip: [a\n", "line 3: not valid YAML"),
        ("scaling: delayed\nmargin: 1\nscaling: current\n", "line 3: .*'scaling' is given twice"),
        ("base: mine\n", "base: 'mine' is not a built-in"),
        ("base: rowise\n", "Did you mean 'rowwise'"),
        ("base: [delayed]\n", "is not a built-in"),
        ("base: current\nmargin: 2\n", "margin: 2 has no meaning with scaling: current"),
        ("fprop: off\n", "fprop: False is not allowed. Use fp8 or bf16"),
        ("1: 2\n", "unknown recipe field 1"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    message = refusal(tmp_path, text)
    assert re.search(words, message), message


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("scaling", "DELAYED", "Did you mean 'delayed'"),
        ("scaling", 1, "delayed, current or rowwise"),
        ("scaling", ["delayed"], "delayed, current or rowwise"),
        ("fp8_format", "e5m2", "hybrid or e4m3"),
        ("amax_compute_algo", "mean", "max or most_recent"),
        ("wgrad", "fp16", "fp8 or bf16"),
        ("misaligned", None, "skip or pad"),
        ("norm_output", "fp16", "auto, bf16 or fp32"),
        ("loss", "fast", "fused or stock"),
        ("amax_history_len", 0, "from 1 to 65536"),
        ("amax_history_len", True, "whole number"),
        ("amax_history_len", 2.0, "whole number"),
        ("margin", -1, "from 0 to 16"),
        ("margin", "1", "whole number"),
        ("skip", "*.gate", "list of glob patterns"),
        ("skip", [""], "list of glob patterns"),
        ("include", [1], "list of glob patterns"),
        ("min_gain", -0.5, "at least 0"),
        ("min_gain", float("nan"), "at least 0"),
        ("min_gain", float("inf"), "at least 0"),
        ("min_gain", True, "at least 0"),
        ("min_gain", "1.0", "at least 0"),
        ("name", "", "non-empty"),
        ("name", None, "non-empty"),
    ],
)
def test_a_bad_value_is_refused_with_the_value_and_what_is_allowed(
    field: str, value: Any, allowed: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict({field: value})
    assert str(caught.value).startswith(f"{field}: ")
    assert allowed in str(caught.value)


@pytest.mark.parametrize("scaling", ["current", "rowwise"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("amax_history_len", 16), ("amax_compute_algo", "most_recent"), ("margin", 1)],
)
def test_history_fields_are_for_delayed_only(scaling: Any, field: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=f"{field}: .* no meaning with scaling: {scaling}"):
        Recipe.from_dict({"scaling": scaling, field: value})
    assert getattr(Recipe.from_dict({field: value}), field) == value


def test_the_constructor_and_replace_check_too() -> None:
    with pytest.raises(RecipeError, match="fprop"):
        Recipe(fprop="fp16")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="unknown recipe field 'marign'"):
        Recipe().replace(marign=1)


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Recipe().margin = 1  # type: ignore[misc]


def test_an_incomplete_installation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_module, "__file__", str(tmp_path / "fp8patch" / "recipe.py"))
    with pytest.raises(RecipeError, match="installation is incomplete"):
        recipe_module._recipes_dir()
