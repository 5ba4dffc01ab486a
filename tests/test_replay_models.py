"""What models and scripts may do whose blocks run as CUDA graphs, on a CPU (graph_machine.py)."""

import copy
import inspect
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
from fp8patch import messages
from fp8patch.blocks import capture

pytestmark = DYNAMO


class Siamese(Model):
    """One encoder, two inputs: every block is called twice."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        u, v = (super(Siamese, self).forward(part)["hidden"] for part in (x, 0.3 * x.flip(0)))
        return {"loss": (u * v).mean() + u.square().mean(), "hidden": u}


class Looped(Model):
    """A stack that runs twice (shared layers)."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask, h = torch.ones_like(x), x * self.scale
        for _ in range(2):
            for block in self.blocks:
                h = block(h + x, mask)
        return {"loss": h.square().mean(), "hidden": h}


@pytest.mark.usefixtures("no_donations")
@pytest.mark.parametrize("build", [Siamese, Looped])
def test_blocks_that_are_called_twice(machine: Machine, build: type[Model]) -> None:
    both(training, build)
    assert len(machine.graphs) == 4 * LAYERS


class DiffersLater(Model):
    """All blocks were given one mask, and each has its own from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        mask, x = torch.ones_like(x), x * self.scale
        for block in self.blocks:
            x = block(x, mask)
            if self.calls > 3:
                mask = mask * 0.5
        return {"loss": x.square().mean(), "hidden": x}


def test_one_argument_becomes_many(machine: Machine) -> None:
    both(lambda model: training(model, steps=8), DiffersLater)
    # Recorded once more, for what is the case then.
    assert len(machine.graphs) == 4 * LAYERS


class Counting(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = super().forward(x, x.new_ones(()))
        mask.add_(y.detach().abs().sum())
        return y


class Counted(Model):
    """Blocks write to what they are given (how often an expert was chosen)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counting() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        count, x = torch.zeros(()), x * self.scale
        for block in self.blocks:
            x = block(x, count)
        return {"loss": x.square().mean(), "hidden": count}


def test_arguments_that_are_written_to(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop(model: Any) -> Trace:
        counts = [model(data(step))["hidden"].clone() for step in range(3)]
        return counts + training(model) + [model(data(0))["hidden"].clone()]

    both(loop, Counted)
    assert "no CUDA graph can be recorded, it writes to what it is given" in capsys.readouterr().err


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value, self.factor = value, 1 + value


class Boxed(Block):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        return super().forward(x * mask.factor, mask.value)


class Boxes(Model):
    """Arguments in an object that nobody looks into, which lives as long as the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Boxed() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        box: Any = Box(torch.sigmoid(x))
        x = x * self.scale
        for block in self.blocks:
            x = block(x, box)
        del box
        return {"loss": x.square().mean(), "hidden": x}


def test_arguments_in_an_object(machine: Machine) -> None:
    def loop(model: Any) -> Trace:
        seen = []
        for step in range(30):
            loss = model(data(step))["loss"]
            # Takes the memory of what is let go.
            junk = [torch.full((2, 5, D), 7.0) for _ in range(8)]
            loss.backward()
            seen += gradients(model)
            model.zero_grad()
            del junk
        return seen

    both(loop, Boxes)


@pytest.mark.usefixtures("no_donations")
def test_weights_that_change_before_backward(machine: Machine) -> None:
    model = Model()
    fp8patch.compile_blocks(model, cuda_graphs=True)
    training(model, steps=4)
    loss = model(data(1))["loss"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Penultimate(Model):
    """The last block's output has no gradient."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask, states = torch.ones_like(x), [x * self.scale]
        for block in self.blocks:
            states.append(block(states[-1], mask))
        return {"loss": states[-2].square().mean(), "hidden": states[-1]}


def test_a_block_that_nothing_goes_back_through(machine: Machine) -> None:
    both(lambda model: training(model, steps=8), Penultimate)
    assert len(machine.graphs) == 2 * (LAYERS - 1)


def test_a_forward_alone_is_not_enough_to_record(machine: Machine) -> None:
    """Backward loads and tunes what it launches, too."""
    model = Model()
    fp8patch.compile_blocks(model, cuda_graphs=True)
    model(data(0))["loss"].item()
    model(data(1))["loss"].backward()
    assert not machine.graphs
    training(model, steps=2)
    assert len(machine.graphs) == 2 * LAYERS
    # Evaluation with gradients on, at other lengths.
    for i in range(10):
        model(data(i, length=7))["loss"].item()
    assert len(machine.graphs) == 2 * LAYERS


def test_a_backward_that_cannot_be_recorded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(function: Any, device: Any) -> Any:
        if "outputs" in inspect.getclosurevars(function).nonlocals:
            raise RuntimeError("operation not permitted when stream is capturing")
        return machine.record(function, device)

    model = Model()
    fp8patch.compile_blocks(model, cuda_graphs=True)
    training(model, steps=1)
    monkeypatch.setattr(capture, "record", refuse)
    with pytest.raises(RuntimeError, match=r"could not be recorded .*operation not permitted"):
        model(data(0))["loss"].backward()
    assert "(Block): no CUDA graph can be recorded, operation not" in capsys.readouterr().err
    # That once; afterwards it runs without.
    model.zero_grad()
    recorded = len(machine.graphs)
    plain = copy.deepcopy(model)
    for a, b in zip(training(plain), training(model), strict=True):
        torch.testing.assert_close(a, b)
    assert len(machine.graphs) == recorded


def test_a_hook_that_comes_later_may_keep_what_it_sees(machine: Machine) -> None:
    def loop(model: Any) -> Trace:
        training(model, steps=4)
        kept: list[Tensor] = []
        at_once: list[Tensor] = []

        def keep(module: Any, args: Any, output: Any) -> None:
            for tensor in (args[0], output):
                kept.append(tensor.detach())
                at_once.append(tensor.detach().clone())

        model.blocks[2].register_forward_hook(keep)
        seen = training(model, steps=3)
        assert all(torch.equal(a, b) for a, b in zip(kept, at_once, strict=True))
        return seen + kept

    both(loop)


def test_a_gradient_that_somebody_keeps_and_replaces_is_not_written(machine: Machine) -> None:
    class Hooked(Model):
        hook: Any = None

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            mask, x = torch.ones_like(x), x * self.scale
            for block in self.blocks:
                if self.hook is not None and block is self.blocks[1]:
                    x.register_hook(self.hook)
                x = block(x, mask)
            return {"loss": x.square().mean(), "hidden": x}

    model: Any = Hooked()
    fp8patch.compile_blocks(model, cuda_graphs=True)
    training(model, steps=4)
    kept: list[Tensor] = []

    def double(gradient: Tensor) -> Tensor:
        kept.append(gradient)
        return gradient * 2

    model.hook = double
    with pytest.raises(RuntimeError, match="would overwrite what somebody still holds"):
        model(data(0))["loss"].backward()


@pytest.mark.parametrize("view", [False, True])
def test_gradients_that_a_script_has_kept_in_a_list(machine: Machine, view: bool) -> None:
    """And reads, and makes zero, from then on."""

    def loop(model: Any) -> Trace:
        training(model, steps=4)
        kept: list[Tensor] = []
        seen = []
        for step in range(6):
            model(data(step))["loss"].backward()
            if not kept:
                grads = [p.grad for p in model.parameters()]
                kept += [g.view(-1) for g in grads] if view else grads
            seen += [grad.clone() for grad in kept]
            for grad in kept:
                grad.zero_()
        return seen + gradients(model)

    both(loop)


class Inferred(Block):
    extra: Tensor

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x + self.extra, mask)


class Inferences(Model):
    """Blocks read what was made in inference mode, which counts no versions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inferred() for _ in range(LAYERS)])
        with torch.inference_mode():
            for block in self.blocks:
                block.extra = torch.ones(D)


def test_tensors_of_inference_mode(machine: Machine) -> None:
    both(training, Inferences)
    assert len(machine.graphs) == 2 * LAYERS


def test_anomaly_detection_runs_without(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(messages, "_seen", set())
    with torch.autograd.set_detect_anomaly(True):
        both(training)
    assert not machine.graphs
    assert "anomaly detection is on" in capsys.readouterr().err


class Throws(Model):
    def __init__(self, where: int) -> None:
        super().__init__()
        self.calls, self.where = 0, where

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        throws = self.calls in (2, 5)
        mask, x = torch.ones_like(x), x * self.scale
        for i, block in enumerate(self.blocks):
            if throws and i == self.where:
                raise ValueError
            x = block(x, mask)
            if throws and i + LAYERS == self.where:
                x.register_hook(_throw)
        return {"loss": x.square().mean(), "hidden": x}


def _throw(gradient: Tensor) -> None:
    raise ValueError


@pytest.mark.parametrize("where", range(2 * LAYERS))
def test_exceptions_in_the_middle(machine: Machine, where: int) -> None:
    """Of a forward, or of a backward; while graphs are recorded, and while they are replayed."""

    def loop(model: Any) -> Trace:
        seen = []
        for step in range(8):
            model.zero_grad()
            try:
                model(data(step))["loss"].backward()
            except ValueError:
                continue
            seen += gradients(model)
        return seen

    both(loop, lambda: Throws(where))
