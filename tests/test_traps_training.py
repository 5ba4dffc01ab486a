"""Traps of unusual training loops: two models, kept graphs, frozen models, late pruning."""

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from trap_models import (
    VOCAB,
    WIDTH,
    assert_fresh,
    backward,
    bert,
    blocks,
    converted,
    fp8,
    grads,
    llama,
    loss_of,
    mixed,
    moved,
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
from fp8patch import numerics, regions
from fp8patch.errors import ConversionError

X = noise(5, WIDTH)


def test_two_models_in_one_loss_keep_their_own_steps() -> None:
    # As a GAN: one loss through both, two optimizers that step in turn.
    first, second = fp8patch.convert_model(blocks()), fp8patch.convert_model(blocks(depth=1))
    one, other = sgd(first), sgd(second)

    def both(x: Tensor) -> None:
        with fp8():
            loss = loss_of(second, first(x))
        loss.backward()

    for _ in range(2):
        both(X)
        one.step()
        other.step()
    both(X)
    fixed = scales(first), scales(second)
    one.step()
    both(noise(5, WIDTH, seed=3))
    assert scales(first) != fixed[0]
    assert scales(second) == fixed[1]
    other.step()
    both(X)
    assert scales(second) != fixed[1]
    assert regions.active() is None


def test_a_graph_that_is_kept_and_run_twice() -> None:
    model = fp8patch.convert_model(blocks())
    for _ in range(2):
        step(model, X, sgd(model))
    model.zero_grad()
    with fp8():
        loss = loss_of(model, X)
    loss.backward(retain_graph=True)
    once = grads(model)
    model.zero_grad()
    loss.backward()
    assert same(grads(model), once)


def test_gradients_of_gradients_are_refused_and_not_wrong() -> None:
    model = fp8patch.convert_model(blocks())
    x = X.clone().requires_grad_()
    with fp8():
        loss = loss_of(model, x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
    assert regions.active() is None


def test_a_frozen_model_passes_gradients_on() -> None:
    # Prompt tuning: nothing of the model trains, its input does.
    model = fp8patch.convert_model(blocks())
    model.requires_grad_(False)
    prompt = nn.Parameter(X.clone())
    optimizer = torch.optim.SGD([prompt], lr=1.0)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(backward(model, prompt))
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(scale > 0 for row in scales(model).values() for scale in row)
    assert not any(p.grad is not None for p in model.parameters())


def test_a_frozen_part_without_any_gradient() -> None:
    model = fp8patch.convert_model(blocks(depth=3))
    model.layers[:2].requires_grad_(False)
    before, optimizer = snapshot(model), sgd(model)
    for _ in range(3):
        step(model, X, optimizer)
    assert moved(before, model) == {name for name in before if name.startswith("layers.2")}
    rows = scales(model)
    assert rows["layers.0.up"][2] == 0 < rows["layers.2.up"][2]
    # Thawed: its gradients' scales are cold, and are taken from the gradients themselves.
    model.requires_grad_(True)
    step(model, X, optimizer)
    stock = blocks(depth=3)
    stock.load_state_dict(model.state_dict())
    model.zero_grad()
    backward(model, X)
    loss_of(stock, X).backward()
    name = "layers.0.up.weight"
    assert numerics.sqnr(stock.get_parameter(name).grad, grads(model)[name]) > 15


def test_unfrozen_layer_by_layer() -> None:
    model = fp8patch.convert_model(blocks(depth=2))
    model.layers[0].requires_grad_(False)
    for _ in range(2):
        step(model, X, torch.optim.SGD(model.layers[1].parameters(), lr=0.05))
    model.requires_grad_(True)
    before, optimizer = snapshot(model), sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    assert moved(before, model) == set(before)
    assert_fresh(model, X)


def test_two_optimizers_own_one_model() -> None:
    model = fp8patch.convert_model(blocks())
    first = torch.optim.SGD(model.layers[0].parameters(), lr=0.05)
    second = torch.optim.AdamW(model.layers[1].parameters(), lr=0.01)
    for _ in range(3):
        before = snapshot(model)
        first.zero_grad()
        second.zero_grad()
        backward(model, X)
        first.step()
        second.step()
        assert moved(before, model) == set(before)
        assert_fresh(model, X)


def test_an_optimizer_without_our_parameters_moves_nothing() -> None:
    model = fp8patch.convert_model(blocks())
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    backward(model, X)
    fixed = scales(model)
    stranger = nn.Parameter(torch.ones(3))
    stranger.grad = torch.ones(3)
    torch.optim.SGD([stranger], lr=0.1).step()
    backward(model, noise(5, WIDTH, seed=2))
    assert scales(model) == fixed


@pytest.mark.parametrize(
    "dress",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        parametrizations.weight_norm,
        parametrizations.orthogonal,
    ],
    ids=["pruned", "weight_norm", "orthogonal"],
)
def test_weights_that_are_computed_from_now_on(dress: Any) -> None:
    model = fp8patch.convert_model(blocks(), fp8patch.Recipe(margin=3))
    step(model, X, sgd(model))
    layer = model.layers[0].up
    dress(layer)
    before, optimizer = snapshot(model), sgd(model)
    for _ in range(3):
        step(model, X, optimizer)
        assert_fresh(model, X)
    assert moved(before, model) == set(before)


def test_resized_heads_stay_in_fp8_where_the_recipe_pads() -> None:
    recipe = fp8patch.Recipe(misaligned="pad", include=("cls.predictions.decoder",), margin=2)
    model = fp8patch.convert_model(bert(), recipe)
    step(model, tokens(), sgd(model))
    model.resize_token_embeddings(VOCAB + 5)
    head = model.cls.predictions.decoder
    before = snapshot(model)
    for _ in range(2):
        step(model, tokens(), sgd(model))
    assert moved(before, model) == set(before)
    hidden = noise(3, WIDTH)
    with torch.no_grad():
        plain = head(hidden)
        with fp8():
            rounded = head(hidden)
    assert rounded.shape == (3, VOCAB + 5)
    assert not torch.equal(plain, rounded)
    assert numerics.sqnr(plain, rounded) > 18


def test_gpt2_with_cached_generation_after_training() -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = fp8patch.convert_model(transformers.GPT2LMHeadModel(config))
    assert all(isinstance(m, fp8patch.Float8Conv1D) for m in converted(model).values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = snapshot(model)
    prompt = tokens(2, 6)
    for _ in range(25):
        step(model, prompt, optimizer, mixed)
    assert moved(before, model) == set(before)
    model.eval()
    with torch.inference_mode(), mixed():
        output = model.generate(prompt[:, :3], max_new_tokens=3, do_sample=False)
    assert torch.equal(output, prompt)
    model.train()
    step(model, prompt, optimizer, mixed)


def test_a_part_called_by_itself() -> None:
    # An encoder taken out of its model: no root announces the forward.
    model = fp8patch.convert_model(llama())
    layer = model.model.layers[0].mlp
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = snapshot(layer)
    x = noise(2, 5, WIDTH)
    for _ in range(3):
        step(layer, x, optimizer)
    assert moved(before, layer) == set(before)
    assert ran_in_fp8(layer, x)
    rows = {path: row for path, row in scales(layer).items() if "_proj" in path}
    assert len(rows) == 3
    assert all(scale > 0 for row in rows.values() for scale in row)
    step(model, tokens(), sgd(model))
    assert len(scales(model)) == 14


def test_converted_twice_is_refused() -> None:
    model = fp8patch.convert_model(blocks())
    with pytest.raises(ConversionError, match="already converted"):
        fp8patch.convert_model(model)
    with pytest.raises(ConversionError, match="already converted"):
        fp8patch.convert_model(nn.Sequential(nn.Linear(WIDTH, WIDTH), model))


def test_a_dropped_model_is_freed() -> None:
    # Hooks, optimizer hooks and hooks on outputs must not keep it.
    model = fp8patch.convert_model(blocks())
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    bank, layer = weakref.ref(model._fp8_bank), weakref.ref(model.layers[0].up)
    with fp8():
        output = model(X)
    del model, optimizer
    gc.collect()
    assert layer() is None
    assert bank() is None
    # The graph that is left still runs backward, in FP8.
    output.sum().backward()
    assert regions.active() is None
