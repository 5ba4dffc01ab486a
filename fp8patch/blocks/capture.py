"""CUDA's side of recording: a graph of what a function launches, and tensors over its memory."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["alias", "record", "recorded"]

_T = TypeVar("_T")

_recorded = 0
# Memory that all graphs on a device share, the stream that they are recorded on, and a graph.
_pools: dict[torch.device, tuple[Any, Any, Any]] = {}


def record(function: Callable[[], _T], device: torch.device) -> tuple[Any, _T]:
    """(CUDA graph, result) of what `function` launches."""
    global _recorded
    with torch.cuda.device(device):
        if device not in _pools:
            place = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            # A pool ends with the last of its graphs, and could not be recorded into again. This
            # one stays.
            keeper, _ = _capture(lambda: torch.zeros(1, device=device), *place)
            _pools[device] = *place, keeper
        found = _capture(function, *_pools[device][:2])
    _recorded += 1
    return found


def _capture(function: Callable[[], _T], pool: Any, stream: Any) -> tuple[Any, _T]:
    graph = torch.cuda.CUDAGraph()
    how = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    with torch.cuda.graph(graph, **how):
        result = function()
    return graph, result


def recorded() -> int:
    """How many graphs were recorded in this process."""
    return _recorded


def alias(described: dict[str, Any]) -> Tensor:
    """A tensor over memory that it does not own."""
    where = (described[name] for name in ("data_ptr", "device", "nbytes"))
    storage = torch._C._construct_storage_from_data_pointer(*where)
    found: Tensor
    found = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(described, storage)
    return found
