"""Recipe files that are no recipes, or read as something else than they say: one line each."""

import os
from pathlib import Path
from typing import Any

import pytest

from fp8patch.errors import RecipeError
from fp8patch.recipe import Recipe

DEEP = "skip: " + "[" * 3000 + "]" * 3000
BOMB = "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcd", "bcde", strict=True)
)


def refusal(source: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        Recipe.load(source)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("margin: 010", "line 1: not valid YAML: 010 is not a plain whole number"),
        ("name: x\namax_history_len: 1:30", "line 2: not valid YAML: 1:30 is not a plain whole"),
        ("margin: 0x2", "0x2 is not a plain"),
        ("margin: 0b1", "0b1 is not a plain"),
        ("amax_history_len: 1_000", "1_000 is not a plain"),
        ("min_gain: 1:30.5", "1:30.5 is not a plain decimal"),
        ("min_gain: 1_0.5", "1_0.5 is not a plain decimal"),
        ("margin: " + "9" * 5000, "is not a plain whole number"),
        ("margin: " + "9" * 17, "margin: 99999999999999999 is not allowed"),
        ("min_gain: 1.0e+999", "min_gain: inf is not allowed"),
        ("name: 2024-13-45", "month must be in 1..12"),
        ("skip: &all ['*']\ninclude: *all", "line 1: not valid YAML: &all is an alias or anchor"),
        ("margin: *a", "*a is an alias or anchor"),
        ("skip: *.gate", 'is written in quotes, as "*.gate"'),
        ("a: &a [x]\n" + BOMB, "&a is an alias or anchor"),
        ("base: &b delayed", "&b is an alias or anchor"),
        (DEEP, "nested too deeply"),
        ("margin: 0 # " + "x" * 70_000, "larger than 64 KiB"),
        ("scaling: " + "x" * 1000, "xxx…"),
        ("x" * 100 + ": 1", "unknown recipe field"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, words: str) -> None:
    message = refusal(write(tmp_path, text))
    assert "mine.yaml" in message
    assert words in message


@pytest.mark.parametrize(
    ("text", "margin"), [("margin: 0", 0), ("margin: 10", 10), ("margin: +2", 2)]
)
def test_plain_numbers_are_read(tmp_path: Path, text: str, margin: int) -> None:
    assert Recipe.load(write(tmp_path, text + "\nmin_gain: 1.5\n")).margin == margin


def test_what_looks_like_a_number_may_be_quoted(tmp_path: Path) -> None:
    recipe = Recipe.load(write(tmp_path, "name: '010'\nskip: ['*.gate', '&x']\n"))
    assert (recipe.name, recipe.skip) == ("010", ("*.gate", "&x"))


def test_a_pipe_or_a_device_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "it is not a regular file" in refusal(tmp_path / "pipe.yaml")
    assert "it is not a regular file" in refusal("/dev/zero")
    assert "it is a folder" in refusal(tmp_path)


@pytest.mark.parametrize("source", ["x" * 5000, "a/" + "x" * 5000, "a\0b", "a/\0b"])
def test_what_cannot_be_a_path(source: str) -> None:
    with pytest.raises(RecipeError):
        Recipe.load(source)


@pytest.mark.parametrize(
    "values",
    [{"margin": 10**5000}, {"min_gain": 10**5000}, {"scaling": 10**5000}, {10**5000: 1}],
)
def test_huge_numbers_from_python(values: Any) -> None:
    with pytest.raises(RecipeError, match="a huge int"):
        Recipe.from_dict(values)
