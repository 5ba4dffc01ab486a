"""Gradient checkpointing: recomputation sees what the first pass saw, to the last bit."""

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trap_models import (
    WIDTH,
    Block,
    Blocks,
    backward,
    blocks,
    falls,
    fp8,
    grads,
    llama,
    mixed,
    naive_swap,
    noise,
    ran_in_fp8,
    same,
    scales,
    seeded,
    sgd,
    tokens,
)

import fp8patch
from fp8patch import regions

# Renamed in transformers 5.24; scripts use the old name, and every version has it.
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")


class Checkpointed(Blocks):
    """`Blocks` that recompute."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(x)
        for i in range(self.depth):
            x = checkpoint(self.layers[i % len(self.layers)], x, use_reentrant=self.reentrant)
        return x


def checkpointed(reentrant: bool, **kwargs: Any) -> Any:
    model = seeded(lambda: Checkpointed(**kwargs))
    model.reentrant = reentrant
    return model


def train(model: Any, inputs: list[Tensor], region: Any = fp8) -> list[Any]:
    """[(loss, gradients)] of each step; evaluates with FP8 between the steps."""
    optimizer = sgd(model)
    seen: list[Any] = []
    for x in inputs:
        optimizer.zero_grad()
        loss = backward(model, x, region)
        seen.append((loss, grads(model)))
        optimizer.step()
        model.eval()
        with torch.no_grad(), region():
            model(x)
        assert regions.active() is None
        model.train()
    return seen


def assert_equal_steps(a: list[Any], b: list[Any]) -> None:
    for i, ((loss, gradients), (other_loss, other_gradients)) in enumerate(zip(a, b, strict=True)):
        assert loss == other_loss, f"loss of step {i}"
        assert same(gradients, other_gradients), f"gradients of step {i}"


REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])


@REENTRANT
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_plain_checkpoint(reentrant: bool, recipe: str) -> None:
    inputs = [noise(5, WIDTH, seed=seed).requires_grad_() for seed in range(4)]
    model = fp8patch.convert_model(checkpointed(reentrant), recipe)
    plain = fp8patch.convert_model(blocks(), recipe)
    with_checkpoints, without = train(model, inputs), train(plain, inputs)
    assert_equal_steps(with_checkpoints, without)
    assert scales(model) == scales(plain)
    assert ran_in_fp8(model, inputs[0])


@REENTRANT
def test_a_shared_block_that_recomputes(reentrant: bool) -> None:
    inputs = [noise(5, WIDTH, seed=seed).requires_grad_() for seed in range(3)]
    model = fp8patch.convert_model(checkpointed(reentrant, depth=4, shared=True))
    plain = fp8patch.convert_model(blocks(depth=4, shared=True))
    assert_equal_steps(train(model, inputs), train(plain, inputs))
    assert scales(model) == scales(plain)


def test_the_naive_swap_recomputes_with_other_scales() -> None:
    inputs = [noise(5, WIDTH, seed=seed) for seed in range(4)]
    with falls():
        model, plain = naive_swap(checkpointed(False)), naive_swap(blocks())
        assert_equal_steps(train(model, inputs), train(plain, inputs))


@REENTRANT
@pytest.mark.parametrize("region", [fp8, mixed])
def test_llama(reentrant: bool, region: Any) -> None:
    inputs = [tokens(seed=seed) for seed in range(3)]
    plain = fp8patch.convert_model(llama())
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    # Reentrant checkpointing needs an input that asks for gradients: frameworks do this.
    model.enable_input_require_grads()
    fp8patch.convert_model(model)
    calls: list[bool] = []
    layer = model.model.layers[0].self_attn.q_proj
    handle = layer.register_forward_hook(lambda m, *_: calls.append(regions.active() is not None))
    first = train(model, inputs[:1], region)
    assert calls == [True, True, True]  # forward, recomputation, evaluation
    handle.remove()
    assert_equal_steps(first, train(plain, inputs[:1], region))
    assert_equal_steps(train(model, inputs, region), train(plain, inputs, region))
    assert scales(model) == scales(plain)


@REENTRANT
def test_enabled_after_conversion_and_between_steps(reentrant: bool) -> None:
    inputs = [tokens(seed=seed) for seed in range(2)]
    model, plain = fp8patch.convert_model(llama()), fp8patch.convert_model(llama())
    model.enable_input_require_grads()
    assert_equal_steps(train(model, inputs), train(plain, inputs))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_equal_steps(train(model, inputs), train(plain, inputs))
    model.gradient_checkpointing_disable()
    assert_equal_steps(train(model, inputs), train(plain, inputs))


@REENTRANT
def test_the_loss_outside_the_model_and_two_outputs(reentrant: bool) -> None:
    # Backward may start at any output: whichever comes first opens the region again.
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()
            self.recompute = True

        def call(self, block: Any, x: Tensor) -> Any:
            return checkpoint(block, x, use_reentrant=reentrant) if self.recompute else block(x)

        def forward(self, x: Tensor) -> Any:
            first = self.call(self.a, x)
            return {"first": first, "more": (self.call(self.b, first),)}

    def run(recompute: bool) -> Any:
        model: Any = fp8patch.convert_model(seeded(Two))
        model.recompute = recompute
        optimizer = sgd(model)
        for seed in range(3):
            x = noise(5, WIDTH, seed=seed).requires_grad_()
            with fp8():
                output = model(x)
            model.zero_grad()
            # Reentrant checkpointing does not work with torch.autograd.grad: backward only.
            output["first"].sum().backward(retain_graph=not reentrant)
            if not reentrant:
                output["more"][0].square().sum().backward()
            optimizer.step()
        return grads(model), scales(model)

    with_checkpoints, without = run(True), run(False)
    assert same(with_checkpoints[0], without[0])
    assert with_checkpoints[1] == without[1]


@REENTRANT
def test_fp8_off_is_stock_under_checkpointing(reentrant: bool) -> None:
    inputs = [noise(5, WIDTH, seed=seed).requires_grad_() for seed in range(2)]
    model = fp8patch.convert_model(checkpointed(reentrant))
    stock = blocks()
    train(model, inputs)
    model.load_state_dict(stock.state_dict())

    def off() -> Any:
        return fp8(enabled=False)

    assert_equal_steps(train(model, inputs, off), train(stock, inputs, off))


class Opaque:
    """An output of a class that nobody knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.self = self


@REENTRANT
@pytest.mark.parametrize("pack", [Opaque, lambda t: UserDict(t=t), lambda t: [{"a": (None, t)}]])
def test_outputs_of_unknown_classes(reentrant: bool, pack: Any) -> None:
    class Packs(Checkpointed):
        def forward(self, x: Tensor) -> Any:
            return pack(super().forward(x))

    def unpack(output: Any) -> Tensor:
        while not isinstance(output, Tensor):
            if isinstance(output, Opaque):
                output = output.value
            else:
                output = list(getattr(output, "values", lambda o=output: o)())[-1]
        return output

    def run(model: Any) -> Any:
        optimizer = sgd(fp8patch.convert_model(model))
        for seed in range(3):
            optimizer.zero_grad()
            with fp8():
                output = model(noise(5, WIDTH, seed=seed).requires_grad_())
            unpack(output).square().mean().backward()
            optimizer.step()
        return grads(model), scales(model)

    packed = seeded(Packs)
    packed.reentrant = reentrant
    (gradients, fixed), (plain, plain_fixed) = run(packed), run(blocks())
    assert same(gradients, plain)
    assert fixed == plain_fixed


def test_an_output_without_gradients_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    class Stores(Blocks):
        def forward(self, x: Tensor) -> Any:
            self.loss = super().forward(x).square().mean()

    model = fp8patch.convert_model(seeded(Stores))
    for _ in range(2):
        with fp8():
            model(noise(5, WIDTH))
        model.loss.backward()
    lines = [line for line in capsys.readouterr().err.splitlines() if "Stores" in line]
    assert len(lines) == 1
    assert "checkpointing" in lines[0]
    with torch.no_grad(), fp8():
        model(noise(5, WIDTH))


def test_backward_inside_the_region() -> None:
    def run(inside: bool) -> dict[str, Tensor]:
        model = fp8patch.convert_model(checkpointed(False))
        optimizer = sgd(model)
        for seed in range(3):
            optimizer.zero_grad()
            with fp8():
                loss = model(noise(5, WIDTH, seed=seed)).square().mean()
                if inside:
                    loss.backward()
                    region = regions.active()
                    assert region is not None
                    assert not region.reopened
            if not inside:
                loss.backward()
            optimizer.step()
            assert regions.active() is None
        return grads(model)

    assert same(run(True), run(False))
