"""CUDA graphs of blocks: orders, and gradients in the middle of a model, on a CPU."""

from typing import Any

import pytest
import torch
from graph_machine import (
    LAYERS,
    Block,
    D,
    Machine,
    Model,
    Trace,
    both,
    data,
    gradients,
    training,
)
from quiet import DYNAMO
from torch import Tensor, nn

import fp8patch

pytestmark = DYNAMO


class Two(Model):
    """Two losses of one forward."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        u, v = (super(Two, self).forward(part)["hidden"] for part in (x, 0.3 * x.flip(0)))
        return {"a": u.square().mean(), "b": v.square().mean()}


@pytest.mark.parametrize("later", ["a, b", "b, a", "a + b"])
def test_the_order_of_backward(machine: Machine, later: str) -> None:
    """What forwards save shares memory in the order in which it was recorded."""

    def loop(model: Any) -> Trace:
        seen = []
        for step in range(10):
            losses = model(data(step))
            order = "a, b" if step < 6 else later
            if order == "a + b":
                (losses["a"] + losses["b"]).backward()
            else:
                for name in order.split(", "):
                    losses[name].backward()
            seen += gradients(model)
            model.zero_grad()
        return seen

    if later == "a, b":
        both(loop, Two)
        return
    with pytest.raises(RuntimeError, match="in another order than it was recorded in"):
        both(loop, Two)


class Turned(Model):
    """The order of the blocks changes; what they are given is copied, so that it does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        mask, x = torch.ones_like(x), x * self.scale
        for block in list(self.blocks)[:: -1 if self.calls > 5 else 1]:
            x = x + block(x * 1.0, mask)
        return {"loss": x.square().mean(), "hidden": x}


def test_the_order_of_blocks(machine: Machine) -> None:
    both(lambda model: training(model, steps=10), Turned)
    assert len(machine.graphs) == 4 * LAYERS


class Queried(Model):
    """A parameter is what a block is given, as it is or through a view."""

    def __init__(self, which: int, view: bool) -> None:
        super().__init__()
        self.query, self.which, self.view = nn.Parameter(torch.rand(D)), which, view

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask, x = torch.ones(D), x * self.scale
        query = self.query.view(1, D) if self.view else self.query
        for i, block in enumerate(self.blocks):
            x = block(x, query if i == self.which else mask)
        return {"loss": x.square().mean(), "hidden": x}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("which", [1, 2])
def test_a_parameter_as_an_argument(machine: Machine, which: int, view: bool) -> None:
    both(lambda model: training(model, micro=2), lambda: Queried(which, view))
    assert len(machine.graphs) == 2 * LAYERS


class Auxiliary(Model):
    """Blocks read what others made, of which there is a loss as well, for some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.decoder = nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        x = super().forward(x)["hidden"]
        y = x.detach() * self.scale
        for block in self.decoder:
            y = block(y, x)
        loss = y.square().mean()
        if self.calls < 5:
            loss = loss + x.abs().mean()
        return {"loss": loss, "hidden": y}


def test_a_loss_in_the_middle_is_switched_off(machine: Machine) -> None:
    both(lambda model: training(model, steps=9), Auxiliary)
    assert len(machine.graphs) == 4 * LAYERS


class Doubled(Model):
    """What one block has read, and another written, is changed in place."""

    doubles = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask, x = torch.ones_like(x), x * self.scale
        for i, block in enumerate(self.blocks):
            y = block(x, mask)
            if self.doubles and i == 1:
                with torch.no_grad():
                    x.mul_(2.0)
            x = y
        return {"loss": x.square().mean(), "hidden": x}


@pytest.mark.parametrize("graphs", [False, True])
def test_what_a_block_has_read_changes_before_backward(machine: Machine, graphs: bool) -> None:
    model = Doubled()
    backend = "inductor" if graphs else "aot_eager"
    fp8patch.compile_blocks(model, cuda_graphs=graphs, backend=backend)
    training(model, steps=4)
    model.doubles = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(data(0))["loss"].backward()


class Logging(Model):
    """A gradient in the middle is kept, every so often."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        mask, x = torch.ones_like(x), x * self.scale
        for i, block in enumerate(self.blocks):
            x = block(x, mask)
            if i == 1 and self.calls % 5 == 0:
                x.register_hook(self.kept.append)
        return {"loss": x.square().mean(), "hidden": x}


def test_gradients_in_the_middle_are_kept(machine: Machine) -> None:
    def loop(model: Any) -> Trace:
        seen = training(model, steps=12)
        return seen + [grad.clone() for grad in model.kept]

    both(loop, Logging)
