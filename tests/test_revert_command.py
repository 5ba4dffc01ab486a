"""`fp8patch revert`: the stock files again, byte for byte."""

import json
from pathlib import Path

import pytest
from directories import digests, left_behind, run, write

from fp8patch.checkpoint.sidecar import SIDECAR, STATE


@pytest.mark.parametrize("layout", ["one file", "sharded"])
def test_revert_gives_back_the_stock_files(tmp_path: Path, layout: str) -> None:
    source = write(tmp_path / "model", max_shard_size="60KB" if layout == "sharded" else "5GB")
    (source / "onnx").mkdir()
    (source / "onnx" / SIDECAR).write_text("somebody's, and not at the top")
    stock = digests(source)
    assert run("convert", source, "-o", tmp_path / "out").exit_code == 0
    patched = digests(tmp_path / "out")
    result = run("revert", tmp_path / "out", "-o", tmp_path / "plain", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"out": str(tmp_path / "plain")}
    assert digests(tmp_path / "plain") == stock
    assert digests(tmp_path / "out") == patched
    assert left_behind(tmp_path) == []


def test_a_damaged_sidecar_can_be_reverted(tmp_path: Path) -> None:
    source = write(tmp_path / "model")
    stock = digests(source)
    assert run("convert", source, "-o", tmp_path / "out").exit_code == 0
    (tmp_path / "out" / SIDECAR).unlink()
    (tmp_path / "out" / STATE).write_bytes(b"")
    assert run("revert", tmp_path / "out", "-o", tmp_path / "plain").exit_code == 0
    assert digests(tmp_path / "plain") == stock


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model", "-o", "plain"], f"nothing to revert: it holds no {SIDECAR}"),
        (["nowhere", "-o", "plain"], "no such directory"),
        (["out", "-o", "out", "--force"], "the directory to read from"),
        (["out", "-o", "out/plain"], "lies inside"),
        (["out", "-o", "model"], "exists already"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("convert", write(Path("model")), "-o", "out").exit_code == 0
    before = digests(tmp_path)
    result = run("revert", *arguments)
    assert result.exit_code == 1
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert digests(tmp_path) == before
    assert left_behind(tmp_path) == []


def test_force_replaces_the_plain_one(tmp_path: Path) -> None:
    source = write(tmp_path / "model")
    stock = digests(source)
    assert run("convert", source, "-o", tmp_path / "out").exit_code == 0
    write(tmp_path / "plain", "gpt2")
    result = run("revert", tmp_path / "out", "-o", tmp_path / "plain", "--force")
    assert result.exit_code == 0
    assert digests(tmp_path / "plain") == stock
