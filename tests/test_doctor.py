"""`fp8patch doctor`: what it concludes, from machines that are not here, and what it prints."""

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import run, write
from injected import python

from fp8patch import hardware
from fp8patch.cli.plan import foot, make_plan
from fp8patch.doctor import examine as doctor_module
from fp8patch.doctor import gemms, machine, peers
from fp8patch.doctor.advice import Advice, advise
from fp8patch.doctor.environment import find_interference
from fp8patch.doctor.types import CastTest, GemmTest, Outcome
from fp8patch.recipe import Recipe, builtin_names
from fp8patch.roofline import GPUS, resolve_gpu

ROOT = Path(__file__).resolve().parent.parent
FINE = Outcome(ok=True, ran=True, db=55.0)
CAST = CastTest(name="cast", by_row=None, outcome=FINE)


# -- machines that are not here -------------------------------------------------------------------


def advice(
    name: str,
    capability: tuple[int, int] | None,
    *,
    recipe: str = "delayed",
    broken: str = "",
    emulated: bool = True,
    cast: CastTest = CAST,
) -> Advice:
    """What `doctor` concludes on such a machine, where GEMMs of the kind `broken` fail."""
    where = hardware.classify("cpu" if capability is None else "cuda", name, capability)
    tests = []
    for kind in gemms.KINDS:
        outcome: Outcome | None = FINE
        if capability is None:
            outcome = None
        elif capability < kind.needs or kind.name == broken:
            outcome = Outcome(ok=False, ran=False, detail="cublas says no")
        tests.append(
            GemmTest(
                kind=kind.name,
                operands=kind.operands,
                needs=kind.needs,
                hardware=outcome,
                emulated=Outcome(ok=emulated, ran=True, db=55.0 if emulated else 3.0),
                rounding_db=28.0,
            )
        )
    gpu = resolve_gpu("auto", where)
    return advise(where, tests, [cast], Recipe.load(recipe), gpu)


def rows(found: Advice) -> dict[str, str]:
    return {row.recipe: row.runs for row in found.rows}


def test_an_h200_runs_all_recipes_and_uses_the_fastest() -> None:
    found = advice("NVIDIA H200", (9, 0))
    assert (found.backend, found.usable, found.gpu) == ("fp8", True, GPUS["h200"].label)
    assert rows(found) == dict.fromkeys(builtin_names(), "fp8")
    assert found.rows[0].recipe == "delayed"
    text = " ".join(found.sentences)
    assert text.startswith("delayed runs in FP8. NVIDIA H200 (compute capability 9.0) runs FP8")
    assert "No built-in recipe is predicted to be faster here." in text
    assert "GEMMs with 1x128 blocks run here" in text
    assert "MXFP8 needs compute capability 10.0" in text


def test_a_slower_recipe_is_told_which_is_faster() -> None:
    text = " ".join(advice("NVIDIA H200", (9, 0), recipe="rowwise").sentences)
    gains = [float(gain) for gain in re.findall(r"([\d.]+)x(?: over BF16|,? \(one)", text)]
    assert "delayed is predicted to be faster" in text
    assert "rowwise was asked for" in text
    assert gains[0] > gains[1]


def test_ada_has_no_rowwise() -> None:
    found = advice("NVIDIA L4", (8, 9))
    assert rows(found) == {
        "delayed": "fp8",
        "current": "fp8",
        "rowwise": "emulated",
        "rowwise_bf16_wgrad": "emulated",
    }
    rowwise = advice("NVIDIA L4", (8, 9), recipe="rowwise")
    assert (rowwise.backend, rowwise.usable) == ("off", True)
    assert "one a row needs 9.0" in rowwise.sentences[0]


def test_blackwell_runs_everything_and_mxfp8_is_no_excuse() -> None:
    found = advice("NVIDIA B200", (10, 0))
    assert "MXFP8" not in " ".join(found.sentences)


@pytest.mark.parametrize(("name", "capability"), [("CPU", None), ("NVIDIA A100", (8, 0))])
def test_without_fp8_hardware_emulation_is_left(
    name: str, capability: tuple[int, int] | None
) -> None:
    found = advice(name, capability)
    assert (found.backend, found.usable) == ("off", True)
    assert set(rows(found).values()) == {"emulated"}
    (sentence,) = found.sentences
    assert sentence.startswith("FP8 is off: ")
    assert "--emulate" in sentence


def test_a_gemm_that_fails_where_it_should_run_is_named() -> None:
    found = advice("NVIDIA H200", (9, 0), broken="per tensor")
    assert rows(found)["delayed"] == "emulated"
    assert rows(found)["rowwise"] == "fp8"
    assert found.backend == "fp8"  # what `auto` would choose, and fail
    assert (
        "delayed would be used in FP8, and its GEMM (per tensor) does not work here: cublas"
        in (found.sentences[0])
    )


@pytest.mark.parametrize("by_row", [None, False, True])
def test_a_kernel_that_fails_stops_the_recipes_that_use_it(by_row: bool | None) -> None:
    wrong = Outcome(ok=False, ran=True, detail="not equal to the oracle: values")
    cast = CastTest(name="cast", by_row=by_row, outcome=wrong)
    found = advice("NVIDIA H200", (9, 0), cast=cast)
    stopped = {name for name, runs in rows(found).items() if runs == "emulated"}
    by_rows = {name for name in builtin_names() if name.startswith("rowwise")}
    others = set(builtin_names()) - by_rows
    assert stopped == {None: by_rows | others, False: others, True: by_rows}[by_row]
    said = "cast: not equal to the oracle: values" in found.sentences[0]
    assert said is ("delayed" in stopped)


def test_nothing_runs_where_emulation_is_wrong_too() -> None:
    found = advice("CPU", None, emulated=False)
    assert not found.usable
    assert "Nothing runs here" in found.sentences[0]
    # A GPU that works needs no emulation.
    assert advice("NVIDIA H200", (9, 0), emulated=False).usable


def test_a_file_with_a_builtins_name_is_not_the_builtin(tmp_path: Path) -> None:
    (tmp_path / "delayed.yaml").write_text("base: rowwise\n")
    found = advice("NVIDIA L4", (8, 9), recipe=str(tmp_path / "delayed.yaml"))
    assert found.backend == "off"
    assert "one a row needs 9.0" in found.sentences[0]


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the process that tries other libraries, and without this machine's settings."""
    monkeypatch.setattr(peers, "start", lambda packages: nullcontext(None))
    nothing = find_interference({"HF_HOME": str(tmp_path)})
    monkeypatch.setattr(doctor_module, "find_interference", lambda: nothing)


@pytest.mark.usefixtures("alone")
def test_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert any(
        re.fullmatch(r"rowwise +E4M3 x E4M3 +9\.0 .*ok [\d.]+ dB +28\.\d dB", x) for x in lines
    )
    assert any(line.startswith("Kernels  ok: cast to E4M3, cast to E5M2,") for line in lines)
    assert not any("FAILED" in line for line in lines)
    assert not any("interfere" in line for line in lines)


@pytest.mark.usefixtures("alone")
def test_json_holds_what_was_tested(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "llama")
    result = run("doctor", model, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["usable"] is True
    assert [test["kind"] for test in found["gemms"]] == [kind.name for kind in gemms.KINDS]
    assert all(test["emulated"]["db"] > 45 for test in found["gemms"])
    plan = make_plan(str(model), Recipe())
    assert found["model"]["converted_gemms"] == plan.summary()["converted_gemms"]
    assert found["model"]["source"] == str(model)


@pytest.mark.usefixtures("alone")
def test_the_models_headline_is_that_of_plan(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "llama")
    shown = run("doctor", model, "--recipe", "rowwise").stdout
    planned = run("plan", model, "--recipe", "rowwise").stdout
    plan = make_plan(str(model), Recipe.load("rowwise"))
    assert foot(plan)[0].strip().startswith("[bold]")
    for line in foot(plan)[:1]:
        plain = re.sub(r"\[/?\w*\]", "", line).strip()
        assert plain in planned
        assert plain in shown


def test_a_wrong_model_or_recipe_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("examined")

    monkeypatch.setattr(doctor_module, "examine", never)
    (tmp_path / "cut.json").write_text('{"model_type": "llama", "hidden_si')
    (tmp_path / "unknown.json").write_text('{"model_type": "no_such_model"}')
    (tmp_path / "bad.yaml").write_text("overrides: {a: {margin: 99}}")
    (tmp_path / "weights.bin").write_bytes(b"\x80\x02" * 1000)
    files = [[str(tmp_path / name)] for name in ("cut.json", "unknown.json", "weights.bin")]
    wrong = [["./nowhere"], [str(tmp_path)], ["--recipe", "delayde"]]
    for words in (*files, *wrong, ["--recipe", str(tmp_path / "bad.yaml")]):
        result = run("doctor", *words)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("fp8patch: error: ")
        assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("alone")
def test_a_driver_without_a_torch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "driver", lambda: "580.95.05")
    monkeypatch.setattr(torch.version, "cuda", None)
    version = machine._version
    monkeypatch.setattr(machine, "_version", lambda x: None if x == "triton" else version(x))
    said = run("doctor").stdout
    assert "a PyTorch that is built for CUDA can use the GPU" in said
    assert said.count("not installed: on a GPU, casts") == said.count("not installed") == 1


def test_a_full_disk_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(peers.tempfile, "mkdtemp", full)
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["faults"] == []


@pytest.mark.usefixtures("alone")
def test_exit_1_where_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch whose FP32 product is wrong: there is no GPU here, and now no emulation either."""
    right = gemms.fp8_gemm
    monkeypatch.setattr(gemms, "fp8_gemm", lambda *a, **o: right(*a, **o) * 1.02)
    result = run("doctor")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "Nothing runs here, not even emulated" in result.stdout


def test_without_a_torch_that_loads(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: none')")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = python("-m", "fp8patch", "doctor", "some/model", cwd=tmp_path, env=env, code=1)
    assert "Nothing can run: PyTorch can't be used (libcudart.so.13: none)." in done.stdout
    assert "Traceback" not in done.stderr
