"""`fp8patch demo`: its whole run, what its checks catch, and what it leaves behind."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import fp8patch
from fp8patch import cli, demo
from fp8patch.cli import demo as command
from fp8patch.demo_model import HELD_OUT, VOCABULARY, Task, Training
from fp8patch.hardware import detect
from fp8patch.modules.base import Float8Module


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["demo", *map(str, args)])


def in_a_process(cwd: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fp8patch", "demo", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(fp8patch.__file__).parent.parent), **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path) -> None:
    """One run: everything is printed, holds, and nothing is left but the kept checkpoint."""
    work, temporary, kept = (tmp_path / name for name in ("work", "temporary", "kept"))
    work.mkdir()
    temporary.mkdir()
    done = in_a_process(work, "--keep", str(kept), TMPDIR=str(temporary))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    text = done.stdout
    assert re.search(r"final loss \(chance: 4\.159\) +0\.0\d+ +0\.0\d+", text)
    assert re.search(r"held-out prompts continued right +[56]\d of 64 +[56]\d of 64", text)
    assert re.search(r"modules run in FP8 +0 +14 of 14 converted", text)
    assert re.search(r"calls in FP8 +0 +2,800", text)
    assert re.search(r"step time +[\d.]+ ms +[\d.]+ ms", text)
    assert "Peak memory" in text or "peak memory" in text
    assert re.search(r"layers\.0\.self_attn\.q_proj +input +[\d.e+-]+ +[\d.e+-]+\n", text)
    assert len(re.findall(r"^ok ", text, re.MULTILINE)) == 7
    assert "FAILED" not in text
    if not detect().fp8:
        assert "FP8 is emulated here: the same rounding as on a GPU, and no speed." in text
    assert list(work.iterdir()) == []
    assert list(temporary.iterdir()) == []
    assert {"model.safetensors", "fp8patch.json"} <= {file.name for file in kept.iterdir()}
    again = in_a_process(work, "--keep", str(kept))
    assert again.returncode == 1
    assert "is not empty" in again.stderr


def test_a_run_too_short_fails_and_says_what(tmp_path: Path) -> None:
    result = invoke("--steps", 2, "--json")
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert not values["passed"]
    failed = {check["name"] for check in values["checks"] if not check["passed"]}
    assert failed == {"BF16 learns", "FP8 learns", "generation"}
    assert all(name in result.stderr for name in failed)
    assert "about 200 steps" in result.stderr
    assert values["in_fp8"] == values["converted"] == 14
    assert values["fp8_calls"] == 2 * 14


def test_the_same_seed_gives_the_same_figures() -> None:
    first, second = (demo.run(steps=3, seed=5) for _ in range(2))
    assert first.bf16.losses == second.bf16.losses
    assert first.fp8.losses == second.fp8.losses
    assert first.slots == second.slots
    assert first.example == second.example
    assert demo.run(steps=1, seed=6).bf16.losses[0] != first.bf16.losses[0]
    # Alike before the first step, up to FP8's rounding; and not the same computation.
    assert first.fp8.losses[0] == pytest.approx(first.bf16.losses[0], abs=0.01)
    assert first.fp8.losses != first.bf16.losses


def test_the_callers_random_state_and_threads_are_left_alone() -> None:
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    demo.run(steps=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_progress_is_reported() -> None:
    seen: list[tuple[str, int, int]] = []
    demo.run(steps=2, progress=lambda what, done, total, said: seen.append((what, done, total)))
    assert seen[:2] == [("Training in BF16", 1, 2), ("Training in BF16", 2, 2)]
    assert seen[-1] == ("Saving and reloading", 1, 1)


def test_held_out_pairs_are_never_trained_on() -> None:
    machine = Task(detect("cpu"), 1, 0, lambda *args: None)
    held_out, trained = (
        {tuple(p) for p in pairs.tolist()} for pairs in (machine.held_out, machine.trained)
    )
    assert len(held_out) == HELD_OUT
    assert not held_out & trained
    ids, labels = machine._batch(torch.Generator().manual_seed(1))
    steps = (ids[:, 1:] - ids[:, :-1]) % VOCABULARY
    assert bool((steps == steps[:, :1]).all())
    assert bool((labels[:, :2] == -100).all())
    assert torch.equal(labels[:, 2:], ids[:, 2:])


# -- faults that the checks have to find ----------------------------------------------------------


def _other_scale(directory: Any, **kwargs: Any) -> Any:
    model = fp8patch.load(directory, **kwargs)
    module = next(m for m in model.modules() if isinstance(m, Float8Module))
    state = module._fp8_bank.read(module._fp8_path, 0)
    module._fp8_bank.write(module._fp8_path, 0, state._replace(scale=state.scale * 1.5))
    return model


def _not_converted(directory: Any, **kwargs: Any) -> Any:
    return fp8patch.revert_model(fp8patch.load(directory, **kwargs))


@pytest.mark.parametrize("fault", [_other_scale, _not_converted])
def test_a_reload_that_differs_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(demo, "load", fault)
    assert "reload" in {check.name for check in demo.run(steps=2).failed}


def test_a_checkpoint_that_is_not_plain_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file, save_file

    def save(model: Any, directory: Path) -> None:
        fp8patch.save(model, directory)
        file = directory / "model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.scale"] = tensors.pop("model.norm.weight")
        save_file(tensors, file, {"format": "pt"})

    monkeypatch.setattr(demo, "save", save)
    failed = {check.name: check.detail for check in demo.run(steps=1).failed}
    assert "'missing_keys': 1" in failed["plain load"]
    assert "'unexpected_keys': 1" in failed["plain load"]


def test_a_module_that_is_left_out_of_fp8_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(model: Any) -> Any:
        fp8patch.convert_model(model)
        layer = model.model.layers[1].mlp.up_proj
        layer.forward = lambda input: torch.nn.functional.linear(input, layer.weight)
        return model

    monkeypatch.setattr(demo, "convert_model", convert)
    result = demo.run(steps=1)
    failed = {check.name: check.detail for check in result.failed}
    assert "not model.layers.1.mlp.up_proj" in failed["all in FP8"]
    assert (result.in_fp8, result.converted) == (13, 14)


@pytest.mark.parametrize("loss", [0.5, 5.0, float("nan")])
def test_a_bad_loss_is_found(loss: float) -> None:
    good, bad = (
        Training(losses=(), final_loss=x, step_ms=1, peak_bytes=None, generated_right=64)
        for x in (0.01, loss)
    )
    failed = {c.name for c in demo._training_checks(good, bad, 1, {"a": 1}) if not c.passed}
    assert "FP8 follows BF16" in failed
    assert "all in FP8" not in failed
    assert "FP8 learns" in failed


# -- the command ----------------------------------------------------------------------------------


def test_keep_refuses_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    result = invoke("--keep", tmp_path)
    assert result.exit_code == 1
    assert "is not empty" in result.stderr
    result = invoke("--keep", tmp_path / "mine")
    assert result.exit_code == 1
    assert "can't keep" in result.stderr
    assert (tmp_path / "mine").read_text() == "precious"


def test_it_fits_a_narrow_terminal() -> None:
    from rich.console import Console

    screen = Console(width=80, file=io.StringIO())
    command.show(demo.run(steps=1), screen)
    text = screen.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
