"""What a run did: optimizer steps and their times, losses, and the files that tell others.

A step is a step of an optimizer that owns parameters of ours; where several do (one for each half
of a GAN, or of a model), the one that stepped most often counts. Nothing here waits for the GPU
while training goes on: times are CUDA events, losses are copied on its stream, and both are looked
at when they have arrived.
"""

import json
import os
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch.errors import Fp8PatchError
from fp8patch.inject.coverage import Coverage
from fp8patch.inject.series import Series
from fp8patch.output_files import publish
from fp8patch.readback import Readback

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


def write_json(path: str, values: dict[str, Any]) -> str:
    """Replace the file in one piece, a line a key; why that can't be done, or ""."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    return write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def write_text(path: str, text: str) -> str:
    """As `write_json`."""
    try:
        publish(Path(path), lambda partial: partial.write_text(text, encoding="utf-8"))
    except Fp8PatchError as error:
        return str(error)
    return ""


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
        self.losses = Series()
        # Seconds of every step; the first counts from the first forward.
        self.durations = Series()
        self._after_step = after_step
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._hook: Any = None
        self._marks: deque[Any] = deque()
        self._timed = 0
        self._new_losses: list[Tensor] = []
        self._unread: list[tuple[int, list[Tensor]]] = []
        self._underway: deque[tuple[list[tuple[int, int]], Readback]] = deque()
        self._refreshed = time.monotonic()
        self.device: torch.device | None = None

    # -- events -------------------------------------------------------------------------------

    def watch(self, model: nn.Module, device: torch.device) -> None:
        """Count the steps of optimizers that own a parameter of `model`."""
        self._models.append(weakref.ref(model))
        self.device = self.device or device
        for seen in self._optimizers.values():
            if seen[1] != 1:  # it may own parameters of this one
                seen[1] = seen[2] = 0
        if self._hook is None:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._hook = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        self.coverage.close()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def forward_begins(self) -> None:
        if not self._marks and not self._timed:
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

    def fetch(self) -> None:
        """Send for the losses of the steps so far."""
        self._refreshed = time.monotonic()
        if not self._unread:
            return
        steps = [(step, len(losses)) for step, losses in self._unread]
        every = [loss.float().reshape(1) for _, losses in self._unread for loss in losses]
        one_device = len({loss.device for loss in every}) == 1
        self._underway.append((steps, Readback([torch.cat(every)] if one_device else every)))
        self._unread = []

    def arrived(self, wait: bool = False) -> bool:
        """Take in what has come of times and losses; was that all that was sent for?"""
        while len(self._marks) > 1 and (wait or _passed(self._marks[1])):
            self._timed += 1
            self.durations.append(self._timed, _between(self._marks.popleft(), self._marks[0]))
        while self._underway and (wait or self._underway[0][1].ready()):
            steps, readback = self._underway.popleft()
            values = iter(torch.cat(readback.tensors()).tolist())
            for step, count in steps:
                self.losses.append(step, sum(next(values) for _ in range(count)) / count)
        return not self._underway

    def median_step(self) -> float | None:
        """Median of the steps after warm-up (of what there is, in a run that is all warm-up)."""
        times = self.durations.values()
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


def _passed(mark: Any) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _between(first: Any, second: Any) -> float:
    """Seconds."""
    if isinstance(first, float):
        return float(second - first)
    second.synchronize()
    return float(first.elapsed_time(second)) / 1000
