"""What compiled blocks take instead of slots, and that they write the same ones."""

import copy
from typing import Any

import pytest
import torch
from quiet import DYNAMO, FRESH
from test_blocks import Block, D, Model, build, compile_blocks, convert, equal, step
from torch import Tensor, nn

import fp8patch
from fp8patch.blocks.places import Places
from fp8patch.slots import ROLES, Place

pytestmark = [*DYNAMO, FRESH]


class Siblings(nn.Module):
    """Three read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.o(torch.tanh(self.q(x) * self.k(x)) + self.v(x))
        return y


class Crossing(nn.Module):
    """What one Linear reads is the same tensor in all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y: Tensor = x + self.own(x) + self.cross(context)
        return y


class Decoder(Model):
    def forward(self, x: Tensor) -> Tensor:
        context = torch.tanh(x)
        x = x * self.scale
        for block in self.blocks:
            x = block(x, context)
        return x


def train(model: Any, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for at in range(steps):
        x = torch.randn(4, 8, D, generator=torch.Generator().manual_seed(at))
        seen += step(model, x, optimizer)
    return seen


def numbers(model: Any) -> list[Any]:
    bank = model._fp8_bank
    return [bank.read(path, role).numbers() for path in bank.paths for role in range(len(ROLES))]


def places(model: Any) -> dict[str, Place | None]:
    found: Any = model.named_modules()
    return {path: m._fp8_place for path, m in found if hasattr(m, "_fp8_weight_q")}


def tensors_taken(counter: Any) -> int:
    (graph,) = counter.graphs
    return len(graph.graph.find_nodes(op="placeholder"))


def test_a_block_takes_three_tensors_for_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = build(Siblings)
    expected = train(eager)
    model = build(Siblings)
    _, counter = compile_blocks(model)
    assert equal(train(model), expected)
    assert numbers(model) == numbers(eager)
    assert counter.frame_count == 1
    first = [place for path, place in places(model).items() if path.startswith("blocks.0.")]
    assert len({id(tensor) for place in first if place for tensor in place.rows}) == 3
    assert None not in places(model).values()
    taken = tensors_taken(counter)

    monkeypatch.setattr(Places, "refresh", lambda self: None)
    torch._dynamo.reset()
    model = build(Siblings)
    _, counter = compile_blocks(model)
    assert equal(train(model), expected)
    assert set(places(model).values()) == {None}
    # Two inputs and four gradients have three tensors each.
    assert tensors_taken(counter) == taken - 3 + 3 * (2 + 4)


def test_a_wrong_place_would_be_seen() -> None:
    """What the first test relies on."""
    eager = build(Siblings)
    expected = train(eager)
    model = build(Siblings)
    compile_blocks(model)
    train(model, steps=2)
    for module in model.modules():
        place = vars(module).get("_fp8_place")
        if place is not None:
            module._fp8_place = place._replace(grad=place.input, input=place.grad)
    found = train(model)
    assert numbers(model) != numbers(eager)
    assert not equal(found, expected)


def test_a_slot_of_another_block_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    eager = convert(Decoder(Crossing))
    model = copy.deepcopy(eager)
    expected = train(eager)
    _, counter = compile_blocks(model)
    assert equal(train(model), expected)
    assert numbers(model) == numbers(eager)
    assert counter.frame_count == 1
    found = places(model)
    assert model._fp8_bank.siblings == {f"blocks.{at}.cross": "blocks.0.cross" for at in (1, 2)}
    assert all((place is None) == path.endswith("cross") for path, place in found.items())


def test_places_follow_the_slots(tmp_path: Any) -> None:
    eager, model = build(Siblings), build(Siblings)
    _, counter = compile_blocks(model)
    for each in (eager, model):
        train(each, steps=2)
    state = dict(eager._fp8_bank.state())
    for each in (eager, model):
        each._fp8_bank.restore(state)
    assert set(places(model).values()) == {None}  # until the blocks are called again
    assert equal(train(model), train(eager))
    assert numbers(model) == numbers(eager)
    assert None not in places(model).values()
    assert counter.frame_count == 1

    other = copy.deepcopy(model)
    assert set(places(other).values()) == {None}
    before = numbers(model)
    train(other)
    assert numbers(model) == before


def test_blocks_that_are_converted_again() -> None:
    model = build(Block)
    compile_blocks(model)
    train(model)
    fp8patch.revert_model(model)
    assert not any("_fp8_place" in vars(module) for module in model.modules())
    eager = convert(copy.deepcopy(model))
    assert equal(train(convert(model)), train(eager))
    assert numbers(model) == numbers(eager)
    assert None not in places(model).values()
