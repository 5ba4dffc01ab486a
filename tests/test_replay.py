"""Blocks as CUDA graphs of ours, on a CPU (graph_machine.py): what is recorded, replayed when."""

from typing import Any

import pytest
import torch
from graph_machine import (
    LAYERS,
    Block,
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
from fp8patch.blocks import capture, memory, replay

pytestmark = DYNAMO


def test_steps(machine: Machine) -> None:
    both(training)
    # The first forward of a shape loads, the second records; the others replay these.
    assert len(machine.graphs) == 2 * LAYERS


@pytest.mark.parametrize("to_none", [True, False])
def test_accumulation(machine: Machine, to_none: bool) -> None:
    both(lambda model: training(model, micro=3, to_none=to_none))
    assert len(machine.graphs) == 2 * LAYERS


def test_without_the_rescue_gradients_are_lost(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would show."""
    monkeypatch.setattr(memory, "alive", set)
    with pytest.raises(AssertionError):
        both(lambda model: training(model, micro=3))


def test_lengths(machine: Machine) -> None:
    both(lambda model: training(model, steps=12, lengths=(5, 7, 5, 3)))
    assert len(machine.graphs) == 3 * 2 * LAYERS


def test_two_forwards_before_backward_and_one_without(machine: Machine) -> None:
    def loop(model: Any) -> Trace:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        for step in range(8):
            a, b = model(data(step))["loss"], model(data(100 + step))["loss"]
            (a + 2 * b).backward()
            if step % 2:
                seen.append(model(data(step))["loss"].detach().clone())
            seen += [a.detach().clone(), b.detach().clone(), *gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    both(loop)
    assert len(machine.graphs) == 2 * LAYERS


def test_evaluations_with_gradients_do_not_pile_up(machine: Machine) -> None:
    model = Model()
    fp8patch.compile_blocks(model, cuda_graphs=True)
    training(model)
    losses: list[Tensor] = []
    for i in range(12):
        losses = [*losses[-2:], model(data(i))["loss"]]
        assert bool(losses[0].isfinite())
    del losses
    recorded = len(machine.graphs)
    training(model, steps=2)
    assert len(machine.graphs) == recorded


def test_what_is_kept_stays(machine: Machine) -> None:
    """Outputs, gradients, and what a hook on a block was given."""

    def loop(model: Any) -> Trace:
        inner: list[Tensor] = []
        if hasattr(model.blocks[1], "_compiled_call_impl"):
            model.blocks[1].register_forward_hook(lambda m, args, out: inner.append(out.detach()))
        kept: list[Any] = []
        at_once = []
        for step in range(8):
            output = model(data(step))
            if step == 5:  # later, and of another length: these are kept
                kept.append(inner[-1])
                at_once.append(inner[-1].clone())
            inner.clear()
            kept.append(output["hidden"].detach())
            at_once.append(kept[-1].clone())
            output["loss"].backward()
            kept += (grads := [p.grad for p in model.parameters()])
            at_once += [grad.clone() for grad in grads]
            model.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(kept, at_once, strict=True))
        return at_once

    both(loop)


@pytest.mark.usefixtures("no_donations")
def test_a_graph_cannot_go_back_twice(machine: Machine) -> None:
    model = Model()
    found = fp8patch.compile_blocks(model, cuda_graphs=True)
    for step in range(4):
        assert found.ran_graphs == (step > 1)
        model.zero_grad()
        loss = model(data(step))["loss"]
        loss.backward(retain_graph=True)
        before = gradients(model)
        if step < 1:
            loss.backward()  # no graphs yet
    assert len(machine.graphs) == 2 * LAYERS
    with pytest.raises(RuntimeError, match="a second time.*without CUDA graphs"):
        loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(model), strict=True))


@pytest.mark.usefixtures("no_donations")
def test_what_is_held_for_longer_is_not_written(machine: Machine) -> None:
    """Here, by what a backward keeps, once."""
    model = Model()
    fp8patch.compile_blocks(model, cuda_graphs=True)
    training(model, steps=3)
    loss = model(data(0))["loss"]
    with pytest.raises(RuntimeError, match="would overwrite what somebody still holds"):
        loss.backward(retain_graph=True)


class Decoder(Model):
    """Every block reads one more tensor, which has a gradient of all; some blocks are left out."""

    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.drops, self.calls = drops, 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        other = torch.sigmoid(x * self.scale)
        x = x * self.scale
        for i, block in enumerate(self.blocks):
            if not (self.drops and (self.calls + i) % 4 == 0):
                x = block(x, other)
        return {"loss": x.square().mean(), "hidden": x}


@pytest.mark.parametrize("drops", [False, True])
def test_an_argument_of_all_blocks(machine: Machine, drops: bool) -> None:
    both(lambda model: training(model, steps=16), lambda: Decoder(drops))


class Adding(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, x.new_ones(())) + mask


class Edited(Model):
    """What a block is given changes in place in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adding() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = torch.ones_like(x)
        x = x * self.scale
        for block in self.blocks:
            x = block(x, mask)
            mask.mul_(0.5)
        return {"loss": x.square().mean(), "hidden": x}


def test_an_argument_that_changes_in_place(machine: Machine) -> None:
    both(training, Edited)
    assert len(machine.graphs) == 2 * LAYERS


class Checkpointed(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = torch.ones_like(x)
        x = x * self.scale
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=True)
        return {"loss": x.square().mean(), "hidden": x}


def test_checkpoints(machine: Machine) -> None:
    both(lambda model: training(model, micro=2), Checkpointed)
    assert len(machine.graphs) > 2 * LAYERS


def test_weights_that_move_are_recorded_anew(machine: Machine) -> None:
    def loop(model: Any) -> Trace:
        seen = training(model, steps=4)
        weight = model.blocks[1].up.weight
        weight.data = weight.data.clone() * 2
        return seen + training(model, steps=6)

    both(loop)
    # All of them, twice: what is replayed together was recorded together.
    assert len(machine.graphs) == 4 * LAYERS


def test_a_changed_module_is_seen(machine: Machine) -> None:
    """By Dynamo's guards, which run as ever."""

    def loop(model: Any) -> Trace:
        seen = training(model, steps=4)
        for block in model.blocks:
            block.norm.eps = 0.5
        seen += training(model, steps=4)
        for p in model.blocks.parameters():
            p.requires_grad_(p.dim() == 1)
        return seen + training(model, steps=4)

    both(loop)


def test_what_cannot_be_recorded_runs_without(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(function: Any, device: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(capture, "record", refuse)
    both(training)
    assert "(Block): no CUDA graph can be recorded, operation not" in capsys.readouterr().err


def test_who_holds_what_was_handed_out(machine: Machine) -> None:
    recorded = torch.ones(4)
    place = memory.Result(recorded)
    given = place.hand_out(recorded)
    del recorded
    assert not place.is_free()
    del given
    assert place.is_free()

    # (What it lay in is gone by now; nobody reads it.)
    for _ in range(3):
        given = place.hand_out()
        assert not place.is_free()
        view = given.view(2, 2)
        del given
        assert not place.is_free()
        del view
        assert place.is_free()


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ((torch.ones(2), 3), (torch.ones(2),), "its tensors are on cpu, which is not one GPU"),
        ((torch.ones(2), None), (), "it takes a NoneType"),
        ((torch.ones(2),), (torch.ones(2), 3), "it returns a int"),
        ((torch.ones(2),), (torch.ones(2, device="meta"),), "its tensors are on cpu, meta, which"),
    ],
)
def test_what_cannot_be_a_graph(inputs: Any, outputs: Any, said: str) -> None:
    assert str(replay._hindrance(inputs, outputs)).startswith(said)


def test_a_block_that_cannot_be_one_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "_hindrance", lambda inputs, outputs: "it returns a int")
    model = Model()
    found = fp8patch.compile_blocks(model, cuda_graphs=True)
    training(model)
    assert not machine.graphs
    assert not found.ran_graphs
    err = capsys.readouterr().err
    assert err.count("no CUDA graph can be recorded, it returns a int") == 1
    assert "blocks.0 to blocks.2 (Block)" in err
