"""What load refuses, what it leaves out, and what of a save that fails is left: nothing."""

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import resume_cases as cases
import safetensors.torch
import torch
from saved_cases import Plain, files, state, trained

import fp8patch
from fp8patch.checkpoint import workspace
from fp8patch.checkpoint.save_load import SIDECAR, STATE
from fp8patch.errors import CheckpointError


@pytest.fixture(scope="module")
def llama() -> Any:
    return trained()


@pytest.fixture
def saved(llama: Any, tmp_path: Path) -> Path:
    fp8patch.save(llama, tmp_path / "saved")
    return tmp_path / "saved"


def edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((directory / SIDECAR).read_text())
    change(values)
    (directory / SIDECAR).write_text(json.dumps(values))


# -- what does not fit ----------------------------------------------------------------------------


def test_other_weights_keep_the_state_of_activations(
    llama: Any, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = cases.build("llama", seed=9)
    path = "model.layers.0.mlp.up_proj"
    weights = llama.state_dict()
    weights[f"{path}.weight"] = other.get_submodule(path).weight.detach()
    safetensors.torch.save_file(weights, saved / "model.safetensors", {"format": "pt"})
    loaded = fp8patch.load(saved)
    line = capsys.readouterr().err
    assert f"1 of 14 weights are not those it was saved with ({path}, for one)" in line
    ours, theirs = state(loaded)["state"], state(llama)["state"]
    assert set(theirs) - set(ours) == {
        f"{path}.weight.{n}" for n in ("history", "scale", "amax", "counts")
    }
    for key, value in ours.items():
        assert torch.equal(value, theirs[key])


def wider(values: dict[str, Any]) -> None:
    values["fingerprint"] = {
        path: text.replace("[32, 32]", "[64, 32]") for path, text in values["fingerprint"].items()
    }


def newer(values: dict[str, Any]) -> None:
    values["format_version"], values["fp8patch_version"] = 2, "9.0"


def unknown_field(values: dict[str, Any]) -> None:
    values["plan"]["recipe"]["block"] = 128


BAD_JSON = {
    "newer": (newer, r"format 2.*reads formats up to 1\. Upgrade"),
    "another shape": (wider, r"another model: .*\[64, 32\], and has \[32, 32\]"),
    "newer recipe": (unknown_field, "block"),
    "no format": (lambda values: values.pop("format_version"), "format_version"),
    "no plan": (lambda values: values.pop("plan"), "'plan' is missing"),
    "flag": (lambda values: values["bank"].update(observed="yes"), "observed is 'yes'"),
    "outside": (lambda values: values["state"].update(file="../x"), "not a plain file name"),
}


@pytest.mark.parametrize(("change", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_a_bad_sidecar_is_one_clear_line(saved: Path, change: Any, message: str) -> None:
    edit(saved, change)
    with pytest.raises(CheckpointError, match=message) as error:
        fp8patch.load(saved)
    assert SIDECAR in str(error.value)
    assert "\n" not in str(error.value)


def test_truncated_files(saved: Path) -> None:
    whole = files(saved)
    for name in (SIDECAR, STATE):
        (saved / name).write_bytes(whole[name][: len(whole[name]) // 2])
        with pytest.raises(CheckpointError, match=f"{name}: corrupt: .*Copy it again"):
            fp8patch.load(saved)
        (saved / name).write_bytes(whole[name])
    (saved / STATE).unlink()
    with pytest.raises(CheckpointError, match=f"{STATE}: corrupt: the file is missing"):
        fp8patch.load(saved)


@pytest.mark.filterwarnings("default")
def test_bad_weights(saved: Path) -> None:
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="weights cannot be loaded"):
        fp8patch.load(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="weights cannot be loaded"):
        fp8patch.load(saved)
    weights = safetensors.torch.load(whole)
    del weights["model.layers.0.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 missing keys .*up_proj"):
        fp8patch.load(saved)


def test_no_directory_and_no_sidecar(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        fp8patch.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"convert that with fp8patch\.convert_model"):
        fp8patch.load(tmp_path)


def test_another_class_of_model(saved: Path) -> None:
    with pytest.raises(CheckpointError):
        fp8patch.load(saved, model=Plain())


def test_another_recipe_starts_anew(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = fp8patch.convert_model(cases.build("llama"), "current")
    fp8patch.load(saved, model=model)
    assert "saved with scaling='delayed'" in capsys.readouterr().err
    assert fp8patch.metrics(model) == {}


# -- a full disk ----------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_files(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = files(saved), workspace._write_bytes
    model = trained(steps=3)

    def full(path: Path, data: bytes) -> None:
        if SIDECAR in path.name:
            write(path, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(workspace, "_write_bytes", full)
    with pytest.raises(CheckpointError, match=r"the disk is full\. Free some space.*untouched\."):
        fp8patch.save(model, saved)
    assert files(saved) == before
    with pytest.raises(CheckpointError, match="the disk is full"):
        fp8patch.save(model, saved.parent / "new")
    assert not (saved.parent / "new").exists()
    # save_pretrained has written the weights by then; the sidecar stays whole.
    with pytest.raises(CheckpointError, match="the disk is full"):
        model.save_pretrained(saved)
    after = files(saved)
    assert set(after) == set(before)
    assert {n: after[n] for n in (SIDECAR, STATE)} == {n: before[n] for n in (SIDECAR, STATE)}


def test_a_full_disk_while_weights_are_written(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    before = files(saved)
    monkeypatch.setattr(safetensors.torch, "save_model", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        fp8patch.save(fp8patch.convert_model(Plain()), saved)
    assert files(saved) == before


# -- what a killed save left ----------------------------------------------------------------------


@pytest.fixture
def left(saved: Path) -> Path:
    left = saved / ".fp8patch-save.4194305"
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    return left


def test_what_a_killed_save_left_is_swept(saved: Path, llama: Any, left: Path) -> None:
    # A process id says nothing: whoever has this one may be of another host or container.
    left = left.rename(left.with_suffix(f".{os.getpid()}"))
    fp8patch.save(llama, saved)
    assert not left.exists()


def test_what_another_save_works_in_is_left_alone(saved: Path, llama: Any, left: Path) -> None:
    lock = os.open(left, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fp8patch.save(llama, saved)
        assert (left / "model.safetensors").is_file()
    finally:
        os.close(lock)
    fp8patch.save(llama, saved)
    assert not left.exists()


def test_a_save_holds_the_lock_and_leaves_nothing(saved: Path) -> None:
    held = []

    class Watched(Plain):
        def save_pretrained(self, directory: Path) -> None:
            held.append(directory)
            lock = os.open(directory, os.O_RDONLY)
            try:
                with pytest.raises(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(lock)

    fp8patch.save(fp8patch.convert_model(Watched()), saved)
    assert held[0].parent == saved
    assert not list(saved.glob(".*"))


def test_without_locks_nothing_is_swept(
    saved: Path, llama: Any, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    fp8patch.save(llama, saved)
    assert list(saved.glob(".*")) == [left]


def test_a_failed_save_removes_the_directories_it_made(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()

    class Failing(Plain):
        def save_pretrained(self, directory: Path) -> None:
            (directory / "half").touch()
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="the disk is full"):
        fp8patch.save(Failing(), tmp_path / "kept" / "a" / "b")
    assert list(tmp_path.rglob("*")) == [tmp_path / "kept"]
