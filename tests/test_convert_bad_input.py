"""`fp8patch convert` of what it cannot convert: one clear line, and nothing written."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import as_torch_file, edit_weights, run, write
from torch import nn

from fp8patch.convert import convert_model
from fp8patch.errors import ConversionError

FIRST = "model.layers.0.mlp.up_proj.weight"


def config(**values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda path: edit_weights(path, lambda all: all.update({FIRST: change(all[FIRST])}))


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("model-*.safetensors"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        file = path / "model.safetensors.index.json"
        values = json.loads(file.read_text())
        change(values["weight_map"])
        file.write_text(json.dumps(values))

    return rewrite


def cut_bin(path: Path) -> None:
    as_torch_file(path)
    cut(path / "pytorch_model.bin")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


def evil_bin(path: Path) -> None:
    as_torch_file(path)
    torch.save({"a": Evil()}, path / "pytorch_model.bin")


# what -> (change, all of these are in the line)
ONE_FILE: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no config": (lambda p: (p / "config.json").unlink(), ("not a model directory",)),
    "config is no JSON": (lambda p: (p / "config.json").write_text("{"), ("not valid JSON",)),
    "unknown architecture": (config(model_type="nonsense"), ("unknown architecture", "nonsense")),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), ("no weights in it",)),
    "cut short": (lambda p: cut(p / "model.safetensors"), ("model.safetensors", "cut short")),
    "empty": (lambda p: os.truncate(p / "model.safetensors", 0), ("corrupt or cut short",)),
    "bin cut short": (cut_bin, ("pytorch_model.bin", "corrupt or cut short")),
    "bin with code": (evil_bin, ("pytorch_model.bin", "never run")),
    "other shape": (weight(lambda w: w[:16]), (FIRST, "[16, 64]", "[128, 64]")),
    "integers": (weight(lambda w: w.to(torch.int8)), (FIRST, "int8", "quantised already")),
    "FP8": (weight(lambda w: w.to(torch.float8_e4m3fn)), (FIRST, "float8_e4m3fn")),
    "quantised": (config(quantization_config={"bits": 4}), ("quantization_config",)),
}
SHARDED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "shard is missing": (lambda p: shards(p)[1].unlink(), ("missing", "index.json")),
    "shard is cut short": (lambda p: cut(shards(p)[1]), ("model-00002", "cut short")),
    "no index": (
        lambda p: (p / "model.safetensors.index.json").unlink(),
        ("model-00001", "no model.safetensors.index.json"),
    ),
    "index is no JSON": (
        lambda p: (p / "model.safetensors.index.json").write_text("[]"),
        ("not an index of shards",),
    ),
    "index names no such tensor": (
        index(lambda names: names.update(nope=next(iter(names.values())))),
        ("has no 'nope'",),
    ),
    "index leads outside": (
        index(lambda names: names.update(nope="../other/model.safetensors")),
        ("missing",),
    ),
}


@pytest.mark.parametrize("case", [*ONE_FILE, *SHARDED])
def test_a_damaged_directory_is_one_line(tmp_path: Path, case: str) -> None:
    damage, expected = (ONE_FILE | SHARDED)[case]
    source = write(tmp_path / "model", max_shard_size="60KB" if case in SHARDED else "5GB")
    damage(source)
    result = run("convert", source, "-o", tmp_path / "out")
    assert result.exit_code == 1, result.output
    lines = [line for line in result.stderr.splitlines() if "error: " in line]
    assert len(lines) == 1
    for text in expected:
        assert text in lines[0]
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], ["no such directory"]),
        (["bert-base-uncased"], ["no such directory", "hf download"]),
        (["model/config.json"], ["is a file"]),
        (["model", "--recipe", "delaid"], ["delaid", "delayed"]),
        (["model", "--only", "*.mpl.*"], ["*.mpl.*", "matches none"]),
        (["model", "--skip", "*"], ["nothing to convert", "--allow-empty", "15 pattern"]),
        (["model", "--calibrate", "nowhere.txt"], ["nowhere.txt", "cannot be read"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_argument_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: list[str]
) -> None:
    write(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    result = run("convert", *arguments, "-o", "out")
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    for text in expected:
        assert text in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_nothing_to_convert_may_be_allowed(tmp_path: Path) -> None:
    source = write(tmp_path / "model")
    result = run("convert", source, "-o", tmp_path / "out", "--skip", "*", "--allow-empty")
    assert result.exit_code == 0
    assert "0 of 15 GEMM modules" in result.stdout


def test_nothing_to_convert_is_said_alike_of_a_live_model() -> None:
    """Norms are no GEMMs, so they are not counted; either spelling of the remedy is given."""
    with pytest.raises(ConversionError, match=r"holds no nn\.Linear.*allow_empty=True"):
        convert_model(nn.Sequential(nn.LayerNorm(32), nn.ReLU()))
    model = nn.Sequential(nn.Linear(32, 24), nn.LayerNorm(24), nn.LayerNorm(24).double())
    with pytest.raises(ConversionError, match=r"all 1 candidates are skipped \(1 misaligned\)"):
        convert_model(model, skip=["1"])
    assert convert_model(model, allow_empty=True) is model
