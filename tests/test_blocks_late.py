"""Weights of a model with compiled blocks are quantised where something first asks for one."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from quiet import DYNAMO
from test_blocks import Block, D, Model, compile_blocks, convert, equal, step
from torch import Tensor, nn

import fp8patch
from fp8patch.late import LateCasts
from fp8patch.modules import base, weight_batch

pytestmark = DYNAMO


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


def deferring(monkeypatch: pytest.MonkeyPatch, *models: Any) -> list[bool]:
    """As on a GPU, where all weights are one launch: here they are as many as there are.

    Returns what is added to where casts are dropped.
    """
    stock = base.refresh_together
    banks = {id(model._fp8_bank): model for model in models}
    undone: list[bool] = []

    def quantize(model: Any, members: Any, observe: bool) -> None:
        if hasattr(model, "events"):
            model.events.append("weights")
        for module in stock(members, observe):
            module.refresh_weight(observe)

    def refresh_together(members: Any, observe: bool) -> Any:
        bank = members[0]._fp8_bank
        if id(bank) not in banks:
            return stock(members, observe)
        run = partial(quantize, banks[id(bank)], members, observe)
        bank.late.defer(run, lambda: undone.append(True))
        return []

    monkeypatch.setattr(base, "refresh_together", refresh_together)
    return undone


def forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateCasts, "catch_up", LateCasts._forget)


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
    undone = deferring(monkeypatch, model)
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
    assert model._fp8_bank.late.waits
    assert not undone
    step(model, torch.randn(4, 8, D), None)
    assert not model._fp8_bank.late.waits
    # Weights may have moved meanwhile: what waited for them is dropped, and asked for again.
    assert undone
    assert model.events.count("weights") == 1


def test_a_forward_that_fails_leaves_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    deferring(monkeypatch, model)
    compile_blocks(model)
    trained(model, 2)
    monkeypatch.setattr(model, "first", nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="shapes"):
        step(model, torch.randn(4, 8, D), None)
    assert not model._fp8_bank.late.waits
    assert model.events[-1] == "weights"


def test_a_launch_that_fails_is_undone() -> None:
    """Out of memory, say: what was noted as cast is not."""
    late = LateCasts()
    late.wanted = True
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("out of memory")

    late.begin(1, training=True)
    late.defer(fail, lambda: done.append("first undone"))
    late.defer(lambda: done.append("second"), lambda: done.append("second undone"))
    with pytest.raises(RuntimeError, match="out of memory"):
        late.catch_up()
    assert done == ["first undone"]
    late.catch_up()
    assert done == ["first undone", "second"]
    late.begin(2, training=True)
    assert done == ["first undone", "second"]


def test_casts_that_are_dropped_are_made_again() -> None:
    model = build()
    step(model, torch.randn(4, 8, D), None)
    modules = [model.first, model.last]
    weight_batch._undo(modules, observed=True)
    assert all(m._fp8_weight_state.outdated for m in modules)
    assert not {"first", "last"} & model._fp8_bank.weights_seen
    assert not model.blocks[0].up._fp8_weight_state.outdated


def test_not_where_somebody_else_compiled_a_part_of_it() -> None:
    model = build()
    model.first.compile(backend="aot_eager")
    compile_blocks(model)
    assert not model._fp8_bank.late.wanted
    assert equal(trained(model), trained(build()))


def test_what_somebody_else_compiles_later_reads_fresh_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two models of one class: a graph that was traced for one must not serve the other."""
    expected, models = trained(build()), [build(), build()]
    deferring(monkeypatch, *models)
    for model in models:
        compile_blocks(model)
        model.first.compile(backend="aot_eager", fullgraph=True)
    for model in models:
        assert equal(trained(model), expected)
        assert model._fp8_bank.late.read_early
        assert not model._fp8_bank.late.waits
    compile_blocks(models[0])  # what is compiled beside it is still there
    assert equal(trained(models[0]), trained(models[1]))


def test_a_compiled_child_reads_fresh_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, model = trained(build()), build()
    deferring(monkeypatch, model)
    model.first = torch.compile(model.first, backend="aot_eager")
    compile_blocks(model)
    assert equal(trained(model), expected)


class Pair(nn.Module):
    """Two converted roots, in a module that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = convert(Model()), convert(Model())

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = self.a(x) + self.b(x)
        return both


def test_each_root_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    eager = Pair()
    compiled = copy.deepcopy(eager)
    deferring(monkeypatch, compiled.a, compiled.b)
    _, counter = compile_blocks(compiled)
    optimizers = [torch.optim.SGD(pair.parameters(), 0.1) for pair in (eager, compiled)]
    for _ in range(3):
        x = torch.randn(4, 8, D)
        assert equal(step(compiled, x, optimizers[1]), step(eager, x, optimizers[0]))
    assert counter.frame_count == 1


def test_forgotten_weights_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first test relies on: nobody else quantises what a compiled block reads."""
    expected = trained(build())
    model = build()
    deferring(monkeypatch, model)
    forgetting(monkeypatch)
    compile_blocks(model)
    assert not equal(trained(model), expected)


def test_the_block_of_the_other_tests_defers_too() -> None:
    model = convert(Model(Block))
    compile_blocks(model)
    assert model._fp8_bank.late.wanted


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
    stock = LateCasts.catch_up
    noted = lambda late: (waiting.append(len(late._jobs)), stock(late))[1]  # noqa: E731
    monkeypatch.setattr(LateCasts, "catch_up", noted)
    assert equal(on_a_gpu(model), expected)
    assert max(waiting) == 1
    model = made()
    compile_blocks(model)
    forgetting(monkeypatch)
    assert not equal(on_a_gpu(model), expected)
