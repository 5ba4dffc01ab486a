"""Which optimizers step the weights of a bank, or other parameters of its model."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["Owners"]


class Owners:
    """Holds models and optimizers weakly."""

    def __init__(self) -> None:
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._met = False

    def attach(self, root: nn.Module) -> None:
        """`root` is (a part of) the model: its parameters tell which optimizer is ours."""
        if root not in self._parts:
            self._parts.add(root)

    def stepped(
        self, optimizer: torch.optim.Optimizer, owned: set[int], members: Iterable[Any]
    ) -> bool:
        """`optimizer`, which holds the parameters with the ids `owned`, has stepped: is it one of
        ours? Those of `members` (modules of the bank) that it owns are told."""
        ours, owner = False, weakref.ref(optimizer)
        for module in members:
            # (nn.Module's own search for an attribute takes longer than all of this.)
            weight = module._parameters.get("weight")
            if weight is None:
                weight = module.weight
            if id(weight) in owned:
                module._fp8_weight_state.took_step(weight, owner)
                ours = True
        if not ours:
            ours = any(id(p) in owned for part in list(self._parts) for p in part.parameters())
        if ours:
            self._optimizers.add(optimizer)
            self._met = True
        return ours

    @property
    def gone(self) -> bool:
        """There were some, and none is left."""
        return self._met and not self._optimizers
