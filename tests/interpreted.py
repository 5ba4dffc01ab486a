"""Kernels on a CPU, under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def check_interpreted(script: str) -> None:
    """Run `script`, which may import tests and has to print "done" in the end.

    In a process of its own: the interpreter is chosen when Triton is imported.
    """
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(TESTS), str(TESTS.parent), environment.get("PYTHONPATH", "")]
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "done"
