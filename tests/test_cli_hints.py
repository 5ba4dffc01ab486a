"""Errors of the commands name what to do, by the flag that the user would type."""

from pathlib import Path

import pytest
import torch
from directories import run, write, write_tokenizer

from fp8patch import hardware, launch


def no_gpu(device: object = None) -> hardware.Hardware:
    return hardware.classify("cpu", "CPU", problem="no GPU is visible to PyTorch")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(write(tmp_path / "model"))
    (tmp_path / "texts.txt").write_text("w1 w2 w3\n")
    return tmp_path / "model"


def refusal(*args: object) -> str:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("fp8patch: error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_calibration_in_fp8_names_the_flag(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", no_gpu)
    out = model.parent / "out"
    text = refusal("convert", model, "-o", out, "--calibrate", model.parent / "texts.txt", "--fp8")
    assert "backend='fp8' (--fp8) was asked for, but it cannot run here: FP8 needs" in text
    assert "PyTorch. Use backend='emulate' (--emulate) for the same rounding" in text
    assert not out.exists()


@pytest.mark.parametrize(
    ("device", "cuda", "fix"),
    [
        ("cuda", None, "calibrate on the CPU; cuda needs a PyTorch that is built for CUDA."),
        ("cuda", "13.0", "calibrate on the CPU; cuda needs a driver and a visible GPU."),
        ("gpu", None, "calibrate on the CPU."),
    ],
)
def test_a_device_that_is_not_there(
    model: Path, monkeypatch: pytest.MonkeyPatch, device: str, cuda: str | None, fix: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if device == "cuda":

        def empty(*args: object, **options: object) -> None:
            raise AssertionError("Torch not compiled with CUDA enabled")

        monkeypatch.setattr(torch, "empty", empty)
    text = refusal(
        "convert", model, "-o", model.parent / "out", "--calibrate", model.parent / "texts.txt",
        "--device", device,
    )  # fmt: skip
    assert f"--device {device}: cannot be used here (" in text
    assert f"Leave --device out to {fix}" in text


def test_a_target_that_exists(model: Path) -> None:
    (model.parent / "out").mkdir()
    text = refusal("convert", model, "-o", model.parent / "out")
    assert "out: exists already. Name another, or replace it with --force (in Python" in text


def test_a_folder_is_no_script(tmp_path: Path) -> None:
    assert "is a folder, without a __main__.py" in refusal("train", "--off", tmp_path)
    (tmp_path / "__main__.py").touch()
    assert launch.script_command(str(tmp_path), ["x"])[1:] == [str(tmp_path), "x"]


def test_plan_of_a_file_that_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("Dear diary")
    assert "notes.txt: not a config.json." in refusal("plan", tmp_path / "notes.txt")
