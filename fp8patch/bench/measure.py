"""One contender's training step, and what is measured of it."""

import gc
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType

from fp8patch.bench.contenders import Contender, prepare
from fp8patch.bench.workloads import Workload

__all__ = ["TOP_KERNELS", "Session"]

TOP_KERNELS = 60
_GIB = 2**30
_CPU_REPEATS = 3


class Session:
    """A model that trains, built once, and its measurements. Times are in milliseconds.

    Args:
        device: `cuda`; or `cpu`, where FP8 is emulated and times say nothing about a GPU.
    """

    def __init__(self, workload: Workload, contender: Contender, device: str) -> None:
        self._device = device
        self._cuda = device == "cuda"
        self._workload = workload
        self._made = prepare(contender, workload, workload.model(device), device)
        self.model = self._made.model
        self.converted, self.predicted = self._made.converted, self._made.predicted
        if not self._cuda:
            self.predicted = None  # for another machine's GPU
        self._training = workload.training(self.model, device)
        self._optimizer = _optimizer(workload, self.model)
        self._result: Tensor | None = None
        # The peak that counts is that of training: a script has its weights before.
        self.release()

    def left_eager(self) -> dict[str, str]:
        """Blocks that should have been compiled and were not, with the reason."""
        return self._made.left_eager()

    def step(self) -> None:
        """One training step: forward, backward, optimizer."""
        self._made.before_step()
        enabled = self._workload.autocast
        with (
            torch.autocast(self._device, torch.bfloat16, enabled=enabled),
            self._made.region(),
        ):
            result = self._training.forward()
        self._training.backward(result)
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        else:
            self.model.zero_grad(set_to_none=True)
        self._result = result.detach()

    def warm_up(self, steps: int) -> None:
        """The first steps: observation, compilation, graph capture."""
        for _ in range(steps):
            self.step()
        self.wait()

    def times(self, steps: int, settle: int) -> list[float]:
        """Time from the end of one step to the end of the next, `steps` of them.

        Steps follow each other as in a training loop: the CPU may run ahead of the GPU. `settle`
        steps go before, untimed.
        """
        for _ in range(settle):
            self.step()
        if not self._cuda:
            return [self._timed_on_cpu() for _ in range(steps)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.step()
            mark.record()
        self.wait()
        return [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]

    def _timed_on_cpu(self) -> float:
        began = time.perf_counter()
        self.step()
        return 1e3 * (time.perf_counter() - began)

    def cpu_ms(self) -> float | None:
        """Median time until a step's Python returns, begun on an idle GPU; None on a CPU.

        An upper bound: once about a thousand launches are queued, the CPU waits for the GPU.
        """
        if not self._cuda:
            return None
        taken = []
        for _ in range(_CPU_REPEATS):
            self.wait()
            taken.append(self._timed_on_cpu())
        self.wait()
        return sorted(taken)[len(taken) // 2]

    def kernels(self) -> tuple[float | None, list[dict[str, Any]]]:
        """Summed time of all kernels of one step, and those with most of it; None on a CPU."""
        if not self._cuda:
            return None, []
        from torch.profiler import ProfilerActivity, profile

        self.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.step()
            self.wait()
        taken: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in profiler.events():
            # Ranges that somebody named are there too, and cover kernels that are counted already.
            if event.device_type != DeviceType.CUDA or event.is_user_annotation:
                continue
            taken[event.name] += event.device_time
            calls[event.name] += 1
        if not taken:
            return None, []
        top = [
            {"name": name, "calls": calls[name], "ms": round(us / 1e3, 4)}
            for name, us in taken.most_common(TOP_KERNELS)
        ]
        return sum(taken.values()) / 1e3, top

    def loss(self) -> float | None:
        """Mean of what the last forward returned: shows that it computed something."""
        return None if self._result is None else float(self._result.float().mean())

    def reserved_gib(self) -> float | None:
        """Peak memory that PyTorch took from the GPU since the last `release`."""
        return torch.cuda.max_memory_reserved() / _GIB if self._cuda else None

    def held_gib(self) -> float:
        """Memory taken now."""
        return torch.cuda.memory_reserved() / _GIB if self._cuda else 0.0

    def release(self) -> None:
        """Give what is free back to the GPU, for the others; begin a new peak."""
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def wait(self) -> None:
        """Until the GPU has done all it was given."""
        if self._cuda:
            torch.cuda.synchronize()


def _optimizer(workload: Workload, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if workload.optimizer == "none":
        return None
    if workload.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
