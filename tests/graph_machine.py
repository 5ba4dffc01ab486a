"""CUDA graphs that a CPU can replay, and models whose blocks are recorded as such.

A graph here repeats what it recorded, and writes its results where they were first. Whatever else
it might write, since nobody held it when it was recorded, it makes NaN; and so does the beginning
of a step with everything. (The fixtures `machine` and `no_donations` are in conftest.py.)
"""

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fp8patch
from fp8patch.blocks import capture, memory, replay, run
from fp8patch.blocks import graphs as blocks_graphs

D = 16


class Graph:
    """Results of a function, at the places where they were first.

    Attributes:
        places: Where they are; kept here, whoever else holds them.
        held: Says of each whether somebody else does.
        used_again: Places of other graphs that were free when this one was recorded: it may write
            anything there.
        lets_go: Forwards whose backward was recorded before: what they save lies there, too.
    """

    def __init__(self, machine: "Machine", results: Any) -> None:
        self.used_again = machine.free()
        self.lets_go = [g.forward for g in machine.graphs if isinstance(g, Backward)]
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
        for forward in self.lets_go:
            forward.saved = False
        for place, value in zip(self.places, self.run(), strict=True):
            if place is not None:
                place.copy_(value.detach())

    def run(self) -> Any:
        raise NotImplementedError


class Forward(Graph):
    """Attributes:
    saved: What its backward reads is there.
    holds: What autograd saves of its inputs, until its backward is recorded.
    """

    saved = True

    def __init__(self, machine: "Machine", compiled: Any, inputs: list[Any]) -> None:
        # A graph knows addresses, and holds nobody.
        self.compiled, self.inputs = compiled, [at(value) for value in inputs]
        before = [place._version if isinstance(place, Tensor) else 0 for place in self.inputs]
        super().__init__(machine, self.run())
        for value, place, version in zip(inputs, self.inputs, before, strict=True):
            if isinstance(value, Tensor) and place._version != version:
                torch.autograd.graph.increment_version(value)
        differentiable = any(output.requires_grad for output in self.latest)
        self.holds = list(inputs) if differentiable else []

    def replay(self) -> None:
        super().replay()
        self.saved = True

    def run(self) -> Any:
        with torch.enable_grad():
            self.latest = tuple(self.compiled(*self.inputs))
        return self.latest

    def backward(self, wrt: Any, grads: Any) -> Any:
        """Gradients by the inputs that lie where `wrt` does, of what ran last."""
        places = {t.data_ptr(): t for t in self.inputs if isinstance(t, Tensor)}
        some = [output for output in self.latest if output.requires_grad]
        if not self.saved:
            grads = [torch.full_like(grad, float("nan")) for grad in grads]
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
        forward.holds.clear()

    def run(self) -> Any:
        return self.forward.backward(self.wrt, self.read)


def at(value: Any) -> Any:
    """What lies where `value` does."""
    if not isinstance(value, Tensor):
        return value
    return memory.Result(value).tensor().requires_grad_(value.requires_grad)


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


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """In place of what records and replays."""
    from torch._dynamo.backends.debugging import aot_eager

    torch._dynamo.reset()
    machine = Machine()
    begin = memory.begin

    def spoiling() -> None:
        begin()
        machine.spoil()

    def with_graphs(self: Any, graph: Any, inputs: Any) -> Any:
        self._replayed.append(replay.Replayed(aot_eager(graph, inputs), self.name))
        return self._replayed[-1]

    monkeypatch.setattr(capture, "record", machine.record)
    monkeypatch.setattr(capture, "alias", alias)
    monkeypatch.setattr(memory, "_live", weakref.WeakSet())
    monkeypatch.setattr(memory, "_steps", 0)
    monkeypatch.setattr(memory, "begin", spoiling)
    monkeypatch.setattr(memory, "_step", memory.Step())
    monkeypatch.setattr(memory, "_renewals", 0)
    monkeypatch.setattr(replay, "_hindrance", lambda inputs, outputs: None)
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
