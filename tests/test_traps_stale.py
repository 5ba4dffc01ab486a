"""Stale weights: whatever changes a weight, the next FP8 forward computes with the new one.

Each test moves the weights far by one route and compares FP8 with the stock forward of the same
weights. A route that leaves no trace on the Parameter is why `_version` alone is not enough.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trap_models import (
    WIDTH,
    assert_fresh,
    backward,
    blocks,
    converted,
    falls,
    fp8,
    loss_of,
    noise,
    ran_in_fp8,
    sgd,
    step,
)

import fp8patch
from fp8patch import numerics

X = noise(7, WIDTH)
# Room for weights that grow at once, so that an old weight is all that can be wrong.
RECIPE = fp8patch.Recipe(margin=3)


def model_of_blocks() -> Any:
    return fp8patch.convert_model(blocks(), RECIPE)


def trained(optimizer: Callable[[Any], Any] | None = sgd) -> Any:
    """A converted model after two steps: its weights are quantised, and owned if an optimizer."""
    model = model_of_blocks()
    owner = None if optimizer is None else optimizer(model)
    for _ in range(2):
        if owner is None:
            backward(model, X)
            move(model)
        else:
            step(model, X, owner)
    return model


def move(model: nn.Module) -> None:
    """By `.data`, which moves no version."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-0.05)
            parameter.grad = None


def others(model: nn.Module) -> dict[str, Tensor]:
    """Weights far from the model's, and of the same size, as a state dict."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {n: -v if v.dim() == 2 else v for n, v in state.items()}


def in_both(model: Any) -> None:
    """Fresh in evaluation, and in the next training forward."""
    assert_fresh(model, X)
    with fp8():
        output = model(X).detach()
    with torch.no_grad(), fp8():
        assert torch.equal(output, model(X))
    with torch.no_grad():
        assert numerics.sqnr(model(X), output) > 18


OPTIMIZERS = {
    "fused adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.2, fused=True),
    "foreach adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.2, foreach=True),
    "loop adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.2, foreach=False),
    "fused sgd": lambda m: torch.optim.SGD(m.parameters(), lr=5.0, fused=True),
    "foreach sgd": lambda m: torch.optim.SGD(m.parameters(), lr=5.0, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    model = model_of_blocks()
    optimizer = OPTIMIZERS[name](model)
    for _ in range(3):
        with torch.no_grad():
            before = model(X)
        step(model, X, optimizer)
        with torch.no_grad():
            assert numerics.sqnr(model(X), before) < 12, "the step is too small to tell"
        in_both(model)


def test_fused_optimizers_leave_no_trace() -> None:
    # The reason for the hook on optimizers: should this ever fail, it is needed less.
    weight = nn.Parameter(torch.ones(16))
    weight.grad = torch.ones(16)
    before = weight._version, weight.data_ptr()
    torch.optim.SGD([weight], lr=1.0, fused=True).step()
    assert (weight._version, weight.data_ptr()) == before
    assert not weight.detach().any()


def test_a_loop_without_an_optimizer() -> None:
    model = model_of_blocks()
    for _ in range(4):
        backward(model, X)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-5.0)
            parameter.grad = None
        in_both(model)


def test_a_loop_without_an_optimizer_still_moves_the_scales() -> None:
    model = trained(None)
    first = float(model.layers[0].up._fp8_input_slot.scale)
    with torch.no_grad():
        model.layers[0].norm.weight.mul_(8)
    for _ in range(2):
        backward(model, X)
        move(model)
    assert float(model.layers[0].up._fp8_input_slot.scale) < first / 4


ROUTES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": lambda m: m.load_state_dict(others(m)),
    "assign": lambda m: m.load_state_dict(others(m), assign=True),
    "data =": lambda m: [
        setattr(p, "data", others(m)[name]) for name, p in list(m.named_parameters())
    ],
    "copy_": lambda m: [p.detach().copy_(others(m)[name]) for name, p in m.named_parameters()],
    "new Parameter": lambda m: [
        setattr(module, "weight", nn.Parameter(-module.weight.detach()))
        for module in m.modules()
        if isinstance(module, nn.Linear)
    ],
    "_apply": lambda m: m._apply(lambda t: -t),
    "double and back": lambda m: (m.double(), m.load_state_dict(others(m)), m.float()),
    "init": lambda m: [nn.init.normal_(p, std=0.1) for p in m.parameters() if p.dim() == 2],
}


@pytest.mark.parametrize("owned", [True, False], ids=["owned", "not owned"])
@pytest.mark.parametrize("route", ROUTES)
def test_replaced_weights(route: str, owned: bool) -> None:
    model = trained(sgd if owned else None)
    with torch.no_grad():
        old = model(X)
        ROUTES[route](model)
        assert numerics.sqnr(model(X), old) < 12, "too small a change to tell"
    in_both(model)


REPLACEMENTS = ("load_state_dict", "assign", "parameter", "data", "in place", "invalidate")


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("route", REPLACEMENTS)
def test_a_weight_replaced_by_a_far_larger_one_does_not_clip(route: str, evaluated: bool) -> None:
    """A delayed scale belongs to the weight that it was measured on."""
    model = fp8patch.convert_model(blocks())
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    replace(model, route, 100.0)
    if evaluated:
        with torch.no_grad(), fp8():
            model(X)
        assert_weights_fit(model)
    optimizer = sgd(model, lr=0.0)
    for _ in range(3):
        step(model, X, optimizer)
        assert_weights_fit(model)


def replace(model: nn.Module, route: str, factor: float) -> None:
    larger = {name: factor * value for name, value in model.state_dict().items()}
    if route in ("load_state_dict", "assign"):
        model.load_state_dict(larger, assign=route == "assign")
        return
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        if route == "data":
            parameter.data = larger[name].clone()
        elif route == "parameter":
            setattr(model.get_submodule(owner), leaf, nn.Parameter(larger[name].clone()))
        elif route == "in place":
            with torch.no_grad():
                parameter.mul_(factor)
        else:
            parameter.data.mul_(factor)
    if route == "invalidate":
        fp8patch.invalidate(model)


def assert_weights_fit(model: nn.Module) -> None:
    linears = [m for m in model.modules() if isinstance(m, fp8patch.Float8Linear)]
    assert linears
    for module in linears:
        q = module._fp8_weight_q
        stored = numerics.dequantize(q.rows, q.scale_inv)
        assert numerics.sqnr(module.weight.detach(), stored) > 28


def test_replaced_inside_one_evaluation() -> None:
    # One `with` is one entry, in which weights are not checked again unless somebody says so.
    model = trained()
    with torch.no_grad(), fp8():
        model(X)
        model.load_state_dict(others(model))
        inside = model(X)
    with torch.no_grad(), fp8():
        assert torch.equal(model(X), inside)


@pytest.mark.parametrize("owned", [True, False], ids=["owned", "not owned"])
def test_averages_copied_in_through_data(owned: bool) -> None:
    """diffusers' and timm's EMA: `.data.copy_` into the model, evaluate, copy back, go on."""
    model = trained(sgd if owned else None)
    kept, average = copy.deepcopy(model.state_dict()), others(model)
    with torch.no_grad(), fp8():
        before = model(X)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(average[name])
    assert_fresh(model, X)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(kept[name])
    with torch.no_grad(), fp8():
        assert torch.equal(model(X), before)
    in_both(model)


def test_an_averaged_copy_follows() -> None:
    model = trained()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = sgd(model, lr=5.0)
    for _ in range(3):
        step(model, X, optimizer)
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.data.copy_(theirs.data)
        assert_fresh(average, X)
        with torch.no_grad():
            assert torch.equal(average(X), model(X))


def test_a_frozen_weight_is_still_watched() -> None:
    model = model_of_blocks()
    model.layers[0].requires_grad_(False)
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    model.layers[0].up.weight.data.mul_(-2)
    assert_fresh(model, X)
    in_both(model)


def test_invalidate() -> None:
    model = trained()
    before = {path: layer.weight._version for path, layer in converted(model).items()}
    with torch.no_grad(), fp8():
        model(X)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(others(model)[name])
        fp8patch.invalidate(model)
        inside = model(X)
    assert before == {path: layer.weight._version for path, layer in converted(model).items()}
    with torch.no_grad():
        plain = model(X)
    assert numerics.sqnr(plain, inside) > 18
    in_both(model)


def test_a_quantised_weight_follows_to_another_device() -> None:
    model = model_of_blocks()
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    layer = model.layers[0].up
    # As if the model had lain elsewhere until now.
    layer._fp8_weight_q = type(layer._fp8_weight_q)(*(t.to("meta") for t in layer._fp8_weight_q))
    model._fp8_bank.casts["elsewhere"] = [], None
    layer._fp8_device = torch.device("meta")
    model._fp8_bank._home["layers.0.up"] = torch.device("meta")
    model._fp8_bank._slots[torch.device("meta")] = model._fp8_bank._slots[torch.device("cpu")]
    step(model, X, optimizer)
    assert {t.device.type for t in layer._fp8_weight_q} == {"cpu"}
    assert not model._fp8_bank.casts
    in_both(model)


def test_tables_of_casts_go_with_the_optimizer() -> None:
    # They keep quantised weights alive.
    model = model_of_blocks()
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    casts = model._fp8_bank.casts
    casts["on a GPU"] = [], None
    backward(model, X)
    assert casts
    del optimizer
    with torch.no_grad(), fp8():
        model(X)
    assert not casts


def test_backward_through_weights_that_have_stepped_raises() -> None:
    # As in stock PyTorch: the gradient would be of no function that was ever computed.
    def check(model: Any) -> None:
        optimizer = sgd(model)
        for _ in range(2):
            step(model, X, optimizer)
        with fp8():
            late, soon = loss_of(model, X), loss_of(model, X)
        optimizer.zero_grad()
        soon.backward()
        optimizer.step()
        with fp8():
            model(X)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()

    check(model_of_blocks())


def test_the_checks_can_fail() -> None:
    model = trained()
    layer = model.layers[0].up
    layer._fp8_weight_q = layer._fp8_weight_q._replace(rows=layer._fp8_weight_q.rows.flip(0))
    with falls():
        assert_fresh(fp8patch.revert_model(copy.deepcopy(model)), X)
    assert ran_in_fp8(model, X)
