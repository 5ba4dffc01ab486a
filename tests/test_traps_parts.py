"""Parts of a model on their own: reverted, parametrized, pickled into another process, reloaded."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from trap_models import WIDTH, blocks, fp8, noise, sgd, step

import fp8patch
from fp8patch import numerics

X = noise(7, WIDTH)


def test_a_part_is_reverted_and_the_rest_goes_on() -> None:
    model = fp8patch.convert_model(blocks())
    optimizer = sgd(model)
    step(model, X, optimizer)
    fp8patch.revert_model(model.layers[0])
    for _ in range(2):
        step(model, X, optimizer)
    assert type(model.layers[0].up) is nn.Linear
    assert isinstance(model.layers[1].up, fp8patch.Float8Linear)
    # What was reverted is in no update any more.
    assert {m._fp8_path for m in model._fp8_bank.members()} == {"layers.1.up", "layers.1.down"}


def test_what_was_parametrized_after_conversion_is_not_reverted_into_ruin() -> None:
    model = fp8patch.convert_model(blocks())
    nn.utils.parametrizations.weight_norm(model.layers[0].up)
    with pytest.raises(fp8patch.ConversionError, match=r"layers\.0\.up is a Parametrized"):
        fp8patch.revert_model(model)
    assert isinstance(model.layers[1].up, fp8patch.Float8Linear), "half reverted"
    nn.utils.parametrize.remove_parametrizations(model.layers[0].up, "weight")
    fp8patch.revert_model(model)
    assert type(model.layers[0].up) is nn.Linear


def test_a_plan_for_another_model_changes_nothing() -> None:
    plan = fp8patch.plan_model(blocks())
    other = blocks()
    del other.layers[1]
    with pytest.raises(fp8patch.ConversionError, match=r"layers\.1"):
        fp8patch.convert_model(other, plan)
    assert type(other.layers[0].up) is nn.Linear
    fp8patch.convert_model(other)


def test_a_pickled_model_loads_in_a_process_that_converted_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    torch.save(fp8patch.convert_model(model, include=["*"]), tmp_path / "model.pt")
    code = (
        "import sys, torch; m = torch.load(sys.argv[1], weights_only=False); "
        "print(*(type(part).__name__ for part in m))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.pt")], capture_output=True, text=True
    )
    assert done.stdout == "Float8Linear Float8LayerNorm\n", done.stderr


def test_a_model_built_under_inference_mode() -> None:
    with torch.inference_mode():
        model = blocks()
    fp8patch.convert_model(model)
    with torch.inference_mode(), fp8():
        assert torch.isfinite(model(X)).all()


def test_other_weights_loaded_start_other_scales() -> None:
    """Activation scales of one model say nothing about the next, in evaluation too."""
    model = fp8patch.convert_model(blocks())
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    state = {name: 30 * value.roll(1, 0) for name, value in blocks().state_dict().items()}
    fresh = fp8patch.convert_model(blocks())
    for each in (model, fresh):
        each.load_state_dict(state)
    with torch.no_grad(), fp8():
        assert torch.equal(model(X), fresh(X))


def test_the_same_weights_loaded_again_keep_the_scales() -> None:
    model = fp8patch.convert_model(blocks())
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    before = dict(model._fp8_bank.state())
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    after = dict(model._fp8_bank.state())
    assert before.keys() == after.keys()
    for key, state in before.items():
        assert all(torch.equal(a, b) for a, b in zip(state, after[key], strict=True)), key


@pytest.mark.parametrize("change", ["short", "long", "negative", "dtype", "none"])
def test_extra_state_that_is_none_of_ours_is_refused(change: str) -> None:
    model = fp8patch.convert_model(blocks(), extra_state=True)
    step(model, X, sgd(model))
    state = model.state_dict()
    key = next(name for name in state if name.endswith("_extra_state"))
    packed = state[key]
    state[key] = {
        "short": packed[:-1],
        "long": torch.cat([packed, packed]),
        "negative": -packed,
        "dtype": packed.float(),
        "none": None,
    }[change]
    if change == "none":  # as a loader that fills what it has not found
        fp8patch.convert_model(blocks()).load_state_dict(state)
        return
    with pytest.raises(fp8patch.CheckpointError, match="_extra_state is not FP8 state"):
        fp8patch.convert_model(blocks()).load_state_dict(state)


def test_tiny_gradients_are_not_floored_away() -> None:
    model = fp8patch.convert_model(nn.Sequential(nn.Linear(16, 16)), "current", include=["*"])
    x = noise(8, 16).requires_grad_()
    with fp8():
        y = model(x)
    grad = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    y.backward(grad * 1e-24)
    expected = grad @ model[0].weight.detach() * 1e-24
    assert x.grad is not None
    assert numerics.sqnr(expected.double() * 1e24, x.grad.double() * 1e24) > 20


def test_a_frozen_weight_that_an_adapter_was_merged_into() -> None:
    """`.data +=`, as PEFT does it, on weights that no optimizer owns: nothing says so."""
    model = fp8patch.convert_model(blocks())
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data += 5 * parameter.data
    with torch.no_grad(), fp8():
        model(X)
    for module in (model.layers[0].up, model.layers[1].down):
        q = module._fp8_weight_q
        stored = numerics.dequantize(q.rows, q.scale_inv)
        assert numerics.sqnr(module.weight, stored) > 28


def test_scales_move_on_when_the_optimizer_is_gone() -> None:
    model = fp8patch.convert_model(blocks())
    optimizer = sgd(model)
    for _ in range(3):
        step(model, X, optimizer)
    del optimizer
    gc.collect()  # an optimizer is part of a cycle
    rolled = []
    for _ in range(6):
        with fp8():
            y = model(X)
        y.square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
        rolled.append(len(model._fp8_bank.read("layers.0.up", 2).history))
    assert rolled == [3, 4, 5, 6, 7, 8]
