"""What is installed here, and what it needs: GPUs, driver, versions.

Packages are read off their metadata; whether they can be imported is found out in another process
(peers.py). torch is asked only when the caller knows that it can be imported.
"""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from fp8patch.doctor.types import Gpu, Package

__all__ = ["MINIMUM", "PEERS", "driver", "gpus", "packages", "python_version"]

# Least versions of what fp8patch cannot do without; a test compares them with pyproject.toml.
MINIMUM = {"torch": (2, 11), "transformers": (5,)}
# What a training script brings along. Not needed, but their faults are the user's.
PEERS = ("accelerate", "torchao", "peft", "trl", "transformer_engine")
_TRITON = "triton"
_LOADED = Path("/proc/driver/nvidia/version")
_SMI_SECONDS = 10


def python_version() -> str:
    """Of the interpreter, as 3.12.1."""
    return ".".join(map(str, sys.version_info[:3]))


def packages() -> list[Package]:
    """The versions that matter, whether they suffice, and what is missing and needed."""
    found = [_package(name) for name in (*MINIMUM, _TRITON, *PEERS)]
    return [each for each in found if each.version is not None or each.problem]


def _package(name: str) -> Package:
    version = _version(name)
    least = MINIMUM.get(name)
    problem = ""
    if version is None and least is not None:
        problem = f"not installed; fp8patch needs {_dotted(least)} or newer"
    elif version is None and name == _TRITON:
        problem = "not installed: on a GPU, casts to FP8 would run as plain PyTorch, slowly"
    elif least is not None and version is not None and _numbers(version) < least:
        problem = f"too old; fp8patch needs {_dotted(least)} or newer"
    return Package(name=name, version=version, problem=problem)


def _version(name: str) -> str | None:
    # Triton comes under several names, with the same module in them.
    names = (name, "pytorch-triton", "triton-windows") if name == _TRITON else (name,)
    for each in names:
        try:
            return metadata.version(each)
        except metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def gpus() -> list[Gpu]:
    """All CUDA GPUs that PyTorch sees; empty without any, for whatever reason."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Gpu(
                index=index,
                name=str(properties.name),
                capability=(int(properties.major), int(properties.minor)),
                memory=int(properties.total_memory),
            )
        )
    return found


def driver() -> str | None:
    """Version of NVIDIA's driver, as 580.95.05; None where there is none."""
    try:
        # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build …"
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _LOADED.read_text())
    except OSError:
        found = None
    if found is not None:
        return found[1]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None
