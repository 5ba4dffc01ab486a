"""`fp8patch train`: its command line, and runs of it beside the same script run bare."""

import os
import pty
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launch_stub import Bench, make_bench
from typer.testing import CliRunner

from fp8patch import cli, launch
from fp8patch.train_options import TrainOptions


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


# -- the command line -------------------------------------------------------------------------


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Parses a line beside a script s.py, and gives the command and the options."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    seen: list[Any] = []

    def run(command: list[str], options: TrainOptions) -> int:
        seen[:] = [command, options]
        return 0

    monkeypatch.setattr(launch, "run", run)

    def parsed(line: str) -> tuple[list[str], TrainOptions]:
        result = CliRunner().invoke(cli.app, ["train", *line.split()])
        assert result.exit_code == 0, result.output
        return seen[0], seen[1]

    return parsed


@pytest.mark.parametrize(
    ("line", "backend", "rest"),
    [
        ("s.py", "auto", []),
        ("--fp8 s.py", "fp8", []),
        ("--emulate s.py --fp8 --recipe x -h", "emulate", ["--fp8", "--recipe", "x", "-h"]),
        ("--no-fp8 s.py -- --off --", "bf16", ["--", "--off", "--"]),
        ("--off s.py s.py", "off", ["s.py"]),
    ],
)
def test_what_follows_the_script_is_its_own(
    parse: Any, line: str, backend: str, rest: list[str]
) -> None:
    command, options = parse(line)
    assert command == [sys.executable, "s.py", *rest]
    assert options.backend == backend


def test_after_dashes_comes_any_command(parse: Any) -> None:
    command, options = parse("--fp8 --only s.py -- env --fp8 -- s.py")
    assert [Path(command[0]).name, *command[1:]] == ["env", "--fp8", "--", "s.py"]
    assert options.only == ("s.py",)


def test_options_reach_the_run(parse: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: rowwise\n")
    _, options = parse(
        "-r mine.yaml --only a --only b --skip c --include d --tokens 9 --roots E --compat "
        "--report r.json --log-every 5 --track --compile --cuda-graphs --check s.py"
    )
    assert options == TrainOptions(
        recipe=str(tmp_path / "mine.yaml"), only=("a", "b"), skip=("c",), include=("d",), tokens=9,
        roots=("E",), compat=True, report=str(tmp_path / "r.json"), log_every=5, check=True,
        compile=True, cuda_graphs=True, track=True,
    )  # fmt: skip
    assert parse("-r rowwise s.py")[1].recipe == "rowwise"
    command, _ = parse("--nproc 2 s.py --nproc 3")
    assert command[-4:] == ["2", "s.py", "--nproc", "3"]


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("", 2, "Missing argument 'SCRIPT'"),
        ("--", 2, "Missing argument 'SCRIPT'"),
        ("--frob s.py", 2, "--frob"),
        ("--fp8 --off s.py", 2, "--fp8 and --off exclude each other"),
        ("--off --check s.py", 2, "--check could not stop"),
        ("--off --compile s.py", 2, "nothing could be compiled"),
        ("--nproc 2 -- torchrun s.py", 2, "torchrun --nproc-per-node 2"),
        ("--nproc 0 s.py", 2, "--nproc"),
        ("--tokens 0 s.py", 2, "--tokens"),
        ("nope.py", 1, "nope.py: no such script"),
        ("--recipe delayd s.py", 1, "Did you mean 'delayed'?"),
        ("--recipe none.yaml s.py", 1, "no such recipe file"),
        ("--skip a/b s.py", 1, "skip: the pattern 'a/b' can match nothing"),
        ("--report /no/such/r.json s.py", 1, "--report: /no/such/r.json is in no folder"),
        ("--report . s.py", 1, "is a folder"),
        (f"--report {'n' * 300} s.py", 1, "File name too long"),
    ],
)
def test_a_mistake_is_said_before_anything_starts(
    parse: Any, line: str, code: int, text: str
) -> None:
    result = CliRunner().invoke(cli.app, ["train", *line.split()])
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split())


def test_a_report_replaces_no_file_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "s.py"
    script.write_text("precious = True\n")
    result = CliRunner().invoke(cli.app, ["train", "--report", "s.py", "s.py"])
    assert result.exit_code == 1
    assert "--report: s.py exists, and is no report" in " ".join(result.stderr.split())
    assert script.read_text() == "precious = True\n"


# -- beside the bare script -------------------------------------------------------------------

SEES = """
import os, sys, torch
hidden = {"PYTHONPATH", "FP8PATCH_TRAIN", "ACCELERATE_MIXED_PRECISION"}
print(sys.argv, sys.path, __name__, __file__, os.getcwd(), os.getpgrp() == os.getpgid(os.getppid()))
print(sorted((k, v) for k, v in os.environ.items() if k not in hidden))
print(sys.stdin.read(), sys.executable, sys.flags, os.get_inheritable(0))
"""


def test_the_script_sees_what_it_sees_bare(bench: Bench) -> None:
    script = bench.script(SEES)
    args = ("--fp8", "--", "-x")
    bare = bench.run(sys.executable, script, *args, stdin="hello")
    injected = bench.run(*bench.train("--fp8", script, *args), stdin="hello")
    assert injected.returncode == 0, injected.stderr
    assert "hello" in bare.stdout
    # Bare, the parent is this test, in another process group.
    assert injected.stdout == bare.stdout.replace(" False\n", " True\n", 1)
    assert injected.stderr == bare.stderr
    assert bench.armed == ["s.py"]


ENDS = {
    "raises": "def f():\n    import torch\n    raise ValueError('mine')\nf()",
    "exits": "import sys, torch; sys.exit(3)",
    "says why": "import sys, torch; sys.exit('because')",
    "syntax": "import torch\nprint('x'\n",
    "no torch": "raise SystemExit(4)",
    "killed": "import os, signal, torch; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal, torch; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupted": "import os, signal, torch; os.kill(os.getpid(), signal.SIGINT)",
}


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS.keys())
def test_it_ends_as_the_bare_script_ends(bench: Bench, text: str) -> None:
    script = bench.script(text)
    bare = bench.run(sys.executable, script)
    injected = bench.run(*bench.train("--fp8", script))
    assert bare.returncode != 0
    assert (injected.returncode, injected.stdout) == (bare.returncode, bare.stdout)
    assert injected.stderr == bare.stderr


def test_off_changes_nothing_bit_for_bit(bench: Bench) -> None:
    code = "import os, sys; sys.stdout.buffer.write(open('/proc/self/environ', 'rb').read()); "
    code += "print(os.getppid(), os.getpgrp() == os.getpid(), sys.argv, sorted(sys.modules))"
    script = bench.script(code)
    bare = bench.run(sys.executable, script, "a")
    off = bench.run(*bench.train("--off", script, "a"))
    assert (off.returncode, off.stdout, off.stderr) == (0, bare.stdout, "")
    assert bench.armed == []
    shell = bench.run(*bench.train("--off", "--", "sh", "-c", "kill -PIPE $$"))
    assert shell.returncode == -signal.SIGPIPE


def test_a_python_that_ignores_us_is_said(bench: Bench) -> None:
    script = bench.script("print('ran')")
    for flag, code in (("--fp8", 1), ("--no-fp8", 0)):
        done = bench.run(*bench.train(flag, "--", sys.executable, "-I", script))
        assert (done.returncode, done.stdout) == (code, "ran\n")
        assert "warning: nothing was patched" in done.stderr


def test_modules_and_shells_and_open_files_are_reached(bench: Bench) -> None:
    (bench.folder / "pkg").mkdir()
    bench.script("import sys, torch; print(open(sys.argv[1]).read())", "pkg/train.py")
    line = f"exec {sys.executable} -m pkg.train <(echo handed on)"
    done = bench.run(*bench.train("--fp8", "--", "bash", "-c", line))
    assert (done.returncode, done.stdout) == (0, "handed on\n\n")
    assert len(bench.armed) == 1
    bench.environment["IDLE"] = "1"
    done = bench.run(*bench.train("--fp8", "--", sys.executable, "-m", "pkg.train", "/dev/null"))
    assert done.returncode == 1
    assert "nothing ran in FP8" in done.stderr


# -- signals ----------------------------------------------------------------------------------

WAITS = """
import os, signal, sys, time, torch
got = []
for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
    signal.signal(getattr(signal, name), lambda number, _: got.append(number))
print("ready", os.getpid(), flush=True)
while len(got) < int(sys.argv[1]):
    time.sleep(0.01)
time.sleep(0.3)  # for one too many
print(sorted(signal.Signals(number).name for number in got))
"""


def test_what_is_sent_to_the_parent_arrives_once(bench: Bench) -> None:
    script = bench.script(WAITS)
    with bench.start(*bench.train("--fp8", script, "3")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            time.sleep(0.1)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "['SIGINT', 'SIGTERM', 'SIGUSR1']\n")


@pytest.mark.parametrize("interrupts", [1, 99])
def test_ctrl_c_of_a_terminal_arrives_once_and_a_second_one_kills(
    bench: Bench, interrupts: int
) -> None:
    script = bench.script(WAITS)
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", "--wait", *bench.train("--fp8", script, str(interrupts))]
    with bench.start(*command, stdin=theirs) as process:
        os.close(theirs)
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        for _ in range(interrupts):
            if process.poll() is not None:
                break
            os.write(ours, b"\x03")
            time.sleep(0.7)
        out, err = process.communicate(timeout=60)
    os.close(ours)
    if interrupts == 1:
        assert (process.returncode, out) == (0, "['SIGINT']\n"), err
    else:
        # setsid says 137 where the parent died of SIGKILL, as the script did.
        assert process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
        assert "interrupted twice: killing the run" in err
        assert gone(pid)


def test_no_rank_survives_an_interrupted_launcher_or_a_killed_parent(bench: Bench) -> None:
    bench.script("import os, time, torch; print(os.getpid(), flush=True); time.sleep(60)", "r.py")
    script = bench.script("""
        import subprocess, sys, torch
        subprocess.Popen([sys.executable, "r.py"], start_new_session=True).wait()
    """)
    with bench.start(*bench.train(script)) as process:
        assert process.stdout is not None
        rank = int(process.stdout.readline())
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "left processes behind, which are ended now: 1." in err
    assert gone(rank)
    with bench.start(*bench.train("r.py")) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
    assert gone(child)


def gone(pid: int) -> bool:
    """Whether a process is over, or is so within a few seconds; a zombie is."""
    for _ in range(200):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        if stat.rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.02)
    return False


# -- launchers, with the real torch -----------------------------------------------------------

RANKS = """
import os, sys, torch, torch.distributed as dist
assert sys.argv[1:] == ["--fp8"]
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("ranks", int(total), os.environ.get("ACCELERATE_MIXED_PRECISION"))
dist.destroy_process_group()
"""
SPAWNS = """
import subprocess, sys, torch, torch.multiprocessing as mp

def rank(index):
    print(index, flush=True)

if __name__ == "__main__":
    subprocess.run([sys.executable, "-c", "import json"], check=True)
    mp.spawn(rank, nprocs=2)
"""


def real(folder: Path) -> Bench:
    return make_bench(folder, real_torch=True)


def test_torchrun_arms_every_rank(tmp_path: Path) -> None:
    bench = real(tmp_path)
    script = bench.script(RANKS)
    done = bench.run(*bench.train("--emulate", "--nproc", "2", script, "--fp8"))
    assert (done.returncode, done.stdout) == (0, "ranks 2 bf16\n"), done.stderr
    # Two ranks, and the launcher, which imports torch as well.
    assert bench.armed.count("s.py") == 2


def test_accelerate_launch_arms_its_script(tmp_path: Path) -> None:
    bench = real(tmp_path)
    script = bench.script("import torch, sys; print('ran', sys.argv[1:])")
    words = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", script, "--fp8")
    done = bench.run(*bench.train("--emulate", "--", *words))
    assert (done.returncode, done.stdout) == (0, "ran ['--fp8']\n"), done.stderr
    assert "s.py" in bench.armed


def test_spawned_children_are_armed_and_others_are_not(tmp_path: Path) -> None:
    bench = real(tmp_path)
    script = bench.script(SPAWNS)
    done = bench.run(*bench.train("--emulate", script))
    assert done.returncode == 0, done.stderr
    # The two may write their lines into one another.
    assert sorted("".join(done.stdout.split())) == ["0", "1"]
    assert len(bench.armed) == 3
