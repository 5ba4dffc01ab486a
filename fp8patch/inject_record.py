"""What a run did: optimizer steps and their times, losses, and the files that tell others.

A step is a step of an optimizer that owns parameters of ours; where several do (one for each half
of a GAN, or of a model), the one that stepped most often counts. Nothing here waits for the GPU
while training goes on: times are CUDA events, losses stay on the device, and both are read when
the report is refreshed.
"""

import json
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch import messages
from fp8patch.inject_coverage import Coverage

__all__ = ["Record", "Status", "place", "rank", "write_json", "write_text"]

# Steps whose time says little: observation, compilation, allocation.
_WARM_UP = 3
_REFRESH_SECONDS = 10.0


# What torch.distributed last said: scripts destroy their process group before they end.
_place = (-1, 1)


def place() -> tuple[int, int]:
    """This process's rank, and how many there are; (0, 1) where nobody counts."""
    global _place
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _place = (torch.distributed.get_rank(), torch.distributed.get_world_size())
    if _place[0] >= 0:
        return _place
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    return (int(found[0]), int(found[1])) if all(t.isdecimal() for t in found) else (0, 1)


def rank() -> int:
    """This process's rank in the run."""
    return place()[0]


def write_json(path: str, values: dict[str, Any]) -> bool:
    """Replace the file in one piece; False (and silent) where that can't be done."""
    return write_text(path, json.dumps(values, indent=1) + "\n")


def write_text(path: str, text: str) -> bool:
    """As `write_json`."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        Path(temporary).write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        return False
    return True


class Status:
    """This process's file in the parent's directory, which may be gone."""

    def __init__(self, directory: str) -> None:
        self._pid = os.getpid()
        self._path = os.path.join(directory, f"{self._pid}.json") if directory else ""
        self.values: dict[str, Any] = {
            "armed": False,
            "rank": 0,
            "backend": None,
            "ran_fp8": False,
            "steps": 0,
            "models": [],
        }

    def write(self, **changes: Any) -> None:
        self.values.update(changes, rank=rank())
        if self._path and os.getpid() == self._pid:
            write_json(self._path, self.values)


class Record:
    """Steps, times and losses of this process."""

    def __init__(self, wants_loss: bool, after_step: Callable[[], None]) -> None:
        self.coverage = Coverage()
        self.steps = 0
        self.wants_loss = wants_loss
        self.losses: list[tuple[int, float]] = []
        self._after_step = after_step
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._hook: Any = None
        self._marks: list[Any] = []
        self._durations: list[float] = []
        self._new_losses: list[Tensor] = []
        self._unread: list[tuple[int, list[Tensor]]] = []
        self._refreshed = time.monotonic()
        self.device: torch.device | None = None

    # -- events -------------------------------------------------------------------------------

    def watch(self, model: nn.Module, device: torch.device) -> None:
        """Count the steps of optimizers that own a parameter of `model`."""
        self._models.append(weakref.ref(model))
        self.device = self.device or device
        for seen in self._optimizers.values():
            seen[0] = 0
        if self._hook is None:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._hook = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        self.coverage.close()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def forward_begins(self) -> None:
        if not self._marks and not self._durations:
            self._mark()

    def saw_loss(self, loss: Tensor) -> None:
        self._new_losses.append(loss)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # [steps, owns a parameter of ours (0: not known, 1: yes, -1: no), looked at so often]
        seen = self._optimizers.setdefault(optimizer, [0, 0, 0])
        if seen[1] != 1:
            seen[2] += 1
            if seen[2] & (seen[2] - 1) == 0:
                seen[1] = 1 if self._owns(optimizer) else -1
            if seen[1] != 1:
                return
        if self.coverage.watching and self.coverage.totals()["calls"]:
            self.coverage.close()
        seen[0] += 1
        if seen[0] <= self.steps:
            return
        self.steps = seen[0]
        self._mark()
        if self._new_losses:
            self._unread.append((self.steps, self._new_losses))
            self._new_losses = []
        self._after_step()

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = [model for reference in self._models if (model := reference()) is not None]
        return any(id(p) in held for model in models for p in model.parameters())

    def _mark(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    # -- reading ------------------------------------------------------------------------------

    def due(self, every: int) -> bool:
        """Is it time to refresh the report?"""
        if self.steps == 1 or (every and self.steps % every == 0):
            return True
        return time.monotonic() - self._refreshed > _REFRESH_SECONDS

    def read(self) -> None:
        """Fetch times and losses from the device."""
        self._refreshed = time.monotonic()
        if len(self._marks) > 1:
            if isinstance(self._marks[-1], float):
                pairs = zip(self._marks, self._marks[1:], strict=False)
                self._durations += [b - a for a, b in pairs]
            else:
                self._marks[-1].synchronize()
                pairs = zip(self._marks, self._marks[1:], strict=False)
                self._durations += [a.elapsed_time(b) / 1000 for a, b in pairs]
            del self._marks[:-1]
        if self._unread:
            every = [loss.float().reshape(()) for _, losses in self._unread for loss in losses]
            home = every[0].device
            values = iter(torch.stack([loss.to(home) for loss in every]).tolist())
            for step, losses in self._unread:
                of_step = [next(values) for _ in losses]
                self.losses.append((step, sum(of_step) / len(of_step)))
            self._unread = []

    def step_seconds(self) -> list[float]:
        """Time of every step that was read; the first from the first forward on."""
        return self._durations

    def median_step(self) -> float | None:
        """Median of the steps after warm-up (of what there is, in a run that is all warm-up)."""
        times = self._durations
        late = times[_WARM_UP:] or times[1:]
        return statistics.median(late) if late else None

    def peak_memory(self) -> tuple[int, str]:
        """Bytes, and what they are: reserved on a GPU, resident on the CPU."""
        if self.device is not None and self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device), "reserved on the GPU"
        try:
            import resource
        except ImportError:  # Windows
            return 0, "unknown"
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return used * (1 if sys.platform == "darwin" else 1024), "resident in memory"


def ratios(banks: Iterable[Any]) -> dict[str, dict[str, float]]:
    """{role: {saturated, flushed, non_finite}} as parts of all elements cast; one device read a
    bank."""
    from fp8patch.numerics import FLUSHED, NON_FINITE, SATURATED, SEEN
    from fp8patch.slots import INPUT, ROLES

    sums = {role: [0.0] * 4 for role in ROLES}
    for bank in banks:
        try:
            rows = list(bank.numbers())
        except RuntimeError as error:  # the device is lost: the script has told why
            messages.once("no numbers", f"scales can't be read any more: {error}")
            continue
        for path, role, values in rows:
            if role == INPUT and path in bank.siblings:
                continue  # its leader's numbers
            for column, value in enumerate(values[2:6]):
                sums[ROLES[role]][column] += value
    columns = {"saturated": SATURATED, "flushed": FLUSHED, "non_finite": NON_FINITE}
    return {
        role: {name: counts[at] / counts[SEEN] for name, at in columns.items()}
        for role, counts in sums.items()
        if counts[SEEN]
    }
