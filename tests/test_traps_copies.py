"""Copies, pickles and moves: a copy is a model of its own, and so is its FP8 state."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from trap_models import (
    WIDTH,
    assert_fresh,
    backward,
    bert,
    blocks,
    converted,
    falls,
    fp8,
    llama,
    loss_of,
    mixed,
    moved,
    naive_swap,
    noise,
    ran_in_fp8,
    same,
    scales,
    sgd,
    snapshot,
    step,
    tokens,
)

import fp8patch

X = noise(5, WIDTH)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved_whole(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPY = pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved_whole])


def trained(steps: int = 2, **kwargs: Any) -> Any:
    model = fp8patch.convert_model(blocks(**kwargs))
    optimizer = sgd(model)
    for seed in range(steps):
        step(model, noise(5, WIDTH, seed=seed), optimizer)
    return model


def run(model: Any, x: Tensor = X) -> Tensor:
    with torch.no_grad(), fp8():
        output: Tensor = model(x)
    return output


@COPY
def test_a_copy_computes_the_same(copied: Any) -> None:
    model = trained()
    twin = copied(model)
    assert list(converted(twin)) == list(converted(model))
    assert type(twin.layers[0].up) is fp8patch.Float8Linear
    assert torch.equal(run(twin), run(model))
    assert scales(twin) == scales(model)
    assert torch.equal(twin(X), model(X))


@COPY
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_copy_trains_on_as_the_original_would(copied: Any, recipe: str) -> None:
    model = fp8patch.convert_model(blocks(), recipe)
    for seed in range(2):
        step(model, noise(5, WIDTH, seed=seed), sgd(model))
    twin = copied(model)
    for each in (model, twin):
        optimizer = sgd(each)
        for seed in (7, 8, 9):
            step(each, noise(5, WIDTH, seed=seed), optimizer)
    assert same(snapshot(twin), snapshot(model))
    assert scales(twin) == scales(model)


@COPY
def test_training_one_leaves_the_other_alone(copied: Any) -> None:
    model = trained()
    twin = copied(model)
    output, fixed = run(model), scales(model)
    other_output, other_fixed = run(twin), scales(twin)
    optimizer = sgd(twin, lr=1.0)
    for _ in range(3):
        step(twin, 7 * X, optimizer)
    assert scales(twin) != other_fixed
    assert scales(model) == fixed
    assert torch.equal(run(model), output)
    assert model._fp8_bank is not twin._fp8_bank
    assert not torch.equal(run(twin), other_output)
    fixed = scales(twin)
    for _ in range(2):
        step(model, 3 * X, sgd(model))
    assert scales(twin) == fixed


def test_a_copy_runs_its_own_weights() -> None:
    # A forward or a hook that captured the original would compute with the original's weights.
    model = trained()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_fresh(twin, X)
    assert run(twin).abs().sum() > 0


@COPY
def test_a_single_layer(copied: Any) -> None:
    model = trained()
    layer = model.layers[0].up
    twin = copied(layer)
    assert type(twin) is fp8patch.Float8Linear
    assert torch.equal(run(twin), run(layer))
    fixed = scales(model)
    optimizer = sgd(twin)
    for _ in range(3):
        step(twin, 9 * X, optimizer)
    assert scales(model) == fixed
    assert ran_in_fp8(twin, X)
    before = snapshot(model)
    step(model, X, sgd(model))
    assert moved(before, model) == set(before)


def test_a_layer_copied_within_its_model() -> None:
    # nn.TransformerEncoder, and scripts that grow a model, deep-copy a trained block.
    model = fp8patch.convert_model(blocks(depth=1), fp8patch.Recipe(amax_history_len=1))
    for _ in range(2):
        step(model, X, sgd(model))
    model.layers.append(copy.deepcopy(model.layers[0]))
    model.depth = 2
    optimizer = sgd(model)
    for _ in range(3):
        before = snapshot(model)
        step(model, X, optimizer)
        assert moved(before, model) == set(before)
    first, second = scales(model)["layers.0.up"], scales(model)["layers.1.up"]
    assert first != second
    assert all(scale > 0 for scale in (*first, *second))


def test_copied_before_the_first_step() -> None:
    model = fp8patch.convert_model(blocks())
    twin = copy.deepcopy(model)
    for each in (model, twin):
        optimizer = sgd(each)
        for _ in range(2):
            step(each, X, optimizer)
    assert same(snapshot(model), snapshot(twin))


def test_copied_between_forward_and_backward() -> None:
    model = trained()
    model.zero_grad()
    with fp8():
        loss = loss_of(model, X)
    twin = copy.deepcopy(model)
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in twin.parameters())
    sgd(model).step()
    step(twin, X, sgd(twin))
    assert same(snapshot(model), snapshot(twin))


def test_a_copy_without_an_optimizer_still_moves_its_scales() -> None:
    # The original's optimizer is none of the copy's.
    twin = copy.deepcopy(trained())
    for _ in range(2):
        backward(twin, X)
        for parameter in twin.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.05)
            parameter.grad = None
    fixed = scales(twin)
    with torch.no_grad():
        for block in twin.layers:
            block.norm.weight.mul_(8)
    for _ in range(2):
        backward(twin, X)
    assert all(scales(twin)[path][0] < fixed[path][0] for path in fixed)


def test_averaged_model() -> None:
    model = trained()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    optimizer = sgd(model, lr=0.5)
    for _ in range(3):
        step(model, X, optimizer)
        average.update_parameters(model)
        assert_fresh(average, X)


def test_huggingface_models(tmp_path: Path) -> None:
    for model in (fp8patch.convert_model(llama()), fp8patch.convert_model(bert())):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            step(model, tokens(), optimizer, mixed)
        torch.save(model, tmp_path / "whole.pt")
        loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
        for twin in (copy.deepcopy(model), loaded):
            with torch.no_grad(), mixed():
                a, b = model(tokens()).logits, twin(tokens()).logits
            assert torch.equal(a, b)
            embedding = twin.get_input_embeddings().weight
            assert embedding is not model.get_input_embeddings().weight
            tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
            assert (twin.get_output_embeddings().weight is embedding) == tied


def test_the_state_dict_is_stock() -> None:
    stock, model = blocks(), trained()
    assert list(model.state_dict()) == list(stock.state_dict())
    stock.load_state_dict(model.state_dict())
    model.load_state_dict(stock.state_dict())
    with falls():
        stock.load_state_dict(naive_swap(blocks()).state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_to_another_dtype_and_back(dtype: torch.dtype) -> None:
    def check(model: Any) -> None:
        fixed = scales(model)
        model.to(dtype)
        with torch.no_grad(), fp8():
            assert model(X.to(dtype)).dtype == dtype
        # Rounded to BF16, a scale would be off by up to 0.4 %.
        assert scales(model) == fixed
        step(model, X.to(dtype), sgd(model))
        model.float()
        before = snapshot(model)
        step(model, X, sgd(model))
        assert moved(before, model) == set(before)
        assert_fresh(model, X)

    check(trained())
    for cast in (nn.Module.half, nn.Module.bfloat16):
        model = cast(trained())
        x = X.to(model.layers[0].up.weight.dtype)
        assert_fresh(model, x)
    naive = naive_swap(blocks())
    step(naive, X, sgd(naive))
    history = naive.layers[0].up.history.clone()
    naive.to(dtype).float()
    with falls():
        assert torch.equal(naive.layers[0].up.history, history)


def test_to_a_device_it_is_on_already_changes_nothing() -> None:
    model, twin = trained(), trained()
    model.to("cpu").cpu().to(torch.device("cpu"), torch.float32)
    for each in (model, twin):
        for _ in range(2):
            step(each, X, sgd(each))
    assert same(snapshot(model), snapshot(twin))


def test_reverting_gives_stock_objects() -> None:
    model, stock = trained(), blocks()
    parameters = [id(p) for p in model.parameters()]
    fp8patch.revert_model(model)
    assert [id(p) for p in model.parameters()] == parameters
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    assert not [k for m in model.modules() for k in vars(m) if k.startswith("_fp8")]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with fp8():
        rounded = model(X)
    assert torch.equal(rounded, model(X))
    fp8patch.convert_model(model)
    step(model, X, sgd(model))


@COPY
def test_a_class_made_for_an_allowlisted_subclass(copied: Any) -> None:
    # Its Float8 class is made at run time: a pickle can't name it.
    model = nn.Sequential(FalconLinear(WIDTH, WIDTH), nn.GELU(), FalconLinear(WIDTH, WIDTH))
    fp8patch.convert_model(model)
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    twin = copied(model)
    assert type(twin[0]) is type(model[0])
    assert isinstance(twin[0], FalconLinear)
    assert torch.equal(run(twin), run(model))
    step(twin, X, sgd(twin))
    assert type(fp8patch.revert_model(twin)[0]) is FalconLinear


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_what_was_compiled_stays_with_the_original(copied: Any) -> None:
    """As nn.Module has it: a compiled call knows the module that it was made of."""
    model = fp8patch.convert_model(blocks())
    for layer in (model.layers[0].up, model.layers[0].norm):
        layer.compile(backend="eager")
    twin = copied(model)
    for layer in (twin.layers[0].up, twin.layers[0].norm):
        assert layer._compiled_call_impl is None
    assert type(twin.layers[0].norm) is fp8patch.Float8LayerNorm
