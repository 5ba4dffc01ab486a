"""Faults of installed libraries, reproduced before they are named.

In a process of its own: importing torchao patches Inductor, an Accelerator is one for the process,
and a library that does not load may take its process along. That process has no GPU, and as long as
it runs, the caller has other things to test.

What is tested here was found in accelerate 1.15 with torchao 0.18, and in transformers 5.24. A
later release may have mended it; then nothing is seen, and nothing is said.
"""

import importlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8patch import child_python
from fp8patch.doctor.types import Fault, Package

__all__ = ["reproduce", "start"]

_SECONDS = 90
_CHILD = child_python.command("fp8patch.doctor.peers", "reproduce")


class Reproduction:
    """The process, while it runs."""

    def __init__(self, process: "subprocess.Popen[bytes]", file: Path) -> None:
        self._process, self._file = process, file

    def result(self) -> tuple[list[Fault], dict[str, str]]:
        """(faults seen, {library: why it can't be imported}); waits for the process to end.

        A process that dies, or takes too long, has seen what it had written down by then.
        """
        try:
            self._process.wait(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return [], {}
        return [Fault(**fault) for fault in found["faults"]], found["broken"]


@contextmanager
def start(packages: list[Package]) -> Iterator[Reproduction | None]:
    """Start the process, and end it with the block; None where nothing that it tests is there."""
    installed = {package.name for package in packages if package.version is not None}
    if "torch" not in installed or not installed & {"transformers", "accelerate", "torchao"}:
        yield None
        return
    try:
        folder = Path(tempfile.mkdtemp(prefix="fp8patch-doctor-"))
    except OSError:  # no room, no right to: the rest can be found out all the same
        yield None
        return
    file = folder / "found.json"
    process = None
    try:
        process = _start(file)
        yield None if process is None else Reproduction(process, file)
    finally:
        if process is not None:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _start(file: Path) -> "subprocess.Popen[bytes] | None":
    try:
        return subprocess.Popen(
            [*_CHILD, str(file)],
            env=_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's, FP8 settings included, without what would start DeepSpeed, FSDP or a GPU."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("ACCELERATE_", "FSDP_", "FP8PATCH_", "LOCAL_RANK", "WORLD_SIZE"))
        or name.startswith("ACCELERATE_FP8_")
    }
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


# -- in the process -------------------------------------------------------------------------------


def reproduce(file: str) -> None:
    """Import the libraries, try every fault, and keep writing down what was found."""
    found: dict[str, Any] = {"faults": [], "broken": {}}
    for name in ("transformers", "accelerate", "torchao"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # a part of it, or something that it needs
                found["broken"][name] = _line(error)
        except Exception as error:
            found["broken"][name] = _line(error)
        _write(file, found)
    for attempt in _ATTEMPTS:
        try:
            fault = attempt()
        except Exception:  # another release, in which there is nothing of the kind to try
            continue
        if fault is not None:
            found["faults"].append(fault)
            _write(file, found)


def _write(file: str, found: dict[str, Any]) -> None:
    Path(f"{file}.part").write_text(json.dumps(found), encoding="utf-8")
    os.replace(f"{file}.part", file)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _versions(*names: str) -> str:
    from importlib import metadata

    return " with ".join(f"{name} {metadata.version(name)}" for name in names)


def _weights_left_behind() -> dict[str, str] | None:
    """Accelerate's FP8 through torchao: which weights does one step of the optimizer move?"""
    import torch
    from accelerate import Accelerator
    from torch import nn

    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    torch.manual_seed(0)
    # The first and the last Linear stay as they are.
    model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    inside = accelerator.unwrap_model(model)
    if not any(type(module).__module__.startswith("torchao") for module in inside.modules()):
        return None
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    before = {name: _values(p).clone() for name, p in inside.named_parameters()}
    accelerator.backward(model(torch.randn(16, 16)).float().square().mean())
    optimizer.step()
    left = [
        name
        for name, p in inside.named_parameters()
        if p.grad is not None and id(p) not in held and torch.equal(_values(p), before[name])
    ]
    if not left:
        return None
    return {
        "libraries": _versions("accelerate", "torchao"),
        "fault": "Accelerate's own FP8 (mixed_precision='fp8') wraps the weights anew and leaves "
        "the optimizer the old ones, so that FP8 layers never train; the loss falls all the same",
        "seen": f"{len(left)} of {len(before)} parameters of a small model had gradients and did "
        f"not move in a step: {', '.join(left)}",
        "way_around": "let fp8patch do the FP8: `fp8patch train`, with bf16 for Accelerate; or set "
        "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false",
    }


def _values(parameter: Any) -> Any:
    """What a parameter holds, also where torchao has wrapped it."""
    return getattr(parameter, "_tensor", parameter).detach()


def _ragged_blocks() -> dict[str, str] | None:
    """transformers, reading a block-wise FP8 weight whose rows are no multiple of the block."""
    import torch
    from transformers.integrations import finegrained_fp8

    from fp8patch import numerics

    reader: Any = finegrained_fp8.Fp8Dequantize

    torch.manual_seed(0)
    rows = torch.logspace(-1, 1, 192).unsqueeze(1)
    weight = torch.randn(192, 128) * rows
    values, scale_inv = numerics.quantize_blockwise(weight, numerics.E4M3, (128, 128))
    stored = {"weight": [values], "weight_scale_inv": [scale_inv]}
    read = reader(None).convert(stored)["weight"].float()
    right = numerics.dequantize(values, scale_inv.repeat_interleave(128, 0)[:192])
    wrong = int(((read - right).norm(dim=1) > 0.1 * right.norm(dim=1)).sum())
    if not wrong:
        return None
    return {
        "libraries": _versions("transformers"),
        "fault": "block-wise FP8 checkpoints are read wrongly, without an error, where a weight's "
        "rows or columns are no multiple of 128 (on GPUs without FP8, and with dequantize=True)",
        "seen": f"{wrong} of 192 rows of a weight of 192x128 came back with another row's scale",
        "way_around": "train from the high-precision checkpoint, and export with per-channel "
        "scales (compressed-tensors)",
    }


_ATTEMPTS: tuple[Callable[[], dict[str, str] | None], ...] = (_weights_left_behind, _ragged_blocks)
