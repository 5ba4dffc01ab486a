"""CUDA graphs of blocks: what is recorded too often, and what is let go again, on a CPU."""

import gc

import pytest
import torch
from graph_machine import (
    LAYERS,
    Block,
    D,
    Machine,
    Model,
    both,
    training,
)
from quiet import DYNAMO
from torch import Tensor, nn

import fp8patch
from fp8patch import messages
from fp8patch.blocks import memory, replay

pytestmark = DYNAMO


class Moving(Block):
    extra: Tensor

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask) + self.extra


class Movings(Model):
    """Blocks read tensors that are swapped in for every step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Moving() for _ in range(LAYERS)])
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            block.extra = torch.ones(D)
            self.held.append(block.extra)
        return super().forward(x)


def test_what_moves_is_given_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "_MOST_CALLS", 20)
    monkeypatch.setattr(messages, "_seen", set())
    both(lambda model: training(model, steps=12), Movings)
    assert not machine.graphs
    assert "lies elsewhere in every step" in capsys.readouterr().err


def test_sessions_of_models_that_are_gone_make_room(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "_MOST_SESSIONS", 2)
    monkeypatch.setattr(messages, "_seen", set())
    for _ in range(4):
        model = Model()
        found = fp8patch.compile_blocks(model, cuda_graphs=True)
        training(model, steps=4)
        assert memory.step().calls == LAYERS
        found.undo()
        del model, found
        torch._dynamo.reset()
        gc.collect()
    both(lambda model: training(model, steps=12, lengths=(4, 5, 6, 7)))
    assert len(machine.graphs) == (4 + 2) * 2 * LAYERS
    assert "CUDA graphs of 2 steps are kept" in capsys.readouterr().err


def test_what_does_not_run_any_more_is_let_go(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_STALE", 5)
    model = Model()
    found = fp8patch.compile_blocks(model, cuda_graphs=True)
    for _ in range(6):
        training(model, steps=8)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    (structure,) = found._graphs.structures  # type: ignore[union-attr]
    assert sum(len(each._records) for each in structure._replayed) <= 2 * LAYERS


def test_renewals_end_and_come_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "_MOST_RENEWALS", 2)
    monkeypatch.setattr(memory, "_STEPS_A_RENEWAL", 40)
    monkeypatch.setattr(messages, "_seen", set())
    model = Model()
    fp8patch.compile_blocks(model, cuda_graphs=True)

    def calls_after_a_weight_moved() -> int:
        weight = model.blocks[1].up.weight
        weight.data = weight.data.clone()
        training(model, steps=4)
        return memory.step().calls

    training(model, steps=4)
    calls = [calls_after_a_weight_moved() for _ in range(4)]
    assert calls[0] == LAYERS > calls[-1]
    assert "changes too often" in capsys.readouterr().err
    training(model, steps=40)
    assert memory.step().calls == LAYERS


def test_nothing_is_held_once_the_blocks_are_given_back(machine: Machine) -> None:
    model = Model()
    found = fp8patch.compile_blocks(model, cuda_graphs=True)
    training(model, steps=2)  # the second is recorded
    session = memory.step().session
    assert session is not None
    assert session.kept
    found.undo()
    assert not session.kept
