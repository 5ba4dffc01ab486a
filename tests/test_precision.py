"""Recipes at work: the precision of each GEMM, formats, margin, and what a region may override."""

import itertools
from typing import Any

import oracle
import pytest
import torch
from oracle import E4M3, E5M2
from torch import Tensor

import fp8patch
from fp8patch import numerics
from fp8patch.modules.conv1d import Float8Conv1D
from fp8patch.modules.linear import Float8Linear
from fp8patch.slots import GRAD_OUTPUT, INPUT, WEIGHT

M, N, K = 64, 48, 80
kinds = pytest.mark.parametrize("conv1d", [False, True], ids=["linear", "conv1d"])
GEMMS = ("fprop", "dgrad", "wgrad")


def layer_of(conv1d: bool, recipe: Any) -> Any:
    torch.manual_seed(0)
    return Float8Conv1D(N, K, recipe=recipe) if conv1d else Float8Linear(K, N, recipe=recipe)


def run(layer: Any, region: Any = None) -> dict[str, Tensor]:
    """The three products, under BF16 autocast."""
    layer.zero_grad()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(M, K, generator=generator).requires_grad_()
    grad = torch.randn(M, N, generator=generator)
    region = region or fp8patch.autocast(backend="emulate")
    with torch.autocast("cpu", torch.bfloat16), region:
        y = layer(x)
    y.backward(grad.to(y.dtype))
    assert x.grad is not None
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": layer.weight.grad.clone()}


def stock(layer: Any) -> dict[str, Tensor]:
    return run(layer, fp8patch.autocast(enabled=False))


@kinds
@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise"])
@pytest.mark.parametrize("bf16", [g for n in range(4) for g in itertools.combinations(GEMMS, n)])
def test_each_gemm_has_its_own_precision(bf16: tuple[str, ...], scaling: str, conv1d: bool) -> None:
    whole = fp8patch.Recipe.load(scaling)
    recipe = whole.replace(**dict.fromkeys(bf16, "bf16"))
    ours, fp8 = run(layer_of(conv1d, recipe)), run(layer_of(conv1d, whole))
    bf16_result = stock(layer_of(conv1d, whole))
    for name in GEMMS:
        if name in bf16:
            # The same product as stock, but for the order of the bias.
            assert numerics.sqnr(bf16_result[name], ours[name]) > 45
        else:
            assert torch.equal(ours[name], fp8[name])
            assert numerics.sqnr(bf16_result[name], ours[name]) < 40


@kinds
def test_all_three_in_bf16_is_stock_bit_for_bit(conv1d: bool) -> None:
    recipe = fp8patch.Recipe(fprop="bf16", dgrad="bf16", wgrad="bf16")
    layer = layer_of(conv1d, recipe)
    ours, theirs = run(layer), stock(layer)
    assert all(torch.equal(ours[name], theirs[name]) for name in GEMMS)
    assert layer._fp8_bank.read("", INPUT).counts.sum() == 0


@kinds
@pytest.mark.parametrize("name", GEMMS)
def test_a_region_overrides_the_precision_of_gemms(name: str, conv1d: bool) -> None:
    converted = fp8patch.Recipe()
    changed = converted.replace(**{name: "bf16"})
    region = fp8patch.autocast(backend="emulate", recipe=changed)
    ours = run(layer_of(conv1d, converted), region)
    expected = run(layer_of(conv1d, changed))
    assert all(torch.equal(ours[g], expected[g]) for g in GEMMS)
    # And back: the module's own recipe says bf16, the region fp8.
    back = run(layer_of(conv1d, changed), fp8patch.autocast(backend="emulate", recipe=converted))
    plain = run(layer_of(conv1d, converted))
    assert all(torch.equal(back[g], plain[g]) for g in GEMMS)


def test_an_inner_region_without_a_recipe_keeps_the_outer_ones() -> None:
    layer = layer_of(False, None)
    outer = fp8patch.autocast(backend="emulate", recipe=fp8patch.Recipe(fprop="bf16"))
    with outer:
        inside = run(layer, fp8patch.autocast(backend="emulate"))
    expected = run(layer_of(False, fp8patch.Recipe(fprop="bf16")))
    assert all(torch.equal(inside[g], expected[g]) for g in GEMMS)


@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
@pytest.mark.parametrize("scaling", ["delayed", "current", "rowwise"])
def test_the_format_of_gradients(fp8_format: Any, scaling: Any) -> None:
    layer = layer_of(False, fp8patch.Recipe(scaling=scaling, fp8_format=fp8_format))
    ours, theirs = run(layer), stock(layer)
    db = numerics.sqnr(theirs["wgrad"], ours["wgrad"])
    assert (db > 27) == (fp8_format == "e4m3")
    assert db > 23


@pytest.mark.parametrize("margin", [0, 3])
def test_a_margin_leaves_room(margin: int) -> None:
    layer = layer_of(False, fp8patch.Recipe(margin=margin))
    run(layer)
    layer._fp8_bank.update()
    for role, largest in ((INPUT, 448), (WEIGHT, 448), (GRAD_OUTPUT, 57344)):
        state = layer._fp8_bank.read("", role)
        assert state.scale == torch.tensor(largest / 2**margin) / state.history[-1]


def test_fp32_weights_are_quantised_from_fp32() -> None:
    """Not through BF16, which would round twice."""
    layer = layer_of(False, None)
    run(layer)
    rows = layer._fp8_weight_q.rows
    values = oracle.numpy(layer.weight)
    scale = oracle.live_scale(oracle.amax(values), 448)
    direct = oracle.cast(values, scale, E4M3)
    twice = oracle.cast(oracle.numpy(layer.weight.bfloat16()), scale, E4M3)
    assert (rows.view(torch.uint8).numpy() == direct).all()
    assert (direct != twice).any()


def test_current_follows_each_tensor_and_delayed_does_not() -> None:
    """An input that grows 100 times: delayed clips it for one step, current does not."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(1))
    db = {}
    for scaling in ("delayed", "current", "rowwise"):
        layer = layer_of(False, fp8patch.Recipe.load(scaling))
        found = []
        for factor in (1, 1, 100, 100):
            with fp8patch.autocast(backend="emulate"):
                y = layer(x * factor)
            y.sum().backward()
            found.append(numerics.sqnr(layer(x * factor).detach(), y.detach()))
        db[scaling] = found
    assert min(db["current"]) > 25
    assert min(db["rowwise"]) > 25
    assert db["delayed"][1] > 25
    assert db["delayed"][2] < 5
    assert db["delayed"][3] > 25


def test_rows_of_very_different_size() -> None:
    """What rowwise scaling is for."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(1))
    x *= torch.logspace(-6, 0, M).unsqueeze(1)
    worst = {}
    for scaling in ("current", "rowwise"):
        layer = layer_of(False, scaling)
        torch.nn.init.zeros_(layer.bias)
        with torch.no_grad(), fp8patch.autocast(backend="emulate"):
            y = layer(x)
        exact = x.double() @ layer.weight.double().t()
        worst[scaling] = min(numerics.sqnr(a, b) for a, b in zip(exact.detach(), y, strict=True))
    assert worst["current"] < 5
    assert worst["rowwise"] > 25


def test_e5m2_is_the_format_of_gradients_only() -> None:
    layer = layer_of(False, None)
    run(layer)
    assert layer._fp8_weight_q.rows.dtype == E4M3.torch
    assert E5M2.torch == numerics.E5M2
