"""Who is told when an optimizer has stepped: one hook on all of torch's optimizers."""

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Listener(Protocol):
    """What is told."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, owned: set[int]) -> None:
        """`optimizer`, which holds the parameters with the ids `owned`, has stepped."""


_listeners: "weakref.WeakSet[Any]" = weakref.WeakSet()
_hooked = False


def tell_of_steps(listener: Listener) -> None:
    """From now on, and as long as it lives, `listener` is told of every step."""
    global _hooked
    if not _hooked:
        register_optimizer_step_post_hook(_after_step)
        _hooked = True
    _listeners.add(listener)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _listeners:
        return
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for listener in list(_listeners):
        listener.optimizer_stepped(optimizer, owned)
