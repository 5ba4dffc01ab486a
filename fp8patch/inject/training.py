"""What is going to train: parameters with gradients, and the optimizers that hold them."""

import weakref
from typing import Any

import torch
from torch import nn

__all__ = ["has_optimizer", "is_trainable", "track_optimizers", "trains"]

_optimizers: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()


def track_optimizers() -> None:
    """Know every optimizer from now on. A model may be evaluated before its first step."""
    original: Any = torch.optim.Optimizer.add_param_group
    if hasattr(original, "_fp8patch_wrapped"):
        return

    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        _optimizers.add(self)

    add_param_group._fp8patch_wrapped = True  # type: ignore[attr-defined]
    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def has_optimizer(module: nn.Module) -> bool:
    """Does a known optimizer hold a parameter of `module`?"""
    held = {id(p) for o in list(_optimizers) for g in o.param_groups for p in g["params"]}
    return any(id(p) in held for p in module.parameters())


def is_trainable(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def trains(module: nn.Module) -> bool:
    """Is this call part of training `module`, or of evaluating what is going to train?

    A metric's model has parameters that ask for gradients, too; but it is called without, and no
    optimizer knows it.
    """
    if not is_trainable(module):
        return False
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return True
    return has_optimizer(module)
