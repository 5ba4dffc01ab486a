"""Traps of sharded weights: there is no whole one between forwards, and each gathering is new."""

from typing import Any

import pytest
import torch
from test_compile import pytestmark as dynamo_warnings
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from trap_models import WIDTH, assert_fresh, blocks, fp8, loss_of, noise, sgd, step

import fp8patch
from fp8patch.modules import weights

pytestmark = [*dynamo_warnings, pytest.mark.usefixtures("group")]

X = noise(7, WIDTH)


def sharded(**kwargs: Any) -> Any:
    model = fp8patch.convert_model(blocks(**kwargs))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("shared", [True, False], ids=["shared layer", "two forwards"])
def test_gathered_twice_before_a_backward(shared: bool) -> None:
    """The second gathering lies elsewhere; what the first forward has saved is not overwritten."""
    model, alone = sharded(shared=shared), fp8patch.convert_model(blocks(shared=shared))
    taken: list[Tensor] = []

    def take(module: nn.Module, args: Any) -> None:  # where the last gathering lay
        taken.extend(torch.empty(2 * WIDTH, WIDTH) for _ in range(2))

    for layer in model.layers:
        layer.register_forward_pre_hook(take, prepend=True)
    losses = {}
    for each in (model, alone):
        optimizer = sgd(each)
        for _ in range(3):
            optimizer.zero_grad()
            with fp8():
                loss = loss_of(each, X) + loss_of(each, 2 * X)
            loss.backward()
            optimizer.step()
            losses.setdefault(each, []).append(loss.item())
    assert losses[model] == losses[alone]


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_every_step_is_seen(how: str) -> None:
    """By compiled forwards too, which can't quantise what is gathered after the root is entered;
    and by large steps, where a delayed scale clips here as it does without sharding."""
    torch._dynamo.reset()
    model, alone = sharded(depth=2), fp8patch.convert_model(blocks(depth=2))
    called = model if how == "eager" else torch.compile(model, backend="eager")
    optimizer, other = sgd(model, lr=5.0), sgd(alone, lr=5.0)
    for _ in range(4):
        assert step(called, X, optimizer) == step(alone, X, other)
    torch._dynamo.reset()


def test_a_step_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was gathered has another version than the shard: no sign of another weight."""
    model = sharded()
    optimizer = sgd(model)
    step(model, X, optimizer)
    asked: list[Any] = []
    monkeypatch.setattr(weights, "_forget_if_clipping", lambda *args: asked.append(args))
    for _ in range(2):
        step(model, X, optimizer)
    assert not asked
    model.load_state_dict(model.state_dict())
    fp8patch.invalidate(model)
    step(model, X, optimizer)
    assert asked


def test_a_shard_that_is_written_in_place() -> None:
    model = sharded()
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    with torch.no_grad(), fp8():
        model(X)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.neg_()
    assert_fresh(model, X)


def test_flat_shards() -> None:
    """FSDP1: between forwards a weight is a piece of a flat tensor."""
    model = fp8patch.convert_model(blocks(depth=1))
    optimizer = sgd(model)
    for _ in range(2):
        step(model, X, optimizer)
    with torch.no_grad(), fp8():
        before = model(X)
    whole = {name: p.data for name, p in model.named_parameters() if p.dim() == 2}

    def gather(module: nn.Module, args: Any) -> None:
        for name, data in whole.items():
            model.get_parameter(name).data = data

    model.layers[0].register_forward_pre_hook(gather)
    for _ in range(2):
        for name, data in whole.items():
            model.get_parameter(name).data = data.flatten()[:10]
        with torch.no_grad(), fp8():
            output = model(X)
        assert torch.equal(output, before)


def test_a_sharded_head_keeps_its_class() -> None:
    model = nn.Sequential(nn.Embedding(1027, 32), nn.Linear(32, 32), nn.Linear(32, 1027))
    model.add_module("lm_head", nn.Linear(1027, 1027))
    head: Any = model.lm_head
    head.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    plan = fp8patch.plan_model(model, include=("1",))
    assert next(d for d in plan.decisions if d.path == "lm_head").aligned_to == 1032
    fp8patch.convert_model(model, plan)
    assert type(head).__name__ == "FSDPLinear"
    assert isinstance(head, FSDPModule)
