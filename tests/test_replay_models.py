"""What models and scripts may do whose blocks run as CUDA graphs, on a CPU (graph_machine.py)."""

import copy
import gc
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
from torch import Tensor, nn

import fp8patch
from fp8patch import messages
from fp8patch.blocks import memory, replay

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


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
    assert "it writes to what it is given" in capsys.readouterr().err


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxed(Block):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        return super().forward(x, mask.value)


class Boxes(Model):
    """An argument in an object that nobody looks into, which lives as long as the forward."""

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
    monkeypatch.setattr(memory, "record", refuse)
    with pytest.raises(RuntimeError, match=r"could not be recorded .*operation not permitted"):
        model(data(0))["loss"].backward()
    assert "no CUDA graph could be recorded of a block: operation not" in capsys.readouterr().err
    # That once; afterwards it runs without.
    model.zero_grad()
    recorded = len(machine.graphs)
    plain = copy.deepcopy(model)
    for a, b in zip(training(plain), training(model), strict=True):
        torch.testing.assert_close(a, b)
    assert len(machine.graphs) == recorded


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
    assert "lie elsewhere in every step" in capsys.readouterr().err


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
    model = Model()
    fp8patch.compile_blocks(model, cuda_graphs=True)
    both_ways = training(model, steps=12, lengths=(4, 5, 6, 7))
    assert both_ways
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
