"""GradScaler must see an FP16 overflow through an FP8 backward, and the slots must survive it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8patch
from fp8patch import numerics
from fp8patch.modules.linear import Float8Linear
from fp8patch.ops import quantize as ops
from fp8patch.slots import GRAD_OUTPUT, INPUT, WEIGHT

ROLES = (INPUT, WEIGHT, GRAD_OUTPUT)


class Training:
    """Two converted layers (the overflow has to pass through one), FP16 autocast, a GradScaler."""

    def __init__(self, init_scale: float, recipe: str = "delayed") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
        fp8patch.convert_model(self.model, recipe, include=("*",))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)
        self.x = torch.randn(8, 32)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16), fp8patch.autocast(backend="emulate"):
            loss = self.model(self.x).float().sum()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def slots(self) -> dict[Any, Any]:
        bank = self.model._fp8_bank
        return {(path, role): bank.read(path, role) for path in bank.paths for role in ROLES}


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_an_overflow_is_seen_and_skipped(recipe: str) -> None:
    training = Training(2.0**20, recipe)  # FP16 ends at 65504
    before = training.weights()
    training.step()
    assert training.scaler.get_scale() == 2.0**19
    assert all(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
    for p in training.model[0].parameters():
        assert p.grad is not None
        assert not p.grad.isfinite().any()
    training.scaler.update(2.0**8)
    training.step()
    assert training.scaler.get_scale() == 2.0**8
    assert not any(torch.equal(a, b) for a, b in zip(before, training.weights(), strict=True))
    assert all(p.isfinite().all() for p in training.weights())


def test_saturating_an_inf_would_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the rule `inf becomes nan` prevents. The first layer's weight shows it: its
    gradient has been through FP8 only."""

    def saturating(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        limit = numerics.FP8_MAX[dtype]
        return (x.float() * scale).clamp(-limit, limit).to(dtype)

    monkeypatch.setattr(numerics, "quantize", saturating)
    training = Training(2.0**20)
    # A bias gradient is summed in FP32 from what came in; freeze it to look at the GEMMs alone.
    for name, p in training.model.named_parameters():
        p.requires_grad_(not name.endswith("bias"))
    before = training.weights()
    training.step()
    assert training.scaler.get_scale() == 2.0**20
    assert not torch.equal(before[0], training.weights()[0])


def test_the_scale_survives_an_overflow_and_a_skipped_step_does_not_roll() -> None:
    training = Training(2.0**8)
    for _ in range(3):
        training.step()
    bank = training.model._fp8_bank
    grad = bank.read("2", GRAD_OUTPUT)
    assert len(grad.history) == 2
    training.scaler.update(2.0**20)
    training.step()  # rolls the step before, and overflows
    assert training.scaler.get_scale() == 2.0**19
    before = training.slots()
    assert not bank.due
    assert not before[("2", GRAD_OUTPUT)].amax.isfinite()
    assert before[("2", GRAD_OUTPUT)].counts[numerics.NON_FINITE] == 8 * 16
    training.scaler.update(2.0**8)
    training.step()  # after a skipped step: nothing moves
    for key, state in training.slots().items():
        assert torch.equal(state.history, before[key].history)
        assert torch.equal(state.scale, before[key].scale)
    training.step()  # the overflow still is in what was pending: the scale of old stays
    after = bank.read("2", GRAD_OUTPUT)
    assert torch.equal(after.history, before[("2", GRAD_OUTPUT)].history)
    assert torch.equal(after.scale, before[("2", GRAD_OUTPUT)].scale)
    assert len(bank.read("2", INPUT).history) == len(before[("2", INPUT)].history) + 1
    training.step()
    assert len(bank.read("2", GRAD_OUTPUT).history) == len(after.history) + 1


def test_overflows_from_the_first_step_on() -> None:
    """How FP16 training begins: the scaler looks for its scale. Nothing is poisoned by that."""
    training = Training(2.0**20)
    steps = 0
    while training.scaler.get_scale() == 2.0**20 / 2**steps:
        training.step()
        steps += 1
    assert 3 < steps < 8
    for _ in range(3):
        training.step()
    for state in training.slots().values():
        assert 0 < state.scale < float("inf")
        assert state.history.isfinite().all()
        assert len(state.history)


def test_a_nan_input_reaches_the_loss() -> None:
    layer = Float8Linear(16, 16)
    x = torch.randn(4, 16)
    x[1, 3] = float("inf")
    with fp8patch.autocast(backend="emulate"):
        y = layer(x)
    assert y[1].isnan().all()
    # One scale a tensor, and a live amax that is not finite: scale 1, and the rest as it is.
    assert y[[0, 2, 3]].isfinite().all()
    assert not ops._cold_used.isdisjoint({layer._fp8_input_slot.scale.data_ptr()})
