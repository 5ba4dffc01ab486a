"""How a region reaches into backward, where checkpointed blocks are computed again.

The outermost training forward leaves a hook on its outputs. When backward begins, a gradient
reaches one of them and the hook opens the region again; backward's last act closes it. Neither can
be done by asking autograd whether a backward is running: a compiler can't trace that question.
"""

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch import input_cache
from fp8patch.regions import Region, set_region, state
from fp8patch.scaling import Bank


def arm_backward(output: Any, bank: Bank, region: Region) -> bool:
    """Open the region again when a gradient reaches `output` (a tensor, or a structure of them).

    Returns whether anything in `output` can have a gradient.
    """
    again = dataclasses.replace(region, reopened=True)
    hook = functools.partial(_reopen, weakref.ref(bank), again)
    tensors = differentiable(output)
    for tensor in tensors:
        tensor.register_hook(hook)
    return bool(tensors)


def differentiable(output: Any) -> list[Tensor]:
    """The tensors in what a model returns through which a gradient can reach it."""
    # Objects of unknown classes only where nothing else is: a cache of keys and values is one.
    return _differentiable(output, opaque=False) or _differentiable(output, opaque=True)


def _differentiable(output: Any, opaque: bool) -> list[Tensor]:
    found: list[Tensor] = []
    pending, seen = [output], dict[int, Any]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            # A leaf (CLIP's logit scale, say) would keep the hook for every backward to come.
            found.extend([value] if value.requires_grad and not value.is_leaf else [])
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, (type, nn.Module, ModuleType)):
            continue
        elif opaque or dataclasses.is_dataclass(value):
            pending.extend(getattr(value, "__dict__", {}).values())
    return found


def _reopen(bank: "weakref.ref[Bank]", region: Region, grad: Tensor) -> None:
    alive = bank()
    if alive is not None:
        state.in_backward.add(alive)
    previous = state.region
    if previous is not None and previous.reopened:
        return
    set_region(dataclasses.replace(region, previous=previous))
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(functools.partial(_finish_backward, previous))


def _finish_backward(previous: Region | None) -> None:
    set_region(previous)
    input_cache.forget()
    for bank in list(state.in_backward):
        bank.clock.saw_backward()
    state.in_backward.clear()
