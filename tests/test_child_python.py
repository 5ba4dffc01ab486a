"""Processes that we start ourselves: their own modules, whatever lies in the user's folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fp8patch
from fp8patch import child_python
from fp8patch.bench.process import WORKER

# Python's own names, and those of our folders.
NAMES = ("inspect", "types", "plan", "bench", "fp8patch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder whose modules end a process that imports them."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the user')")
    return tmp_path


def python(*command: str, cwd: Path, **options: Any) -> Any:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)


def test_the_users_files_are_not_imported(folder: Path) -> None:
    say = child_python.command("fp8patch.messages", "note")
    assert python(*say, "hello", cwd=folder).stderr == "fp8patch: hello\n"
    # What the files are for: where the folder comes first, this does not work.
    bare = [part for part in say if part != "-P"]
    assert "of the user" in python(*bare, "hello", cwd=folder, env={}).stderr


def test_the_package_is_the_one_that_asks(tmp_path: Path) -> None:
    """A copy that is on nobody's path, as a checkout where another one is installed."""
    package = tmp_path / "fp8patch"
    shutil.copytree(Path(fp8patch.__file__).parent, package)
    with (package / "messages.py").open("a") as file:
        file.write("\ndef where(): note(__file__)\n")
    ask = "from fp8patch.child_python import command; import subprocess, sys; "
    ask += "sys.exit(subprocess.run(command('fp8patch.messages', 'where'), cwd='/').returncode)"
    done = python(sys.executable, "-c", ask, cwd=tmp_path)
    assert done.stderr == f"fp8patch: {package / 'messages.py'}\n"


def test_bench_and_ranks_run_beside_them(folder: Path) -> None:
    spec = {"workload": {}, "contender": "bf16", "device": "cpu"}
    # The workload is wrong, which is seen after everything was imported.
    done = python(*WORKER, json.dumps(spec), cwd=folder, input="")
    assert json.loads(done.stdout)["error"].startswith(("KeyError", "TypeError"))
    (folder / "scripts").mkdir()
    (folder / "scripts" / "ours.py").write_text("import torch; print('a rank')")
    start = (sys.executable, "-P", "-m", "fp8patch", "train", "--off", "--nproc", "2")
    done = python(*start, "scripts/ours.py", cwd=folder)
    assert done.stdout == "a rank\na rank\n", done.stderr
