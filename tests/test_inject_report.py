"""What a run says and writes: report, status, --check, debug lines, errors in one line."""

import enum
import json
import os
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from injected import armed, child
from torch import nn
from trap_models import blocks, llama, noise, tokens

import fp8patch
from fp8patch.errors import HardwareError
from fp8patch.inject import compat, conflicts, patch
from fp8patch.inject import report as reports
from fp8patch.inject.report import write_report


def steps(model: Any, count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(count):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_report_is_refreshed_while_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    with armed(backend="emulate", report=path, log_every=2) as run:
        steps(model := llama(), 5)
        going = json.loads(path.read_text())
        # One more optimizer over the same parameters makes no steps of its own.
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        run.finish()
        ended = json.loads(path.read_text())
    assert going["state"] == "running"
    assert going["steps"] == 4
    assert ended["state"] == "finished"
    assert ended["steps"] == len(ended["step_seconds"]) == 5
    assert [step for step, _ in ended["losses"]] == [1, 2, 3, 4, 5]
    assert all(4 < loss < 5 for _, loss in ended["losses"])
    assert ended["median_step_seconds"] > 0
    assert ended["peak_memory_bytes"] > 2**20
    assert ended["coverage"]["fp8_calls"] == 14
    assert ended["coverage"]["calls"] == 15
    assert ended["models"][0]["class"] == "LlamaForCausalLM"
    assert ended["models"][0]["converted"] == {"linear": 14, "rmsnorm": 5}
    assert ended["ratios"]["grad_output"]["non_finite"] == 0
    assert 0 < ended["overhead"]["seconds_a_step"] < 1
    assert list(tmp_path.iterdir()) == [path]
    said = capsys.readouterr().err
    assert said.count("fp8patch: step ") == 2
    assert "optimizer steps, median" in said


def test_a_report_that_cannot_be_written_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with armed(backend="emulate", report=tmp_path / "none" / "report.json") as run:
        steps(llama(), 2)
        assert run.record.steps == 2
        said = capsys.readouterr().err
        assert said.count("the report can't be written, and the run goes on.") == 1
        write_report(run, "finished")
    last = capsys.readouterr().err
    assert "the last report can't be written. " in last
    assert "older" not in last  # there is none
    assert "cannot be written: No such file or directory" in said


def test_an_older_report_is_said_to_be_older(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    with armed(backend="emulate", report=path) as run:
        steps(llama(), 2)
        monkeypatch.setattr(reports, "write_json", lambda path, values: "The disk is full.")
        write_report(run, "finished")
    assert path.exists()
    assert "The disk is full. What is there is older." in capsys.readouterr().err


def test_check_stops_after_the_third_step(capsys: pytest.CaptureFixture[str]) -> None:
    with armed(backend="emulate", check=True) as run:
        with pytest.raises(SystemExit) as stopped:
            steps(llama(), 9)
        assert stopped.value.code == 0
        assert run.record.steps == 3
        run.finish()
    said = capsys.readouterr().err
    assert "check: LlamaForCausalLM: predicted" in said
    assert "check: measured steps: " in said
    assert "14 of 15 GEMM calls" in said


def test_debug_says_which_gemm_runs_in_what(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FP8PATCH_DEBUG", "1")
    with armed(backend="emulate"):
        steps(llama(), 2)
    lines = capsys.readouterr().err.splitlines()
    query = [line for line in lines if "layers.0.self_attn.q_proj: M=" in line]
    assert len(query) == 1
    assert "M=26, N=32, K=32" in query[0]
    assert "fprop FP8 E4M3 x E4M3, fast accumulation" in query[0]
    assert "dgrad FP8 E5M2 x E4M3" in query[0]
    (head,) = [line for line in lines if "lm_head: M=" in line]
    assert "all GEMMs in bfloat16" in head


def test_modules_that_never_ran_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = blocks()
    model.spare = nn.Linear(32, 32)
    with armed(backend="emulate") as run:
        model(noise(4, 32)).sum().backward()
        run.finish()
    assert "converted, and not run in the first step: spare" in capsys.readouterr().err


def test_a_run_without_fp8_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with armed(backend="auto"):
        blocks()(noise(4, 32))
    assert "FP8 is off: " in capsys.readouterr().err
    reason = "this PyTorch is built without CUDA."
    monkeypatch.setattr(conflicts, "no_fp8_in_this_build", lambda: reason)
    with pytest.raises(HardwareError, match="--emulate"):
        fp8patch.enable(backend="fp8")
    patch.disarm()


def test_fp8_on_a_cpu_is_refused_at_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflicts, "no_fp8_in_this_build", lambda: None)
    model = blocks()
    with armed(backend="fp8"), pytest.raises(HardwareError, match="cannot run here"):
        model(noise(4, 32))
    assert type(model.layers[0].up) is nn.Linear


def test_a_trial_call_on_the_cpu_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = blocks()
    with armed(backend="auto") as run:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        model(noise(4, 32))
        assert run.execution is None
        assert not run.off
    assert "FP8 waits for one on the GPU" in capsys.readouterr().err


# -- scripts of other versions --------------------------------------------------------------------


def test_compat_supplies_names() -> None:
    class DistributedType(enum.Enum):
        NO = "NO"
        XLA = "XLA"

    accelerate: Any = types.ModuleType("accelerate.utils.dataclasses")
    accelerate.DistributedType = DistributedType
    compat._tpu(accelerate)
    compat._tpu(accelerate)
    assert DistributedType.TPU is DistributedType.XLA  # type: ignore[attr-defined]
    assert DistributedType.NO != DistributedType.XLA
    utils: Any = types.ModuleType("transformers.utils")
    utils.is_offline_mode = str
    compat._transformers_utils(utils)
    utils.send_example_telemetry("run_mlm", {}, framework="pt")
    utils.check_min_version("99.0.0")
    assert utils.is_offline_mode is str


def raised(code: str) -> BaseException:
    try:
        exec(code)
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from transformers.utils import send_example_telemetry", "send_example_telemetry"),
        ("from transformers.utils import check_min_version as c; c('99.0')", "check_min_version"),
        ("from accelerate import DistributedType as D; D.TPU", "DistributedType.TPU"),
    ],
)
def test_a_missing_name_suggests_compat(code: str, name: str) -> None:
    advice = compat.suggestion(raised(code))
    assert advice is not None
    assert name in advice
    assert "--compat" in advice


def test_other_errors_suggest_nothing() -> None:
    assert compat.suggestion(raised("import nothing_of_that_name")) is None
    assert compat.suggestion(ValueError("send_example_telemetry")) is None


# -- errors ---------------------------------------------------------------------------------------


def test_a_scripts_traceback_is_its_own() -> None:
    model = blocks()
    with armed(backend="emulate"):
        with pytest.raises(RuntimeError) as caught:
            model(noise(4, 31))
        compat._hide_our_frames(caught.value)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not any(Path(file).name == "patch.py" for file in files)
    assert any(Path(file).name == "trap_models.py" for file in files)


def test_our_errors_are_one_line_and_exit_code_1(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(16, 16)))\n"
        "model(torch.ones(2, 16))\n"
    )
    done = child(script, tmp_path=tmp_path, backend="emulate")
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert line.startswith("fp8patch: error: the model is wrapped in nn.DataParallel")
    (status,) = done.status
    assert status["armed"]
    assert not status["ran_fp8"]


def test_a_script_keeps_its_own_ways(tmp_path: Path) -> None:
    """Arguments, `__main__`, exit code, its traceback to the letter; a status file is left."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())\n"
        "model(torch.ones(2, 16)).sum().backward()\n"
        "print(sys.argv[1:], __name__, sys.path[0])\n"
        "if sys.argv[1] == 'exit': sys.exit(3)\n"
        "model(torch.ones(2, 16, 5))\n"
    )
    ended = child(script, "exit", "--fp8", tmp_path=tmp_path, backend="emulate")
    assert ended.code == 3
    assert ended.out == f"['exit', '--fp8'] __main__ {tmp_path}\n"
    assert ended.status[0]["ran_fp8"]
    assert ended.status[0]["models"] == ["Sequential"]
    patched = child(script, "raise", tmp_path=tmp_path, backend="emulate")
    assert patched.code == 1
    assert "fp8patch/inject/patch.py" not in patched.err.replace(os.sep, "/")
    assert patched.err.splitlines()[-1].startswith("fp8patch: ") or "RuntimeError" in patched.err


def test_importing_it_stays_light() -> None:
    """Every process that imports torch pays for this, data-loader workers too."""
    code = (
        "import sys, torch; before = set(sys.modules); import fp8patch.inject.patch as i; i.arm()\n"
        "new = {m for m in set(sys.modules) - before if m.startswith('fp8patch.')}\n"
        "heavy = {'transformers', 'accelerate', 'wrapt', 'torch._dynamo'} & set(sys.modules)\n"
        "print(len(new), sorted(heavy & (set(sys.modules) - before)))\n"
    )
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split(" ", 1)[1].strip() == "[]", done.stdout
    # Seven files, and the folder of one, which is a docstring.
    assert int(done.stdout.split()[0]) <= 8, done.stdout
