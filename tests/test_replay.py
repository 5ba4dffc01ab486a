"""Blocks as CUDA graphs of ours, with graphs that a CPU can replay: what a replay writes, and when.

A graph here repeats what it recorded, and writes its results where they were first. Whatever else
it might write, since nobody held it when it was recorded, it makes NaN; and so does the beginning
of a step with everything.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fp8patch
from fp8patch.blocks import graphs as blocks_graphs
from fp8patch.blocks import memory, replay, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

D = 16


class Graph:
    """Results of a function, at the places where they were first.

    Attributes:
        places: Where they are; kept here, whoever else holds them.
        held: Says of each whether somebody else does.
        used_again: Places of other graphs that were free when this one was recorded: it may write
            anything there.
    """

    def __init__(self, machine: "Machine", results: Any) -> None:
        self.used_again = machine.free()
        self.places = [None if r is None else r.detach() for r in results]
        self.given = tuple(at(result) for result in results)
        kept = [tensor for tensor in self.given if tensor is not None]
        self.held = [StorageWeakRef(tensor.untyped_storage()) for tensor in kept]
        machine.graphs.append(self)

    def hand_over(self) -> Any:
        given, self.given = self.given, ()
        return given

    def replay(self) -> None:
        for place in self.used_again:
            place.fill_(float("nan"))
        for place, value in zip(self.places, self.run(), strict=True):
            if place is not None:
                place.copy_(value.detach())

    def run(self) -> Any:
        raise NotImplementedError


class Forward(Graph):
    def __init__(self, machine: "Machine", compiled: Any, inputs: list[Any]) -> None:
        # A graph knows addresses, and holds nobody.
        self.compiled, self.inputs = compiled, [at(value) for value in inputs]
        super().__init__(machine, self.run())

    def run(self) -> Any:
        with torch.enable_grad():
            self.latest = tuple(self.compiled(*self.inputs))
        return self.latest


class Backward(Graph):
    def __init__(self, machine: "Machine", forward: Forward, wrt: Any, read: Any) -> None:
        self.forward, self.read = forward, [at(value) for value in read]
        places = {t.data_ptr(): t for t in forward.inputs if isinstance(t, Tensor)}
        self.wrt = [places[tensor.data_ptr()] for tensor in wrt]
        forward.run()
        super().__init__(machine, self.run())
        forward.run()

    def run(self) -> Any:
        some = [output for output in self.forward.latest if output.requires_grad]
        return torch.autograd.grad(some, self.wrt, self.read, allow_unused=True)


def at(value: Any) -> Any:
    """What lies where `value` does."""
    if not isinstance(value, Tensor):
        return value
    return memory.Place(value).tensor().requires_grad_(value.requires_grad)


class Machine:
    """What stands in for CUDA."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def record(self, function: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
        names = inspect.getclosurevars(function).nonlocals
        if "outputs" not in names:
            graph: Any = Forward(self, names["compiled"], names["own"])
            return graph, graph.hand_over()
        made = [g for g in self.graphs if isinstance(g, Forward)]
        first = names["outputs"][0].data_ptr()
        (forward,) = [g for g in made if any(p.data_ptr() == first for p in g.places)]
        graph = Backward(self, forward, names["wrt"], names["read"])
        return graph, graph.hand_over()

    def free(self) -> list[Tensor]:
        """Places that nobody holds."""
        found = []
        for graph in self.graphs:
            places = [place for place in graph.places if place is not None]
            pairs = zip(places, graph.held, strict=True)
            found += [place for place, held in pairs if held.expired()]
        return found

    def spoil(self) -> None:
        """Nothing of it is anybody's now."""
        for graph in self.graphs:
            for place in graph.places:
                if place is not None:
                    place.fill_(float("nan"))


def alias(description: dict[str, Any]) -> Tensor:
    where = [description[name] for name in ("data_ptr", "device", "nbytes")]
    storage = torch._C._construct_storage_from_data_pointer(*where)
    lies = [description[name] for name in ("storage_offset", "size", "stride")]
    with torch.no_grad():
        return torch.empty(0, dtype=description["dtype"]).set_(storage, *lies)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    from torch._dynamo.backends.debugging import aot_eager

    torch._dynamo.reset()
    machine = Machine()
    begin = memory.begin

    def spoiling() -> None:
        begin()
        machine.spoil()

    def with_graphs(self: Any, graph: Any, inputs: Any) -> Any:
        self._replayed.append(replay.Replayed(aot_eager(graph, inputs)))
        return self._replayed[-1]

    monkeypatch.setattr(memory, "record", machine.record)
    monkeypatch.setattr(memory, "alias", alias)
    monkeypatch.setattr(memory, "begin", spoiling)
    monkeypatch.setattr(memory, "_step", memory.Step())
    monkeypatch.setattr(memory, "_renewals", 0)
    monkeypatch.setattr(replay, "_on_one_gpu", lambda values: True)
    monkeypatch.setattr(run.Structure, "_with_graphs", with_graphs)
    monkeypatch.setattr(blocks_graphs, "_on_gpu", lambda model: True)
    monkeypatch.setattr(blocks_graphs, "_step", blocks_graphs._Step())
    yield machine
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x)))) * mask
        return y


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        # A mask for each row, expanded: its columns lie in one place.
        mask = (x[..., :1] > 0).to(x.dtype).expand(x.shape)
        x = x * self.scale
        for block in self.blocks:
            x = block(x, mask)
        return {"loss": x.square().mean(), "hidden": x}


def data(seed: int, rows: int = 2, length: int = 5) -> Tensor:
    return torch.randn(rows, length, D, generator=torch.Generator().manual_seed(seed))


Trace = list[Tensor]
Loop = Callable[[Any], Trace]
LAYERS = 3


def both(loop: Loop, build: Callable[[], Any] = Model) -> None:
    """`loop` on a model as it is, and with graphs."""
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    graphed = build()
    expected = loop(plain)
    found = fp8patch.compile_blocks(graphed, cuda_graphs=True)
    seen = loop(graphed)
    assert found.left == {}
    for i, (a, b) in enumerate(zip(expected, seen, strict=True)):
        torch.testing.assert_close(a, b, msg=lambda text, i=i: f"{i}: {text}")


def gradients(model: Any) -> Trace:
    found = ((p, p.grad) for p in model.parameters())
    return [torch.zeros_like(p) if grad is None else grad.clone() for p, grad in found]


def training(
    model: Any,
    *,
    steps: int = 6,
    micro: int = 1,
    to_none: bool = True,
    lengths: tuple[int, ...] = (5,),
) -> Trace:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for step in range(steps):
        for i in range(micro):
            number = step * micro + i
            loss = model(data(number, length=lengths[number % len(lengths)]))["loss"]
            loss.backward()
            seen += [loss.detach().clone(), *gradients(model)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return seen


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
    monkeypatch.setattr(blocks_graphs, "_alive", set)
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


@pytest.fixture
def _no_donations() -> Iterator[None]:
    """Else PyTorch keeps no graph of a compiled block, whoever asks."""
    with torch._functorch.config.patch(donated_buffer=False):
        yield


@pytest.mark.usefixtures("_no_donations")
def test_a_graph_cannot_go_back_twice(machine: Machine) -> None:
    model = Model()
    fp8patch.compile_blocks(model, cuda_graphs=True)
    for step in range(4):
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


@pytest.mark.usefixtures("_no_donations")
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

    monkeypatch.setattr(memory, "record", refuse)
    both(training)
    assert "no CUDA graph could be recorded of a block: operation not" in capsys.readouterr().err


def test_who_holds_what_was_handed_out(machine: Machine) -> None:
    recorded = torch.ones(4)
    place = memory.Place(recorded)
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
