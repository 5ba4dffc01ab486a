"""Traps of how modules are called: odd M, shared layers, views, several forwards, eval between."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from trap_models import (
    WIDTH,
    backward,
    blocks,
    converted,
    falls,
    fp8,
    grads,
    llama,
    loss_of,
    mixed,
    moved,
    naive_swap,
    noise,
    ran_in_fp8,
    same,
    scales,
    seeded,
    sgd,
    snapshot,
    step,
    tokens,
)

import fp8patch
from fp8patch import numerics


def pending(model: nn.Module) -> dict[str, list[float]]:
    """The amax observed since the last update, of every slot."""
    return {
        path: [float(s.amax) for s in (m._fp8_input_slot, m._fp8_weight_slot, m._fp8_grad_slot)]
        for path, m in converted(model).items()
        if m._fp8_input_slot is not None
    }


def near(a: Tensor, b: Tensor, decibels: float = 18.0) -> bool:
    return numerics.sqnr(a, b) > decibels


# -- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
@pytest.mark.parametrize("m", [1, 2, 197])
def test_any_number_of_tokens(m: int, recipe: str) -> None:
    stock, model = blocks(), fp8patch.convert_model(blocks(), recipe)
    x = noise(m, WIDTH)
    for _ in range(2):
        backward(model, x)
        loss_of(stock, x).backward()
    assert ran_in_fp8(model, x)
    for name, gradient in grads(model).items():
        assert near(stock.get_parameter(name).grad, gradient, 15.0), name


def test_no_tokens_at_all() -> None:
    # An expert that no token was sent to.
    model = fp8patch.convert_model(blocks())
    optimizer = sgd(model)
    step(model, noise(3, WIDTH), optimizer)
    step(model, noise(3, WIDTH), optimizer)
    before = scales(model)
    with fp8():
        output = model(noise(0, WIDTH))
    assert output.shape == (0, WIDTH)
    output.sum().backward()
    optimizer.step()
    step(model, noise(3, WIDTH), optimizer)
    assert all(scale > 0 for row in before.values() for scale in row)
    # Nothing was seen of inputs and gradients, so their scales stay.
    assert [row[::2] for row in scales(model).values()] == [row[::2] for row in before.values()]
    assert all(torch.isfinite(p).all() for p in model.parameters())


# -- one module, several calls -------------------------------------------------------------------


def test_a_shared_layer_keeps_one_scale_through_its_calls() -> None:
    model = fp8patch.convert_model(blocks(depth=6, shared=True))
    optimizer = sgd(model, lr=0.01)
    for seed in (1, 2):
        step(model, noise(5, WIDTH, seed=seed), optimizer)
    seen: set[float] = set()
    layer = model.layers[0].up
    layer.register_forward_hook(lambda m, *_: seen.add(float(m._fp8_input_slot.scale)))
    inputs: list[float] = []
    layer.register_forward_pre_hook(
        lambda m, args: inputs.append(float(args[0].detach().abs().max()))
    )
    backward(model, noise(5, WIDTH, seed=3))
    assert len(inputs) == 6
    assert len(seen) == 1
    assert pending(model)["layers.0.up"][0] == max(inputs)
    with falls():
        naive = naive_swap(blocks(depth=6, shared=True))
        backward(naive, noise(5, WIDTH))
        state = naive.layers[0].up.history.clone()
        naive.layers[0](noise(5, WIDTH))
        assert torch.equal(naive.layers[0].up.history, state)


def test_albert_shares_its_layer() -> None:
    config = transformers.AlbertConfig(
        vocab_size=96,
        embedding_size=16,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = seeded(lambda: transformers.AlbertForMaskedLM(config))
    fp8patch.convert_model(model)
    before, optimizer = snapshot(model), sgd(model)
    losses = [step(model, tokens(), optimizer, mixed) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert {n for n in before if "albert_layers" in n and "key.bias" not in n} <= moved(
        before, model
    )


def test_two_forwards_before_one_backward() -> None:
    def both(model: Any) -> dict[str, Tensor]:
        model.zero_grad()
        with fp8():
            first, second = loss_of(model, noise(5, WIDTH)), loss_of(model, noise(7, WIDTH, seed=2))
        (first + second).backward()
        return grads(model)

    def in_turn(model: Any) -> dict[str, Tensor]:
        model.zero_grad()
        # The other way round: backward adds the later graph's gradients first.
        backward(model, noise(7, WIDTH, seed=2))
        backward(model, noise(5, WIDTH))
        return grads(model)

    def check(model: Any) -> None:
        optimizer = sgd(model)
        for seed in (3, 4):
            step(model, noise(5, WIDTH, seed=seed), optimizer)
        assert same(both(model), in_turn(model))

    check(fp8patch.convert_model(blocks()))
    with falls():
        check(naive_swap(blocks()))


def test_scales_hold_still_within_an_optimizer_step() -> None:
    model = fp8patch.convert_model(blocks(depth=1))
    optimizer = sgd(model)
    step(model, noise(5, WIDTH), optimizer)
    step(model, noise(5, WIDTH), optimizer)
    optimizer.zero_grad()
    backward(model, noise(5, WIDTH, seed=3))
    fixed = scales(model)
    seen = pending(model)
    for seed in range(4, 7):
        backward(model, 3 * noise(5, WIDTH, seed=seed))
        assert scales(model) == fixed
        model.eval()
        assert ran_in_fp8(model, 100 * noise(5, WIDTH))
        model.train()
        assert scales(model) == fixed
    grown = pending(model)
    assert all(b >= a for path in seen for a, b in zip(seen[path], grown[path], strict=True))
    assert grown != seen
    optimizer.step()
    assert scales(model) == fixed
    backward(model, noise(5, WIDTH))
    assert scales(model) != fixed
    row, amax = scales(model)["layers.0.down"], grown["layers.0.down"]
    assert row[0] == pytest.approx(448 / amax[0])


def test_evaluation_between_steps_changes_nothing() -> None:
    def run(evaluate: bool) -> dict[str, Tensor]:
        model = fp8patch.convert_model(blocks())
        optimizer = sgd(model)
        for seed in range(4):
            step(model, noise(5, WIDTH, seed=seed), optimizer)
            if evaluate:
                with torch.no_grad(), fp8():
                    model(50 * noise(3, WIDTH))
        return snapshot(model)

    assert same(run(True), run(False))


def test_inference_mode_first_and_between() -> None:
    def run(evaluate: bool) -> dict[str, Tensor]:
        model = fp8patch.convert_model(blocks())
        optimizer = sgd(model)
        for seed in range(3):
            if evaluate:
                with torch.inference_mode(), fp8():
                    assert not model(noise(3, WIDTH)).requires_grad
            step(model, noise(5, WIDTH, seed=seed), optimizer)
        return snapshot(model)

    assert same(run(True), run(False))


# -- precision of the model ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models_without_autocast(dtype: torch.dtype) -> None:
    model = fp8patch.convert_model(blocks().to(dtype))
    before, optimizer = snapshot(model), sgd(model, lr=0.5)
    x = noise(5, WIDTH).to(dtype)
    for _ in range(2):
        step(model, x, optimizer)
    assert all(g.dtype == dtype for g in grads(model).values())
    assert {n for n in before if "norm" not in n} <= moved(before, model)
    assert ran_in_fp8(model, x)


def test_generate_with_a_cache_under_autocast() -> None:
    model = fp8patch.convert_model(llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prompt = tokens(2, 6)
    for _ in range(20):
        step(model, prompt, optimizer, mixed)
    model.eval()
    fixed = scales(model)
    with mixed():
        output = model.generate(prompt[:, :3], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(output, prompt)
    assert scales(model) == fixed
    model.train()
    assert step(model, prompt, optimizer, mixed) < 1.0
