"""What the tests of the plan share: a module under a name, and classes that a rule may misread."""

from typing import Any

import torch
from torch import nn

from fp8patch.plan.model import Decision, plan_model


def holder(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def decision(module: nn.Module, name: str = "layer", **options: Any) -> Decision:
    """The decision on one module, in a model with nothing else."""
    return plan_model(holder(**{name: module}), **options)[name]


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class ChannelsFirst(nn.LayerNorm):
    pass


class RMS(nn.Module):
    """Not called a norm, and one all the same."""

    def __init__(self, width: int, eps: float = 1e-5, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.unit_offset = eps, unit_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * (self.weight + self.unit_offset)


class GatedRMSNorm(RMS):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x


class LayerScale(nn.Module):
    """One vector, no children: everything of an RMSNorm but the norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class DuckLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
