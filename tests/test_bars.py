"""The numerics bars, and the planted faults that each of them has to catch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import bars
import pytest
import torch
from bars import Setup, below, measure
from torch import Tensor

from fp8patch import numerics
from fp8patch.modules import gemms
from fp8patch.ops import quantize as ops

RECIPES = ("delayed", "current", "rowwise")
SETUPS = [
    pytest.param(
        Setup(recipe, conv1d, steps),
        id=f"{recipe}-{'conv1d' if conv1d else 'linear'}-step{steps}",
    )
    for recipe in RECIPES
    for conv1d in (False, True)
    for steps in (1, 2)
]


@pytest.mark.parametrize("setup", SETUPS)
def test_the_bars(setup: Setup) -> None:
    found = measure(setup)
    assert not below(found), found


@pytest.mark.gpu
@pytest.mark.parametrize("setup", SETUPS)
def test_the_bars_on_a_gpu(setup: Setup) -> None:
    found = measure(dataclasses.replace(setup, device="cuda", backend="fp8"))
    assert not below(found, fast_accum=True), found


def e5m2_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ops, "dtype_of", lambda e5m2: numerics.E5M2)


def scale_twice_too_large(patch: pytest.MonkeyPatch) -> None:
    real = numerics.scale_from_amax
    patch.setattr(numerics, "scale_from_amax", lambda *args: real(*args) * 2)


def updated_scale_twice_too_large(patch: pytest.MonkeyPatch) -> None:
    real = numerics.delayed_update

    def update(history: Tensor, cursor: Tensor, pending: Tensor, scale: Tensor, *rest: Any) -> None:
        real(history, cursor, pending, scale, *rest)
        scale.mul_(2)

    patch.setattr(numerics, "delayed_update", update)


def scale_inv_off(factor: float, e5m2: bool) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = gemms.quantize

        def quantize(*args: Any) -> tuple[Tensor, ...]:
            rows, rows_t, inverse, sums = real(*args)
            return rows, rows_t, inverse * factor if args[5] == e5m2 else inverse, sums

        patch.setattr(gemms, "quantize", quantize)

    return plant


def flushed_gradients(patch: pytest.MonkeyPatch) -> None:
    real = gemms.quantize

    def quantize(x: Tensor, scale: Tensor, *args: Any) -> tuple[Tensor, ...]:
        if not args[3]:
            return real(x, scale, *args)
        return real(x, torch.ones_like(scale), *args[:4], False, *args[5:])

    patch.setattr(gemms, "quantize", quantize)


FORWARD = {"fprop", "fprop_oracle"}
BACKWARD = {"dgrad", "wgrad", "dgrad_oracle", "wgrad_oracle"}
CASTS = {"cast_e4m3", "cast_e5m2"}

FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], int, set[str]]] = {
    "e5m2_forward": (e5m2_forward, 1, {"cast_e4m3"} | FORWARD),
    "scale": (scale_twice_too_large, 1, CASTS | FORWARD | BACKWARD),
    "updated_scale": (updated_scale_twice_too_large, 2, FORWARD | BACKWARD),
    "scale_inv_twice": (scale_inv_off(2.0, False), 1, {"cast_e4m3"} | FORWARD | BACKWARD),
    "scale_inv_half": (scale_inv_off(0.5, False), 1, {"cast_e4m3"} | FORWARD),
    "grad_scale_inv_twice": (scale_inv_off(2.0, True), 1, {"cast_e5m2"} | BACKWARD),
    "grad_scale_inv_half": (scale_inv_off(0.5, True), 1, {"cast_e5m2"} | BACKWARD),
    "flushed_gradients": (flushed_gradients, 1, BACKWARD),
}


@pytest.mark.parametrize("conv1d", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_misses_the_bars(
    fault: str, conv1d: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, steps, expected = FAULTS[fault]
    plant(monkeypatch)
    missed = below(measure(Setup("delayed", conv1d, steps)))
    assert expected <= missed
    # What is not at fault stands: the bars say where the fault is.
    assert "bias_grad" not in missed
    if fault in ("flushed_gradients", "grad_scale_inv_twice", "grad_scale_inv_half"):
        assert not missed & (FORWARD | {"cast_e4m3"})


def test_every_bar_has_a_fault() -> None:
    caught = set().union(*(expected for _, _, expected in FAULTS.values()))
    assert caught == (bars.CAST | bars.GEMM | bars.ORACLE).keys()


def test_the_bias_bar_catches_a_sum_in_bf16() -> None:
    grad = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    total = torch.zeros(64, dtype=torch.bfloat16)
    for row in grad:
        total += row
    assert numerics.sqnr(grad.double().sum(0), total) < bars.BIAS["bias_grad"]
    once = grad.sum(0, dtype=torch.float32)
    assert numerics.sqnr(grad.double().sum(0), once) > bars.BIAS["bias_grad"]
