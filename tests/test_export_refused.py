"""`fp8patch export` of what it cannot export: one clear line, and nothing written."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import digests, edit_weights, left_behind, run, write
from exported import write_llama
from test_convert_bad_input import ONE_FILE, SHARDED, config, weight

from fp8patch.errors import ConversionError
from fp8patch.export.directory import export_directory

# The damages that `convert` refuses in words of its own are refused in the same words here.
SAME = {
    name: case
    for name, case in (ONE_FILE | SHARDED).items()
    if name not in ("integers", "FP8", "quantised")
}
OWN = {
    "integers": (weight(lambda w: w.to(torch.int8)), ("stored as I8", "quantised already")),
    "FP8": (weight(lambda w: w.to(torch.float8_e4m3fn)), ("stored as F8_E4M3", "BF16")),
    "quantised": (config(quantization_config={}), ("quantised already. export needs",)),
    "sidecar": (lambda p: (p / "fp8patch.json").write_text("{"), ("fp8patch.json: corrupt",)),
    "nan": (weight(lambda w: w.index_fill(0, torch.tensor(3), torch.nan)), ("holds inf or nan",)),
    "inf": (weight(lambda w: w - torch.inf), ("up_proj.weight holds inf or nan",)),
}


@pytest.mark.parametrize("case", [*SAME, *OWN])
def test_a_damaged_directory_is_one_line(tmp_path: Path, case: str) -> None:
    damage, expected = (SAME | OWN)[case]
    source = write(tmp_path / "model", max_shard_size="60KB" if case in SHARDED else "5GB")
    damage(source)
    result = run("export", source, "-o", tmp_path / "out")
    assert result.exit_code == 1, result.output
    assert (result.stdout, result.stderr.count("error: ")) == ("", 1)
    for text in expected:
        assert text in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], ["no such directory"]),
        (["model/config.json"], ["is a file"]),
        (["model", "--format", "gguf"], ["no format 'gguf'", "compressed-tensors, hf-fp8"]),
        (["model", "--format", "hf_fp8"], ["Did you mean 'hf-fp8'?"]),
        (["model", "--only", "*.mpl.*"], ["*.mpl.*", "matches none"]),
        (["model", "--skip", "*"], ["no layer can be exported", "15 pattern"]),
        (["model", "--format", "hf-fp8"], ["no layer can be exported as hf-fp8", "14 block"]),
        (["gpt2"], ["no layer can be exported", "8 conv1d", "[in, out]"]),
        (["adapter"], ["PEFT adapter"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_argument_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: list[str]
) -> None:
    write(tmp_path / "model")
    write(tmp_path / "gpt2", "gpt2")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    before = digests(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = run("export", *arguments, "-o", "out")
    assert result.exit_code == 1, result.output
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    for text in expected:
        assert text in result.stderr
    assert digests(tmp_path) == before


def test_an_existing_out_needs_force_and_is_kept_until_the_new_one_is_complete(
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "model")
    assert run("export", source, "-o", tmp_path / "out").exit_code == 0
    before = digests(tmp_path)
    result = run("export", source, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "exists already" in result.stderr
    edit_weights(source, lambda all: all["model.layers.1.mlp.down_proj.weight"].fill_(torch.inf))
    with pytest.raises(ConversionError, match="holds inf"):
        export_directory(source, tmp_path / "out", force=True)
    after = digests(tmp_path)
    del before["model/model.safetensors"], after["model/model.safetensors"]
    assert after == before
    assert left_behind(tmp_path) == []


def test_an_exported_directory_is_no_source(tmp_path: Path) -> None:
    """Neither of another export, nor of a convert."""
    export_directory(write(tmp_path / "model"), tmp_path / "out")
    for command in ("export", "convert"):
        result = run(command, tmp_path / "out", "-o", tmp_path / "again")
        assert result.exit_code == 1
        assert "quantised already" in result.stderr


@pytest.mark.parametrize("where", ["export.writer.ShardWriter.append", "checkpoint.files._reflink"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = write(tmp_path / "model")
    monkeypatch.setattr(f"fp8patch.{where}", full)
    result = run("export", source, "-o", tmp_path / "new" / "out")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the disk is full. Free some space" in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# Stops in the middle of the third weight.
PAUSED = """
    import sys, time
    from fp8patch.export.writer import ShardWriter
    append, calls = ShardWriter.append, []
    def append_and_wait(self, *args):
        append(self, *args)
        calls.append(args)
        if len(calls) == 5:
            print("writing", flush=True)
            time.sleep(60)
    ShardWriter.append = append_and_wait
    sys.argv = ["fp8patch", "export", *sys.argv[1:]]
    from fp8patch.cli import main
    main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143)], ids=["TERM"])
def test_an_export_that_is_stopped_leaves_nothing(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    source = write(tmp_path / "model")
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(PAUSED),
        source,
        "-o",
        tmp_path / "new" / "out",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    assert len(left_behind(tmp_path / "new")) == 1
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == code, error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_gap_in_a_file_is_a_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted one: a piece that is not written does not become zeros."""
    source = write_llama(tmp_path / "model")
    monkeypatch.setattr("fp8patch.export.weights._copy", lambda *args: None)
    with pytest.raises(AssertionError):
        export_directory(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
