"""PEFT: LoRA over a converted base, converted after, merged and unmerged, checkpointed."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from trap_models import (
    assert_fresh,
    backward,
    converted,
    fp8,
    grads,
    llama,
    mixed,
    moved,
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
from fp8patch import numerics, regions

# peft and scripts say gradient_checkpointing, which transformers 5.24 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")

TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(model: Any, **kwargs: Any) -> Any:
    config = LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, lora_dropout=0.0, **kwargs)
    return seeded(lambda: get_peft_model(model, config), seed=3)


# Room for a merge that makes weights larger than they were in training.
ROOM = fp8patch.Recipe(margin=3)


def convert_then_lora(recipe: Any = None) -> Any:
    return lora(fp8patch.convert_model(llama(), recipe))


def lora_then_convert(recipe: Any = None) -> Any:
    return fp8patch.convert_model(lora(llama()), recipe)


ORDERS = pytest.mark.parametrize(
    "make", [convert_then_lora, lora_then_convert], ids=["convert first", "lora first"]
)


def train(model: Any, steps: int = 3, region: Any = fp8, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01
    )
    return [step(model, tokens(), optimizer, region) for _ in range(steps)]


@ORDERS
def test_the_base_runs_in_fp8_and_the_adapters_do_not(make: Any) -> None:
    model = make()
    paths = set(converted(model))
    assert len(paths) == 14
    assert not any("lora" in path for path in paths)
    assert {path.split(".")[-1] for path in paths} == {
        "base_layer",
        "k_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
    }
    adapters = [m for n, m in model.named_modules() if n.endswith("lora_A.default")]
    assert len(adapters) == 6
    assert all(type(adapter) is nn.Linear for adapter in adapters)
    before = snapshot(model)
    losses = train(model, 6, mixed)
    assert losses[-1] < losses[0]
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora" in name for name in trainable)
    assert moved(before, model) == trainable
    assert set(scales(model)) == paths
    assert ran_in_fp8(model, tokens())


def test_both_orders_compute_the_same() -> None:
    first, second = convert_then_lora(), lora_then_convert()
    assert train(first) == train(second)
    assert list(scales(first).values()) == list(scales(second).values())


@ORDERS
def test_scales_move_under_peft(make: Any) -> None:
    # PEFT calls the `forward` of the model that it wraps, past that model's hooks.
    model = make()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        step(model, tokens(), optimizer)
    fixed = scales(model)
    backward(model, tokens(seed=5))
    moved_once = scales(model)
    backward(model, tokens(seed=6))
    assert moved_once != fixed
    assert scales(model) == moved_once
    optimizer.step()
    backward(model, tokens(seed=7))
    assert scales(model) != moved_once
    assert regions.active() is None
    # Frozen bases have no gradient of their own, but pass one on: that cast has a scale too.
    first = {f"{part}_proj" for part in "qkv"}
    for path, row in moved_once.items():
        below = "layers.0" not in path or not first & set(path.split("."))
        assert (row[2] > 0) == below, path


@ORDERS
@pytest.mark.parametrize("everything", [False, True], ids=["adapters", "all parameters"])
def test_merge_and_unmerge(make: Any, everything: bool) -> None:
    """A merge adds to `weight.data`: neither version nor address moves."""
    model = make(ROOM)
    parameters = [p for p in model.parameters() if p.requires_grad or everything]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)
    train(model, 4, optimizer=optimizer)
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    key = layer.base_layer.weight._version, layer.base_layer.weight.data_ptr()
    with torch.no_grad():
        plain = model(tokens()).logits
    model.merge_adapter()
    assert (layer.base_layer.weight._version, layer.base_layer.weight.data_ptr()) == key
    assert_fresh(model, tokens())
    with torch.no_grad():
        assert torch.allclose(model(tokens()).logits, plain, atol=1e-4)
    model.unmerge_adapter()
    assert_fresh(model, tokens())
    train(model, 1, optimizer=optimizer)
    # Merged once more in the middle of a step, when nothing is due.
    backward(model, tokens())
    model.merge_adapter()
    assert_fresh(model, tokens())


@ORDERS
def test_merge_and_unload(make: Any) -> None:
    model = make(ROOM)
    train(model)
    with torch.no_grad():
        plain = model(tokens()).logits
    merged = model.merge_and_unload()
    assert len(converted(merged)) == 14
    assert not any("lora" in name for name, _ in merged.named_modules())
    with torch.no_grad():
        assert torch.allclose(merged(tokens()).logits, plain, atol=1e-4)
    assert_fresh(merged, tokens())
    before = snapshot(merged)
    for parameter in merged.parameters():
        parameter.requires_grad_(True)
    optimizer = sgd(merged)
    for _ in range(2):
        step(merged, tokens(), optimizer)
    assert moved(before, merged) == set(before)


@ORDERS
def test_disabled_adapters(make: Any) -> None:
    model = make(ROOM)
    train(model)
    with torch.no_grad():
        adapted = model(tokens()).logits
    with model.disable_adapter():
        with torch.no_grad():
            assert numerics.sqnr(model(tokens()).logits, adapted) < 12, "too little to tell"
        assert_fresh(model, tokens())
    assert_fresh(model, tokens())


@ORDERS
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
def test_gradient_checkpointing(make: Any, reentrant: bool) -> None:
    def run(recompute: bool) -> Any:
        model = make()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        # Or the first layers pass on no gradient, and reentrant checkpointing needs one.
        model.enable_input_require_grads()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        seen: list[Any] = []
        for seed in range(3):
            optimizer.zero_grad()
            seen.append((backward(model, tokens(seed=seed)), grads(model)))
            optimizer.step()
            assert ran_in_fp8(model, tokens())
        return seen, scales(model)

    (steps, fixed), (plain_steps, plain_fixed) = run(True), run(False)
    for (loss, gradients), (plain_loss, plain_gradients) in zip(steps, plain_steps, strict=True):
        assert loss == plain_loss
        assert same(gradients, plain_gradients)
    assert fixed == plain_fixed


def test_fully_trained_parts_beside_the_adapters() -> None:
    # `modules_to_save` deep-copies a module: the copy is what trains.
    model = lora(fp8patch.convert_model(llama()), modules_to_save=["o_proj"])
    before = snapshot(model)
    train(model)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert any("modules_to_save" in name for name in trainable)
    assert moved(before, model) == trainable


def test_a_copy_of_an_adapted_model() -> None:
    model = convert_then_lora()
    train(model)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        train(each)
    assert same(snapshot(model), snapshot(twin))
    fixed = scales(model)
    train(twin)
    assert scales(model) == fixed
