"""The parent of a run: options, environment, verdict; and the bootstrap in every process."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_stub import Bench, make_bench

from fp8patch import launch, launch_signals
from fp8patch.errors import Fp8PatchError
from fp8patch.train_options import ENV, TrainOptions

BOOTSTRAP = str(launch.BOOTSTRAP)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


# -- the options ------------------------------------------------------------------------------


def test_options_survive_the_environment() -> None:
    options = TrainOptions(
        backend="emulate", recipe="rowwise", only=("*.mlp",), skip=("a", "b"), include=("c",),
        tokens=7, roots=("Bert*",), compat=True, report="/r.json", log_every=3, check=True,
        sets_bf16=True, track=True, status_dir="/tmp/ü",
    )  # fmt: skip
    assert TrainOptions.from_env(options.to_env()) == options
    assert TrainOptions.from_env({}) is None
    assert dataclasses.replace(options) == options


@pytest.mark.parametrize("text", ["x", "[]", "{", '{"tokens": 0}', '{"frob": 1}', '{"only": [1]}'])
def test_options_of_something_else_are_refused(text: str) -> None:
    with pytest.raises(Fp8PatchError):
        TrainOptions.from_env({ENV: text})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"backend": "fp9"}, "'fp9'"),
        ({"skip": ("",)}, "skip: the pattern ''"),
        ({"only": ("a b",)}, "dotted module paths"),
        ({"roots": ("models/Bert",)}, "class names"),
        ({"tokens": 0}, "tokens: 0"),
        ({"log_every": -1}, "log_every: -1"),
    ],
)
def test_wrong_options_say_what_is_allowed(values: dict[str, Any], text: str) -> None:
    with pytest.raises(Fp8PatchError, match=text):
        TrainOptions(**values)


# -- the environment --------------------------------------------------------------------------


def test_three_variables_and_no_more() -> None:
    before = {"HOME": "/h", "PYTHONPATH": "/a::/b"}
    child = launch.child_environment(TrainOptions(status_dir="/s"), before)
    assert {name for name in child if child[name] != before.get(name)} == {
        "PYTHONPATH", "ACCELERATE_MIXED_PRECISION", ENV,
    }  # fmt: skip
    assert child["PYTHONPATH"] == f"{BOOTSTRAP}:/a::/b"
    assert child["ACCELERATE_MIXED_PRECISION"] == "bf16"
    options = TrainOptions.from_env(child)
    assert options is not None
    assert options.sets_bf16
    assert options.status_dir == "/s"


@pytest.mark.parametrize("path", [None, ""])
def test_no_empty_entry_comes_into_the_path(path: str | None) -> None:
    before = {} if path is None else {"PYTHONPATH": path}
    assert launch.child_environment(TrainOptions(), before)["PYTHONPATH"] == BOOTSTRAP


def test_the_users_mixed_precision_stays() -> None:
    child = launch.child_environment(TrainOptions(), {"ACCELERATE_MIXED_PRECISION": "fp16"})
    assert child["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert not json.loads(child[ENV])["sets_bf16"]


def test_accelerates_own_fp8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Fp8PatchError, match="ACCELERATE_MIXED_PRECISION=FP8 is set"):
        launch.child_environment(TrainOptions(), {"ACCELERATE_MIXED_PRECISION": "FP8"})
    for words in (["--mixed_precision", "fp8"], ["--mixed-precision=fp8"]):
        with pytest.raises(Fp8PatchError, match="Accelerate would convert"):
            launch.launcher_command(["accelerate", "launch", *words, "s.py"])
    launch.launcher_command(["accelerate", "launch", "--mixed_precision", "bf16", "s.py"])
    launch.child_environment(TrainOptions(), {"ACCELERATE_FP8_BACKEND": "TE"})
    assert "warning: ACCELERATE_FP8_BACKEND is set" in capsys.readouterr().err


def test_a_run_inside_a_run_counts_the_inner_options() -> None:
    outer = launch.child_environment(TrainOptions(tokens=1), {"PYTHONPATH": "/a"})
    inner = launch.child_environment(TrainOptions(tokens=2), outer)
    assert inner["PYTHONPATH"] == f"{BOOTSTRAP}:/a"
    options = TrainOptions.from_env(inner)
    assert options is not None
    assert options.tokens == 2


def test_an_impossible_installation_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "BOOTSTRAP", Path("/a:b/fp8patch/bootstrap"))
    with pytest.raises(Fp8PatchError, match="Install it in another folder"):
        launch.child_environment(TrainOptions(), {})


# -- the command ------------------------------------------------------------------------------


def test_commands(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.touch()
    run = launch.script_command(str(script), ["--fp8"])
    assert run == [sys.executable, str(script), "--fp8"]
    assert launch.script_command("-", []) == [sys.executable, "-"]
    torchrun = launch.script_command(str(script), ["a"], nproc=2)
    assert torchrun[1:4] == ["-P", "-m", "torch.distributed.run"]
    assert torchrun[-4:] == ["--nproc-per-node", "2", str(script), "a"]


def test_a_program_beside_our_python_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found, *_ = launch.launcher_command([Path(sys.executable).name, "-c", ""])
    assert Path(found).parent == Path(sys.executable).parent


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    with pytest.raises(Fp8PatchError, match="no such script"):
        launch.script_command("nope.py", [])
    with pytest.raises(Fp8PatchError, match="put -- before it: fp8patch train -- env"):
        launch.script_command("env", [])
    with pytest.raises(Fp8PatchError, match="neither on PATH"):
        launch.launcher_command(["torchrunn"])
    with pytest.raises(Fp8PatchError, match="leave out the --"):
        launch.launcher_command([str(tmp_path / "s.py")])


# -- the verdict ------------------------------------------------------------------------------

RAN = {"armed": True, "ran_fp8": True}
IDLE = {"armed": True, "ran_fp8": False}
FALLEN_BACK = {**IDLE, "backend": "off"}


@pytest.mark.parametrize(
    ("backend", "reports", "code", "expected", "said"),
    [
        ("fp8", [RAN, IDLE], 0, 0, ""),
        ("fp8", [IDLE], 0, 1, "nothing ran in FP8: of 1 armed process, none"),
        ("emulate", [IDLE, IDLE], 0, 1, "of 2 armed processes, none"),
        ("fp8", [], 0, 1, "because of --fp8"),
        ("auto", [], 0, 0, "warning: nothing was patched"),
        ("auto", [IDLE], 0, 0, "warning: nothing ran in FP8"),
        ("auto", [FALLEN_BACK], 0, 0, ""),
        ("auto", [FALLEN_BACK, IDLE], 0, 0, ""),  # a launcher, such as torchrun
        ("auto", [FALLEN_BACK, {**IDLE, "backend": "fp8"}], 0, 0, "nothing ran in FP8"),
        ("bf16", [IDLE], 0, 0, ""),
        ("bf16", [], 0, 0, "nothing was patched"),
        ("fp8", [], 3, 3, ""),
        ("fp8", [], -9, -9, ""),
        ("fp8", ["{", "[]", '{"armed": false}'], 0, 1, "nothing was patched"),
    ],
)
def test_exit_code_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: Any, reports: list[Any],
    code: int, expected: int, said: str,
) -> None:  # fmt: skip
    for pid, report in enumerate(reports):
        text = report if isinstance(report, str) else json.dumps(report)
        (tmp_path / f"{pid}.json").write_text(text)
    found = launch._read_status(tmp_path)
    assert launch._verdict(code, TrainOptions(backend=backend), found) == expected
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == bool(said)


# -- the bootstrap ----------------------------------------------------------------------------


def python(bench: Bench, code: str, *paths: str, armed: bool = True) -> str:
    """stdout of `code` in a child with the bootstrap, with `paths` behind it on PYTHONPATH."""
    path = os.pathsep.join(paths) or bench.environment["PYTHONPATH"]
    environment = {**bench.environment, "PYTHONPATH": path}
    if armed:
        options = TrainOptions(status_dir=str(bench.folder))
        environment = launch.child_environment(options, environment)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_process_without_torch_pays_nothing(bench: Bench, tmp_path: Path) -> None:
    code = "import sys; print(sys.path, sorted(sys.modules))"
    empty = str(tmp_path)
    bare, injected = (python(bench, code, empty, armed=armed) for armed in (False, True))
    # Nothing but the file itself; and the path is as it would be.
    assert injected.replace("'sitecustomize', ", "") == bare.replace("'sitecustomize', ", "")


def test_loading_the_bootstrap_takes_milliseconds(bench: Bench, tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.modules.pop('sitecustomize', None); "
        f"sys.path.insert(0, {BOOTSTRAP!r}); start = time.process_time(); import sitecustomize; "
        "print(time.process_time() - start)"
    )
    assert min(float(python(bench, code, str(tmp_path))) for _ in range(3)) < 0.005


def test_it_arms_once_after_torch_and_leaves_no_trace(bench: Bench) -> None:
    code = """
import importlib.util, sys
count = len(sys.meta_path)
assert importlib.util.find_spec("torch").name == "torch"  # is_torch_available
import torch
assert len(sys.meta_path) == count - 1 and "exec_module" not in vars(torch.__loader__)
assert type(torch.__loader__).__name__ == "SourceFileLoader"
importlib.reload(torch)
"""
    assert python(bench, code) == ""
    assert bench.armed == ["-c"]


def test_a_torch_that_fails_fails_as_it_does_bare(bench: Bench) -> None:
    (bench.folder / "site" / "torch.py").write_text("import os; os.environ['BROKEN']")
    code = """
import os
for broken in (True, False):
    if not broken:
        os.environ["BROKEN"] = "no"
    try:
        import torch
    except KeyError as error:
        print(error)
"""
    assert python(bench, code) == "'BROKEN'\n"
    assert bench.armed == ["-c"]


def test_the_users_sitecustomize_runs_in_its_own_name(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "sitecustomize.py"
    file.write_text("print(__name__, __file__)")
    code = "import sys; print(sys.modules['sitecustomize'].__file__)"
    assert python(bench, code, str(tmp_path)) == f"sitecustomize {file}\n{file}\n"


def test_a_sitecustomize_that_raises_is_reported_as_bare(bench: Bench) -> None:
    (bench.folder / "site" / "sitecustomize.py").write_text("raise ValueError('mine')")
    code = "import sys; print('sitecustomize' in sys.modules)"
    bare, injected = (python(bench, code, armed=armed) for armed in (False, True))
    assert "ValueError: mine" in bare
    assert injected == bare


def test_it_does_nothing_for_who_imports_it() -> None:
    code = "import sys; n = len(sys.meta_path); import fp8patch.bootstrap.sitecustomize; "
    code += "assert len(sys.meta_path) == n"
    environment = {**os.environ, ENV: "{}"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert not (launch.BOOTSTRAP / "__init__.py").exists()


def test_a_process_that_cannot_load_us_goes_on(bench: Bench) -> None:
    broken = bench.folder / "site" / "sitecustomize.py"
    broken.write_text("import sys\nsys.modules['fp8patch.inject.patch'] = None")
    out = python(bench, "import torch; print('goes on')")
    assert "goes on" in out
    assert "warning: this process is not patched" in out
    assert "ModuleNotFoundError" in out


# -- where nothing tells who sent a signal ----------------------------------------------------


def test_other_systems_run_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(signal, "sigtimedwait")
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    try:
        command = [sys.executable, "-c", "raise SystemExit(3)"]
        assert launch_signals.run_command(command, dict(os.environ), tmp_path) == 3
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGHUP, before[1])
