"""Numbers on their way from a GPU to the host, which nobody waits for.

A read such as `tensor.tolist()` makes the host wait until the GPU has done all that it was given,
and the GPU then waits for the host. Here the copy is put on the current stream like any other work,
into pinned memory, and looked at when it has long been done.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Readback"]


class Readback:
    """Copies of `tensors` on the CPU, as they are at this place of their devices' current streams.

    On any other device than CUDA the copies are made at once.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._events: list[Any] = []
        self._copies = [self._copy(tensor.detach()) for tensor in tensors]

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=True)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensor.device))
        self._events.append(event)
        return host

    def ready(self) -> bool:
        """Have the copies arrived?"""
        return all(event.query() for event in self._events)

    def tensors(self) -> list[Tensor]:
        """The copies; waits for those that are still on their way."""
        for event in self._events:
            event.synchronize()
        return self._copies
