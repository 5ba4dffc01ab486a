"""`fp8patch convert --calibrate`: activation scales from texts, so that evaluation is warm."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import directories
import pytest
import torch
from directories import digests, left_behind, run, write, write_tokenizer
from zoo_base import VOCAB

import fp8patch
from fp8patch.checkpoint.sidecar import SIDECAR, STATE, read_sidecar
from fp8patch.checkpoint.stream import convert_directory
from fp8patch.recipe import Recipe
from fp8patch.slots import GRAD_OUTPUT, INPUT, WEIGHT, limit


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rng = random.Random(0)
    lines = [
        " ".join(f"w{rng.randrange(VOCAB - 3)}" for _ in range(rng.randint(1, 9)))
        for _ in range(11)
    ]
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(lines) + "\n  \n")
    return path


def model_directory(path: Path, name: str = "llama", **tokenizer: Any) -> Path:
    write(path, name)
    write_tokenizer(path, **tokenizer)
    return path


def convert(source: Path, texts: Path, *options: object) -> Path:
    out = source.parent / "out"
    result = run("convert", source, "-o", out, "--calibrate", texts, "--batch", 4, *options)
    assert result.exit_code == 0, result.output
    return out


# One process: load, evaluate in FP8, print the logits' bytes.
EVALUATE = """
import sys, torch, fp8patch
model = fp8patch.load(sys.argv[1])
ids = torch.arange(3, 29).reshape(2, 13)
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
    print(model(ids).logits.float().numpy().tobytes().hex())
"""


def test_input_slots_are_warm_and_an_evaluation_is_the_same_everywhere(
    tmp_path: Path, texts: Path
) -> None:
    source = model_directory(tmp_path / "model")
    stock = digests(source)
    convert_directory(source, tmp_path / "cold")
    out = convert(source, texts)
    written = digests(out)
    assert {name: written[name] for name in stock} == stock
    assert written.keys() - stock.keys() == {SIDECAR, STATE}
    assert left_behind(tmp_path) == []

    state, cold = read_sidecar(out).state, read_sidecar(tmp_path / "cold").state
    paths = {path for path, _ in cold}
    assert len(paths) == 14
    top = limit(Recipe(), INPUT)
    for path in paths:
        inputs = state[(path, INPUT)]
        assert len(inputs.history) == 1
        assert inputs.scale.item() == pytest.approx(top / inputs.history.item(), rel=1e-6)
        assert inputs.amax.item() == 0
        assert (path, GRAD_OUTPUT) not in state
        for ours, before in zip(state[(path, WEIGHT)], cold[(path, WEIGHT)], strict=True):
            assert torch.equal(ours, before)

    runs = [
        subprocess.run(
            [sys.executable, "-c", EVALUATE, out], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) > 1000


def test_the_scales_are_used_from_the_first_batch(tmp_path: Path, texts: Path) -> None:
    source = model_directory(tmp_path / "model")
    convert_directory(source, tmp_path / "cold")
    out = convert(source, texts)
    ids = torch.arange(3, 29).reshape(2, 13)
    logits = []
    for directory in (tmp_path / "cold", out):
        model = fp8patch.load(directory)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            with fp8patch.autocast(backend="emulate"):
                first, second = model(ids).logits, model(ids[:1]).logits
        logits.append(first)
        if directory == out:
            # With scales that are set, a row does not depend on its batch.
            assert torch.equal(first[:1], second)
    assert not torch.equal(*logits)


def test_what_calibration_saw_is_the_largest_over_all_texts(tmp_path: Path, texts: Path) -> None:
    source = model_directory(tmp_path / "model")
    first = read_sidecar(convert(source, texts, "--no-fp8")).state
    lines = texts.read_text().split("\n\n")
    texts.write_text("\n".join(lines[:4]))
    part = read_sidecar(convert(source, texts, "--no-fp8", "--force")).state
    grown = [
        first[key].history.item() - part[key].history.item() for key in part if key[1] == INPUT
    ]
    assert min(grown) >= 0
    assert max(grown) > 0


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_other_families(tmp_path: Path, texts: Path, name: str, recipe: str) -> None:
    out = convert(model_directory(tmp_path / "model", name), texts, "--recipe", recipe)
    sidecar = read_sidecar(out)
    warm = {path for path, role in sidecar.state if role == INPUT}
    assert warm == set(sidecar.fingerprint)


def test_a_tokenizer_that_cannot_pad_and_long_texts(tmp_path: Path, texts: Path) -> None:
    texts.write_text("w1 " * 5000 + "\nw2\nw3 w4")
    out = convert(model_directory(tmp_path / "model", pad=False), texts, "--max-length", 32)
    assert any(role == INPUT for _, role in read_sidecar(out).state)


def test_without_fp8_hardware_it_says_that_fp8_is_emulated(tmp_path: Path, texts: Path) -> None:
    source = model_directory(tmp_path / "model")
    arguments = ("convert", source, "-o", tmp_path / "out", "--calibrate", texts, "--device", "cpu")
    result = run(*arguments)
    assert result.exit_code == 0
    assert result.stderr.count("calibrating on cpu with emulated FP8 rounding") == 1
    assert "14 weights and the activations" in result.stdout
    result = run(*arguments, "--force", "--emulate")  # asked for, so not remarked upon
    assert result.stderr == ""
    result = run(*arguments, "--force", "--fp8")
    assert result.exit_code == 1
    assert "backend='fp8' (--fp8) was asked for" in result.stderr
    result = run(*arguments, "--emulate", "--fp8")
    assert result.exit_code == 2


def no_texts(source: Path, texts: Path) -> None:
    texts.write_text("\n \n\t\n")


def binary(source: Path, texts: Path) -> None:
    texts.write_bytes(b"\xff\xfe\x00w")


def no_tokenizer(source: Path, texts: Path) -> None:
    for path in source.glob("tokenizer*"):
        path.unlink()


def broken_tokenizer(source: Path, texts: Path) -> None:
    (source / "tokenizer.json").write_text("{")


def foreign_tokenizer(source: Path, texts: Path) -> None:
    write_tokenizer(source, words=VOCAB + 50)
    texts.write_text(f"w1 w{VOCAB + 40}")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (no_texts, "no text in it"),
        (binary, "not UTF-8"),
        (no_tokenizer, "no tokenizer in it"),
        (broken_tokenizer, "cannot be loaded"),
        (foreign_tokenizer, f"the model has {VOCAB} embeddings"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, texts: Path, damage: Any, expected: str
) -> None:
    source = model_directory(tmp_path / "model")
    damage(source, texts)
    result = run("convert", source, "-o", tmp_path / "out", "--calibrate", texts, "--emulate")
    assert result.exit_code == 1, result.output
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "texts.txt"]


def test_a_device_that_is_not_there(tmp_path: Path, texts: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("it is there")
    source = model_directory(tmp_path / "model")
    result = run(
        "convert", source, "-o", tmp_path / "out", "--calibrate", texts, "--device", "cuda:7"
    )
    assert result.exit_code == 1
    assert "--device cuda:7: cannot be used here" in result.stderr
    assert directories.left_behind(tmp_path) == []
