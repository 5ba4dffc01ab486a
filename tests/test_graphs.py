"""When a training forward may replay CUDA graphs: the rules, without a GPU.

`test_graphs_gpu.py` has what comes of them.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quiet import DYNAMO
from torch import Tensor, nn

import fp8patch
from fp8patch import messages
from fp8patch.blocks import graphs as blocks_graphs
from fp8patch.blocks import memory, run
from fp8patch.blocks.graphs import Graphs
from fp8patch.ops import quantize as ops

pytestmark = DYNAMO

D = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 64), nn.Linear(64, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Returns what its last block returns, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return {"loss": x.float().square().mean(), "hidden": x}


class Watched:
    """A model that believes to be on a GPU: how each forward ran, and how many steps began."""

    def __init__(self, patch: pytest.MonkeyPatch, convert: bool = False) -> None:
        torch.manual_seed(0)
        self.model: Any = Model()
        if convert:
            fp8patch.convert_model(self.model, include=("*",))
        self.modes: list[str] = []
        self.steps = 0
        stock = Graphs.begin

        def begin(graphs: Graphs) -> Any:
            mode = stock(graphs)
            self.modes.append(mode)
            return mode

        def mark() -> None:
            self.steps += 1

        patch.setattr(Graphs, "begin", begin)
        patch.setattr(blocks_graphs, "_on_gpu", lambda model: True)
        patch.setattr(blocks_graphs, "_step", blocks_graphs._Step())
        patch.setattr(memory, "begin", mark)
        patch.setattr(messages, "_seen", set())
        self.found = fp8patch.compile_blocks(self.model, cuda_graphs=True, backend="aot_eager")

    def forward(self) -> dict[str, Tensor]:
        with fp8patch.autocast(backend="emulate"):
            output: dict[str, Tensor] = self.model(torch.ones(2, 4, D))
        return output


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    torch._dynamo.reset()
    yield Watched(monkeypatch)
    torch._dynamo.reset()


def test_a_step_begins_when_backward_has_run(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        loss = watched.forward()["loss"]
        loss.backward()  # `loss` lives on into the next forward
    assert watched.modes == ["graphs"] * 3
    assert watched.steps == 3
    assert not watched.found.ran_graphs  # they may, and this backend has none
    first, second = watched.forward()["loss"], watched.forward()["loss"]
    assert watched.modes[3:] == ["graphs", "compiled"]
    (first + second).backward()
    watched.forward()["loss"].backward()
    assert watched.modes[5:] == ["graphs"]
    assert capsys.readouterr().err.count("waited for its backward") == 1


def test_a_forward_that_is_dropped_waits_for_nothing(watched: Watched) -> None:
    for _ in range(4):
        loss = watched.forward()["loss"]  # no backward: an evaluation with gradients
    assert watched.modes == ["graphs", "compiled", "graphs", "compiled"]
    del loss
    watched.forward()
    assert watched.modes[-1] == "graphs"


def test_what_is_saved_elsewhere_is_no_graphs(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrote: list[Any] = []
    monkeypatch.setattr(run.BlockCall, "_forward", lambda s, graphs, x: wrote.append(graphs))
    block = watched.model.blocks[0]
    monkeypatch.setattr(watched.model, "forward", lambda x: block(x))
    watched.forward()
    with torch.autograd.graph.save_on_cpu():
        watched.forward()
    assert wrote == [True, False]
    assert not watched.found.ran_graphs  # as nothing was handed over by one
    assert "save for backward goes through hooks" in capsys.readouterr().err


def test_a_graph_that_is_kept_for_another_backward(watched: Watched) -> None:
    loss = watched.forward()["loss"]
    loss.backward(retain_graph=True)
    watched.forward()
    assert watched.modes == ["graphs", "compiled"]
    loss.backward()
    watched.forward()
    assert watched.modes[-1] == "graphs"


def test_what_the_model_returns_is_its_own(watched: Watched) -> None:
    blocks = watched.model.blocks
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output)
        memory.step().given.append(memory.Result(output))

    blocks[1].register_forward_hook(hook)
    output = watched.forward()
    assert torch.equal(output["hidden"], seen[0])
    assert output["hidden"].data_ptr() != seen[0].data_ptr()
    output["hidden"].sum().backward()
    assert watched.model.scale.grad is not None
    with torch.no_grad():
        assert watched.forward()["hidden"].data_ptr() == seen[1].data_ptr()
    memory.begin()


def test_gradients_in_the_graphs_memory_are_copied_out(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.forward()["loss"].backward()
    inside = list(watched.model.blocks.parameters())
    # The gradient, what lies in its memory, and its value.
    before = {id(p): (p.grad, p.grad.detach(), p.grad.clone()) for p in inside}
    outside = watched.model.scale.grad

    def alive() -> set[int]:
        memories = {lies.untyped_storage().data_ptr() for _, lies, _ in before.values()}
        return memories & {p.grad.untyped_storage().data_ptr() for p in inside}

    monkeypatch.setattr(memory, "alive", alive)
    watched.forward()["loss"].backward()
    assert watched.modes == ["graphs", "graphs"]
    for p in inside:
        gradient, lies, value = before[id(p)]
        assert p.grad is gradient
        assert p.grad.data_ptr() != lies.data_ptr()
        assert torch.equal(lies, value)  # nothing was added to it
        assert torch.allclose(p.grad, 2 * value)
    assert watched.model.scale.grad is outside
    # What somebody else holds can't be moved.
    monkeypatch.setattr(memory, "alive", lambda: {1})
    watched.forward()
    assert watched.modes[-1] == "compiled"


def test_a_scale_that_was_forgotten_is_seen_eagerly_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has recorded that the scale was set, and would multiply by 0."""
    torch._dynamo.reset()
    watched = Watched(monkeypatch, convert=True)
    model = watched.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = watched.forward()["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    assert watched.modes == ["graphs"] * 2  # the first step is watched
    model.load_state_dict({k: 8 * torch.randn_like(v) for k, v in model.state_dict().items()})
    assert ops.is_cold(model.blocks[0].up._fp8_input_slot.scale)
    step()
    step()
    assert watched.modes[2:] == ["eager", "graphs"]
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    torch._dynamo.reset()


def test_frozen_weights_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are quantised again for every forward, in case an adapter was merged into them."""
    torch._dynamo.reset()
    watched = Watched(monkeypatch, convert=True)
    model = watched.model
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    places, rows = [], []
    for number in range(4):
        if number == 3:
            model.blocks[0].up.weight.data.mul_(-1)
        with torch.autocast("cpu", torch.bfloat16):
            watched.forward()["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        quantized = model.blocks[0].up._fp8_weight_q
        places.append([t.data_ptr() for t in quantized])
        rows.append(quantized.rows.float().clone())
    assert watched.modes == ["graphs"] * 3
    assert places[1] == places[2] == places[3]
    assert torch.equal(rows[2], -rows[3])
    torch._dynamo.reset()
