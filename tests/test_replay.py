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
import torch._functorch.config
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fp8patch
from fp8patch import messages
from fp8patch.blocks import graphs as blocks_graphs
from fp8patch.blocks import memory, recorded, replay, run

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
        before = [place._version if isinstance(place, Tensor) else 0 for place in self.inputs]
        super().__init__(machine, self.run())
        for value, place, version in zip(inputs, self.inputs, before, strict=True):
            if isinstance(value, Tensor) and place._version != version:
                torch.autograd.graph.increment_version(value)

    def run(self) -> Any:
        with torch.enable_grad():
            self.latest = tuple(self.compiled(*self.inputs))
        return self.latest

    def backward(self, wrt: Any, grads: Any) -> Any:
        """Gradients by the inputs that lie where `wrt` does, of what ran last."""
        places = {t.data_ptr(): t for t in self.inputs if isinstance(t, Tensor)}
        some = [output for output in self.latest if output.requires_grad]
        keep = not torch._functorch.config.donated_buffer
        by = [places[tensor.data_ptr()] for tensor in wrt]
        return torch.autograd.grad(some, by, grads, allow_unused=True, retain_graph=keep)


class Backward(Graph):
    def __init__(self, machine: "Machine", forward: Forward, wrt: Any, read: Any) -> None:
        self.forward, self.read = forward, [at(value) for value in read]
        self.wrt = [at(tensor) for tensor in wrt]
        forward.run()
        super().__init__(machine, self.run())
        forward.run()

    def run(self) -> Any:
        return self.forward.backward(self.wrt, self.read)


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
        graph = Backward(self, self.forward(names["outputs"]), names["wrt"], names["read"])
        return graph, graph.hand_over()

    def forward(self, outputs: Any) -> Forward:
        """What wrote `outputs`."""
        made = [g for g in self.graphs if isinstance(g, Forward)]
        first = outputs[0].data_ptr()
        (found,) = [g for g in made if any(p.data_ptr() == first for p in g.places)]
        return found

    def gradients(self, outputs: Any, wrt: Any, grads: Any) -> Any:
        return self.forward(outputs).backward(wrt, grads)

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
    monkeypatch.setattr(memory, "_sessions", 0)
    monkeypatch.setattr(recorded, "_gradients", machine.gradients)
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


# -- what a model may do ---------------------------------------------------------------------------


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


@pytest.mark.usefixtures("_no_donations")
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


@pytest.mark.usefixtures("_no_donations")
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

    monkeypatch.setattr(memory, "record", refuse)
    both(training)
    assert "no CUDA graph could be recorded of a block: operation not" in capsys.readouterr().err
    assert len(machine.graphs) <= LAYERS


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
