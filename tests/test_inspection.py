"""metrics and invalidate."""

from typing import Any

import numpy as np
import pytest
import resume_cases as cases
import torch
from torch import nn

import fp8patch
from fp8patch.errors import PlanError
from fp8patch.slots import Slots


def step(model: Any, input: torch.Tensor) -> None:
    with fp8patch.autocast(backend="emulate"):
        output = model(input)
    output.sum().backward()


def test_the_numbers_are_those_of_the_tensors() -> None:
    torch.manual_seed(0)
    model = fp8patch.convert_model(nn.Sequential(nn.Linear(16, 32)), include=["*"])
    assert fp8patch.metrics(model) == {}
    input = torch.randn(4, 16)
    input[0, 0], input[1, 1] = 40.0, 1e-6  # of 64 elements one is flushed to zero
    step(model, input)
    found = fp8patch.metrics(model)
    assert set(found) == {
        f"fp8/0/{role}/{what}"
        for role in ("input", "weight", "grad_output")
        for what in ("amax", "scale", "saturated", "flushed", "non_finite")
    }
    assert all(type(value) is float for value in found.values())
    assert found["fp8/0/input/amax"] == 40.0
    assert found["fp8/0/input/flushed"] == 1 / 64
    assert found["fp8/0/input/saturated"] == found["fp8/0/input/non_finite"] == 0
    assert found["fp8/0/weight/amax"] == model[0].weight.abs().max().item()

    # The scale of the first step is set when it is over, and its amax stays the last one seen.
    step(model, torch.full((4, 16), 80.0))
    found = fp8patch.metrics(model)
    assert found["fp8/0/input/scale"] == pytest.approx(448 / 40)
    assert found["fp8/0/input/amax"] == 80.0
    assert found["fp8/0/input/saturated"] == 1 / 2
    step(model, torch.full((4, 16), torch.nan))
    assert fp8patch.metrics(model)["fp8/0/input/non_finite"] == pytest.approx(1 / 3)


def test_siblings_report_their_shared_slot() -> None:
    model, optimizer = cases.start("llama-delayed")
    cases.train(model, optimizer, 0, 4)
    found = fp8patch.metrics(model)
    prefix = "fp8/model.layers.0.self_attn."
    for what in ("amax", "scale", "saturated", "flushed"):
        values = {found[f"{prefix}{name}_proj/input/{what}"] for name in "qkv"}
        assert len(values) == 1
    assert len({found[f"{prefix}{name}_proj/weight/amax"] for name in "qkv"}) == 3


def test_one_read_however_many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = cases.start("llama-delayed")
    cases.train(model, optimizer, 0, 2)
    reads: list[int] = []
    table = Slots.table

    def counted(self: Slots) -> torch.Tensor:
        reads.append(1)
        return table(self)

    monkeypatch.setattr(Slots, "table", counted)
    monkeypatch.setattr(Slots, "_read", None)
    assert len(fp8patch.metrics(model)) > 100
    assert len(reads) == 1


def test_a_model_that_is_not_converted_has_none() -> None:
    assert fp8patch.metrics(nn.Linear(16, 16)) == {}


def test_restored_state_reports_before_the_first_forward() -> None:
    model, optimizer = cases.start("llama-delayed")
    cases.train(model, optimizer, 0, 4)
    bank = model._fp8_bank
    fresh = fp8patch.convert_model(cases.build("llama"))
    fresh._fp8_bank.siblings = dict(bank.siblings)
    fresh._fp8_bank.restore(dict(bank.state()))
    assert fp8patch.metrics(fresh) == fp8patch.metrics(model)


def test_invalidate_sees_a_weight_written_behind_an_optimizer() -> None:
    torch.manual_seed(0)
    model = fp8patch.convert_model(nn.Sequential(nn.Linear(16, 16)), include=["*"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    input = torch.randn(4, 16)
    for _ in range(2):
        step(model, input)
        optimizer.step()
    with torch.no_grad(), fp8patch.autocast(backend="emulate"):
        before = model(input)
    step(model, input)  # the optimizer is known now: its steps alone make a weight stale
    model[0].weight.data.view(-1)[:].mul_(0.25)
    with torch.no_grad(), fp8patch.autocast(backend="emulate"):
        assert torch.equal(model(input), before)
    fp8patch.invalidate(model)
    with torch.no_grad(), fp8patch.autocast(backend="emulate"):
        assert not torch.allclose(model(input), before)


# -- signal to noise ------------------------------------------------------------------------------


def squared(model: Any, input: torch.Tensor) -> torch.Tensor:
    """One step; the gradient that reached the model's output."""
    with fp8patch.autocast(backend="emulate"):
        output = model(input)
    output.retain_grad()
    output.square().sum().backward()
    return output.grad  # type: ignore[no-any-return]


def decibels(tensor: torch.Tensor, scale: float, dtype: torch.dtype) -> float:
    """By numpy in FP64, and a cast that saturates by itself."""
    x = tensor.detach().double().numpy()
    largest = torch.finfo(dtype).max
    cast = (tensor.detach().float() * scale).clamp(-largest, largest).to(dtype).double() / scale
    return float(10 * np.log10((x**2).sum() / ((x - cast.numpy()) ** 2).sum()))


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_sqnr_is_that_of_the_tensors(recipe: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    model = fp8patch.convert_model(layers, recipe, include=["*"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        squared(model, torch.randn(8, 16))
        optimizer.step()
    before = fp8patch.metrics(model)
    input = 5 * torch.randn(8, 16)  # beyond what the delayed scale was made for
    with fp8patch.measure_sqnr(model, "2") as found:
        assert found == {}
        grad = squared(model, input)
    assert set(found) == {f"fp8/2/{role}/sqnr" for role in ("input", "weight", "grad_output")}
    seen = fp8patch.metrics(model)
    weight, e4m3, e5m2 = model[2].weight, torch.float8_e4m3fn, torch.float8_e5m2
    if recipe == "rowwise":
        rows = [decibels(w, 448 / w.abs().max().item(), e4m3) for w in weight]
        assert min(rows) < found["fp8/2/weight/sqnr"] < max(rows)
        assert found["fp8/2/grad_output/sqnr"] > 28
        return
    scale = 448 / weight.abs().max().item()
    assert found["fp8/2/weight/sqnr"] == pytest.approx(decibels(weight, scale, e4m3), abs=0.01)
    scale = 57344 / grad.abs().max().item()
    if recipe == "delayed":
        scale = seen["fp8/2/grad_output/scale"]
        assert seen["fp8/2/grad_output/saturated"] > before["fp8/2/grad_output/saturated"]
    assert found["fp8/2/grad_output/sqnr"] == pytest.approx(decibels(grad, scale, e5m2), abs=0.01)
    with fp8patch.measure_sqnr(model, ["0"]) as found:
        squared(model, input)
    if recipe == "delayed":
        wanted = decibels(input, fp8patch.metrics(model)["fp8/0/input/scale"], e4m3)
        assert found["fp8/0/input/sqnr"] == pytest.approx(wanted, abs=0.01)
        assert wanted < 15  # it clips
    else:
        assert found["fp8/0/input/sqnr"] > 25


def test_sqnr_of_layers_that_are_none() -> None:
    model = fp8patch.convert_model(nn.Sequential(nn.Linear(16, 16)), include=["*"])
    with pytest.raises(PlanError, match="'1' matches none of the 1 converted modules"):
        with fp8patch.measure_sqnr(model, "1"):
            pass
    with fp8patch.measure_sqnr(model) as found:
        model(torch.randn(4, 16))  # outside a region: nothing is cast
    assert found == {}
    assert not model[0]._forward_hooks
