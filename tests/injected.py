"""Runs the scripts of `scripts/` in this process, or in processes of their own, patched or not."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8patch
from fp8patch.inject import patch as inject
from fp8patch.train_options import TrainOptions

SCRIPTS = Path(__file__).resolve().parent / "scripts"
BOOTSTRAP = Path(fp8patch.__file__).resolve().parent / "bootstrap"


@contextmanager
def armed(**options: Any) -> Iterator[Any]:
    """This process patched as `fp8patch.enable(**options)` does; yields the run."""
    hook = sys.excepthook
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16" if options.pop("env", True) else "no")
        inject.disarm()
        fp8patch.enable(**options)
        try:
            yield inject._run
        finally:
            inject.disarm()
            sys.excepthook = hook


def script(name: str, *args: object, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a script as `__main__` here; its globals. A fresh accelerate, fixed seeds."""
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    torch.manual_seed(0)
    patch.setattr(sys, "argv", [name, *map(str, args)])
    return runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")


def parameters(run: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run["model"].named_parameters()}


def moved(run: dict[str, Any]) -> set[str]:
    """Names of the parameters that training has changed."""
    return {n for n, p in parameters(run).items() if not torch.equal(p, run["start"][plain(n)])}


def plain(name: str) -> str:
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def train(
    *words: object, cwd: Path, env: dict[str, str] | None = None, code: int | None = 0
) -> "subprocess.CompletedProcess[str]":
    """`fp8patch train WORDS` as a user starts it, in `cwd`; it must end with `code`."""
    return python("-m", "fp8patch", "train", *words, cwd=cwd, env=env, code=code)


def python(
    *words: object, cwd: Path, env: dict[str, str] | None = None, code: int | None = 0
) -> "subprocess.CompletedProcess[str]":
    """`python WORDS`, in an environment that holds nothing of ours but the package."""
    ours = ("FP8PATCH_TRAIN", "FP8PATCH_DEBUG", "ACCELERATE_MIXED_PRECISION")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(BOOTSTRAP.parent.parent), **(env or {})}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=cwd,
        env=variables,
    )
    if code is not None:
        assert done.returncode == code, done.stderr
    return done


def stdlib_text(directory: Path) -> Path:
    """A file of 466 kB of ASCII that every Python has; runs read a part of it, and only once."""
    from pydoc_data.topics import topics

    path = directory / "text.txt"
    path.write_bytes("\n".join(topics[key] for key in sorted(topics)).encode("ascii", "replace"))
    return path


@dataclass
class Child:
    code: int
    out: str
    err: str
    status: list[dict[str, Any]] = field(default_factory=list)


def child(
    *command: object, tmp_path: Path, env: dict[str, str] | None = None, **options: Any
) -> Child:
    """`python COMMAND` as the parent of `fp8patch train` starts it, with the given options."""
    directory = tmp_path / "status"
    directory.mkdir(exist_ok=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BOOTSTRAP)}
    variables |= TrainOptions(status_dir=str(directory), **options).to_env()
    # The package under test, wherever it is installed from.
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=variables | (env or {}),
    )
    status = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    return Child(done.returncode, done.stdout, done.stderr, status)


class Wrapped(nn.Module):
    """A task that holds the model and its loss, as timm has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        return loss
