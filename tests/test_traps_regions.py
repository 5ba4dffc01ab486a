"""Traps of regions and views: in-place edits, nested regions, errors, modules never called."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trap_models import (
    WIDTH,
    Block,
    blocks,
    falls,
    fp8,
    loss_of,
    moved,
    naive_swap,
    noise,
    ran_in_fp8,
    scales,
    seeded,
    sgd,
    snapshot,
    step,
)

import fp8patch
from fp8patch import regions, roots

# -- views ---------------------------------------------------------------------------------------


class EditsItsView(nn.Module):
    """As DeBERTa: adds a bias in place to a view of a Linear's output."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q: Tensor = self.q_proj(x).view(*x.shape[:2], 2, -1).permute(0, 2, 1, 3)
        q += self.q_bias.view(1, 2, 1, -1)
        return q


def test_outputs_may_be_edited_in_place() -> None:
    def check(model: Any) -> None:
        before, optimizer = snapshot(model), sgd(model)
        for _ in range(2):
            step(model, noise(2, 5, WIDTH), optimizer)
        assert moved(before, model) == set(before)

    model = fp8patch.convert_model(seeded(EditsItsView))
    check(model)
    assert ran_in_fp8(model, noise(2, 5, WIDTH))
    with falls():
        check(naive_swap(seeded(EditsItsView)))
    layer = fp8patch.convert_model(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    with fp8():
        output = layer(noise(2, 5, WIDTH))
        output += 1
        output[0].mul_(2)
    output.sum().backward()


# -- regions -------------------------------------------------------------------------------------


class Partly(nn.Module):
    """Keeps its second block out of FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with fp8patch.autocast(enabled=False):
            y: Tensor = self.b(x)
        return y


def test_an_inner_region_keeps_a_part_in_high_precision(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = fp8patch.convert_model(seeded(Partly))
    stock = copy.deepcopy(model.b)
    optimizer = sgd(model)
    for _ in range(3):
        step(model, noise(5, WIDTH), optimizer)
    assert set(scales(model)) == {"a.up", "a.down"}
    lines = [line for line in capsys.readouterr().err.splitlines() if "never ran" in line]
    assert len(lines) == 1
    assert "b.up, b.down" in lines[0]
    seen: list[Tensor] = []
    handle = model.b.register_forward_hook(lambda m, args, output: seen.extend((*args, output)))
    with torch.no_grad(), fp8():
        model(noise(5, WIDTH))
    handle.remove()
    stock.load_state_dict(model.b.state_dict())
    assert torch.equal(stock(seen[0]), seen[1])


def test_a_backward_that_raises_leaves_no_open_region() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("boom")

    model = fp8patch.convert_model(blocks())
    reference = fp8patch.convert_model(blocks())
    for each in (model, reference):
        step(each, noise(5, WIDTH), sgd(each))
    handle = model.layers[1].register_forward_pre_hook(lambda m, args: Fails.apply(args[0]))
    with fp8():
        loss = loss_of(model, noise(5, WIDTH, seed=2))
    with pytest.raises(RuntimeError, match="boom"):
        loss.backward()
    handle.remove()
    # Stock outside a region at once, without any entry that might clean up.
    stock = fp8patch.revert_model(copy.deepcopy(model))
    layer = model.layers[0].up
    assert torch.equal(layer(noise(3, WIDTH)), stock.layers[0].up(noise(3, WIDTH)))
    assert torch.equal(model(noise(3, WIDTH)), stock(noise(3, WIDTH)))
    with fp8():
        pass
    assert regions.active() is None
    assert ran_in_fp8(model, noise(3, WIDTH))


def test_a_parameter_that_is_returned_gets_no_hook() -> None:
    class WithScale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.scale = Block(), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Any:
            return {"output": self.block(x) * self.scale, "scale": self.scale, "input": x}

    model = fp8patch.convert_model(seeded(WithScale))
    x = noise(5, WIDTH).requires_grad_()
    for _ in range(3):
        with fp8():
            output = model(x)
        (output["output"].sum() * output["scale"]).backward()
    assert not model.scale._backward_hooks
    assert not x._backward_hooks


def test_a_forward_that_raises_leaves_no_open_region() -> None:
    model = fp8patch.convert_model(blocks())
    with pytest.raises(RuntimeError), fp8():
        model(noise(5, WIDTH + 1))
    assert regions.active() is None
    assert not roots.inside_root()
    step(model, noise(5, WIDTH), sgd(model))
    assert len(scales(model)) == 4


# -- what is never called ------------------------------------------------------------------------


def test_modules_that_never_run_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    class ReadsWeights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.used(x), self.read.weight, self.read.bias)

    model = fp8patch.convert_model(seeded(ReadsWeights))
    before, optimizer = snapshot(model), sgd(model)
    for _ in range(3):
        step(model, noise(5, WIDTH), optimizer)
    lines = [line for line in capsys.readouterr().err.splitlines() if "never ran" in line]
    assert len(lines) == 1
    assert "1 of 2" in lines[0]
    assert ": read." in lines[0]
    assert moved(before, model) == set(before)


def test_an_interrupt_inside_a_block_that_goes_on() -> None:
    """No hook runs for a KeyboardInterrupt: the call it ended must not pass for the outermost."""
    model = fp8patch.convert_model(blocks())
    optimizer = sgd(model)
    x = noise(7, WIDTH)

    def press(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    with fp8():
        for round_ in range(4):
            if round_ == 1:
                handle = model.layers[1].register_forward_pre_hook(press)
                with pytest.raises(KeyboardInterrupt):
                    model(x)
                handle.remove()
            model(x * 10.0**round_).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not roots.inside_root()
    # Inputs grew tenfold each time: scales that had stood still would be a hundred times too large.
    input_slot = model.layers[0].up._fp8_input_slot
    assert float(input_slot.scale) < 448
    assert len(model._fp8_bank.read("layers.0.up", 1).history) == 3


class Calls(nn.Module):
    """Two layers, and a function of the test's between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        between, self.between = self.between, None
        if between is not None:
            between()
        y: Tensor = self.second(x)
        return y


@pytest.mark.parametrize("same", [True, False], ids=["the same model", "another one"])
def test_a_call_in_another_thread_ends_none_of_ours(same: bool) -> None:
    model, x = fp8patch.convert_model(Calls(), include=["*"]), noise(5, WIDTH)
    other = model if same else fp8patch.convert_model(Calls(), include=["*"])
    found = []

    def beside() -> None:
        thread = threading.Thread(target=other, args=(x,))
        thread.start()
        thread.join()
        found.append([call.root for call in regions.state.roots])

    model.between = beside
    with fp8():
        model(x).sum().backward()
    assert found == [[model]]
    assert model._fp8_bank.clock.backward_finished
    assert regions.state.roots == []


def test_calibration_inside_a_forward_is_of_that_block_alone() -> None:
    """The regions that a root opens are the same objects from step to step."""
    banks = []
    for _ in range(2):
        model: Any = fp8patch.convert_model(Calls(), include=["*"])

        def calibrate(model: Any = model) -> None:
            with fp8patch.autocast(calibrating=True):
                model.first(noise(5, WIDTH))
                assert regions.state.region is not None
                banks.append(list(regions.state.region.banks))

        model.between = calibrate
        with torch.no_grad(), fp8():
            model(noise(5, WIDTH))
        assert banks.pop() == [model._fp8_bank]


def test_a_layer_alone_does_not_serve_the_last_steps_cast() -> None:
    """Without a root nothing says that a forward has ended; the next one begins with an entry."""
    layer = fp8patch.Float8Linear(WIDTH, WIDTH)
    optimizer, x = sgd(layer), noise(5, WIDTH)
    with fp8():
        for _ in range(3):
            layer(x)
            layer.weight.grad = torch.zeros_like(layer.weight)
            optimizer.step()
    assert len(layer._fp8_bank.read("", 0).history) == 2
    assert float(layer._fp8_input_slot.amax) == float(x.abs().max())
