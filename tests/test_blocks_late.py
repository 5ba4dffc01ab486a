"""Weights of a model with compiled blocks are quantised where its first block is called."""

from typing import Any

import pytest
import torch
from test_blocks import Block, D, Model, compile_blocks, convert, equal, step
from torch import Tensor, nn

from fp8patch.modules import base

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Embedded(Model):
    """Something in FP8 runs before the blocks and after them, eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.events: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.events.append("begins")
        x = self.first(x) * self.scale
        self.events.append("blocks")
        for block in self.blocks:
            x = block(x)
        self.events.append("blocks are done")
        y: Tensor = self.last(x)
        return y


def trained(model: Any, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for at in range(steps):
        seen += step(model, torch.randn(4, 8, D, generator=torch.Generator().manual_seed(at)), None)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model(torch.ones(2, 8, D)))
    return seen


def build() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return convert(Embedded())


def test_once_a_step_and_between_what_is_before_and_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eager, compiled = build(), build()
    expected = trained(eager)
    stock = base.refresh_together

    def noted(members: Any, observe: bool) -> Any:
        if observe:
            compiled.events.append("weights")
        return stock(members, observe)

    monkeypatch.setattr(base, "refresh_together", noted)
    found, counter = compile_blocks(compiled)
    assert equal(trained(compiled), expected)
    assert counter.frame_count
    assert found.left == {}
    training = [e for e in " ".join(compiled.events).split("begins") if "weights" in e]
    assert [e.split() for e in training] == [["blocks", "weights", "blocks", "are", "done"]] * 4
    found.undo()
    compiled.events.clear()
    step(compiled, torch.randn(4, 8, D), None)
    assert compiled.events[0] == "weights"  # at the door, as without compiled blocks


def test_not_where_somebody_else_compiled_a_part_of_it() -> None:
    model = build()
    model.first.compile(backend="aot_eager")
    compile_blocks(model)
    assert not model._fp8_bank.late
    assert equal(trained(model), trained(build()))


def test_forgotten_weights_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first test relies on: nobody else quantises what a compiled block reads."""
    expected = trained(build())
    monkeypatch.setattr(type(build()._fp8_bank), "refresh_late", lambda bank: None)
    model = build()
    compile_blocks(model)
    assert not equal(trained(model), expected)


def test_the_block_of_the_other_tests_defers_too() -> None:
    model = convert(Model(Block))
    compile_blocks(model)
    assert model._fp8_bank.late
