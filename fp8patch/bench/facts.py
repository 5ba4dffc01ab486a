"""What a figure was measured with: GPU, versions, commit."""

import importlib.metadata
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from fp8patch import __version__

__all__ = ["commit", "facts"]

_LIBRARIES = ("triton", "transformers", "torchao", "timm", "transformer_engine")


def facts(device: str) -> dict[str, Any]:
    """GPU and versions of everything that a contender may come from, as seen in this process."""
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else f"none ({platform.machine()} CPU)"
    found = {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "fp8patch": __version__,
        "python": platform.python_version(),
    }
    return {**found, **{name: _version(name) for name in _LIBRARIES}}


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def commit() -> str | None:
    """The commit of the checkout that this package runs from; None where it is installed."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if changed else head


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
    )
    done.check_returncode()
    return done.stdout.strip()
