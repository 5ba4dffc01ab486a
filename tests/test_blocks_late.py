"""Weights of a model with compiled blocks are quantised where something first asks for one."""

from functools import partial
from typing import Any

import pytest
import torch
from test_blocks import Block, D, Model, compile_blocks, convert, equal, step
from torch import Tensor, nn

import fp8patch
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


def deferring(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """As on a GPU, where all weights are one launch: here they are as many as there are."""
    stock, bank = base.refresh_together, model._fp8_bank

    def quantize(members: Any, observe: bool) -> None:
        model.events.append("weights")
        for module in stock(members, observe):
            module.refresh_weight(observe)

    def refresh_together(members: Any, observe: bool) -> Any:
        bank.defer(partial(quantize, members, observe))
        return []

    monkeypatch.setattr(base, "refresh_together", refresh_together)


def of_training(model: Any) -> list[list[str]]:
    calls = [e.split() for e in " ".join(model.events).split("begins")]
    return [call for call in calls if "weights" in call]


def test_once_a_step_and_after_what_is_before_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(build())
    model = build()
    deferring(monkeypatch, model)
    found, counter = compile_blocks(model)
    # Something in FP8 before the blocks asks for the weights; nothing else does.
    assert equal(trained(model), expected)
    assert counter.frame_count
    assert found.left == {}
    # (In the first step no weight is known yet.)
    assert of_training(model) == [["weights", "blocks", "blocks", "are", "done"]] * 3
    monkeypatch.setattr(model, "first", nn.Identity())
    model.events.clear()
    trained(model)
    assert of_training(model) == [["blocks", "weights", "blocks", "are", "done"]] * 4
    found.undo()
    model.events.clear()
    step(model, torch.randn(4, 8, D), None)
    assert model.events[0] == "weights"  # at the door, as without compiled blocks


def test_a_forward_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, model = trained(build()), build()
    deferring(monkeypatch, model)
    compile_blocks(model)

    def interrupt(module: Any, args: Any) -> None:
        if len(model.events) == 1:
            raise KeyboardInterrupt

    seen = trained(model, 2)
    hook = model.register_forward_pre_hook(lambda *_: model.events.clear())
    model.first.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(model, torch.randn(4, 8, D), None)
    hook.remove()
    model.events.append("goes on")
    assert len(seen) == len(expected) // 2
    assert model._fp8_bank.deferred
    step(model, torch.randn(4, 8, D), None)
    assert not model._fp8_bank.deferred


def test_not_where_somebody_else_compiled_a_part_of_it() -> None:
    model = build()
    model.first.compile(backend="aot_eager")
    compile_blocks(model)
    assert not model._fp8_bank.late
    assert equal(trained(model), trained(build()))


def test_forgotten_weights_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first test relies on: nobody else quantises what a compiled block reads."""
    expected = trained(build())
    model = build()
    deferring(monkeypatch, model)
    monkeypatch.setattr(type(model._fp8_bank), "catch_up", lambda bank: None)
    compile_blocks(model)
    assert not equal(trained(model), expected)


def test_the_block_of_the_other_tests_defers_too() -> None:
    model = convert(Model(Block))
    compile_blocks(model)
    assert model._fp8_bank.late


def on_a_gpu(model: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for at in range(5):
        x = torch.randn(4, 8, D, generator=torch.Generator().manual_seed(at)).cuda()
        with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast(backend="fp8"):
            y = model(x)
        y.float().square().mean().backward()
        seen += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Model, Embedded])
def test_all_weights_in_one_launch(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return convert(kind().cuda())

    expected = on_a_gpu(made())
    model = made()
    compile_blocks(model)
    waiting: list[int] = []
    stock = type(model._fp8_bank).catch_up
    noted = lambda bank: (waiting.append(len(bank.deferred)), stock(bank))[1]  # noqa: E731
    monkeypatch.setattr(type(model._fp8_bank), "catch_up", noted)
    assert equal(on_a_gpu(model), expected)
    assert max(waiting) == 1
    model = made()
    compile_blocks(model)
    monkeypatch.setattr(type(model._fp8_bank), "catch_up", lambda bank: None)
    assert not equal(on_a_gpu(model), expected)
