"""When slots move: the first step, micro-batches, optimizer steps, forwards without gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8patch
from fp8patch import numerics
from fp8patch.slots import GRAD_OUTPUT, INPUT, WEIGHT, SlotState

ROLES = (INPUT, WEIGHT, GRAD_OUTPUT)


class Block(nn.Module):
    """Two layers in a row, and one that is not always called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 48)
        self.second = nn.Linear(48, 16)
        self.late = nn.Linear(16, 16)
        self.use_late = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.nn.functional.gelu(self.first(x)))
        return self.late(x) if self.use_late else x


def converted(recipe: Any = None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return fp8patch.convert_model(Block(), recipe, include=("*",))


def slots(model: Any) -> dict[tuple[str, int], SlotState]:
    bank = model._fp8_bank
    return {(path, role): bank.read(path, role) for path in bank.paths for role in ROLES}


def same(a: dict[Any, SlotState], b: dict[Any, SlotState], *names: str) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(getattr(a[key], name), getattr(b[key], name))
        for key in a
        for name in names or SlotState._fields
    )


def forward(model: Any, x: Tensor, **options: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate", **options):
        y: Tensor = model(x)
    return y


def batch(seed: int = 0) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# -- the first step -----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-12])
def test_the_first_step_keeps_tiny_gradients(size: float, recipe: str) -> None:
    model = converted(recipe)
    (forward(model, batch()).float() * size).sum().backward()
    ours = gradients(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        (model(batch()).float() * size).sum().backward()
    for name, grad in gradients(model).items():
        assert grad.any()
        assert numerics.sqnr(grad, ours[name]) > 15, name


def test_scale_one_would_flush_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault for the test above."""
    monkeypatch.setattr(numerics, "scale_from_amax", lambda amax, limit: torch.ones_like(amax))
    model = converted()
    (forward(model, batch()).float() * 1e-6).sum().backward()
    assert not model.first.weight.grad.any()


def test_the_first_step_uses_live_scales_and_the_second_what_it_saw() -> None:
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = batch()
    first = forward(model, x)
    first.sum().backward()
    assert all(state.scale == 0 for state in slots(model).values())
    optimizer.step()
    # The same data and the same weights: the history's scale is the live one, bit for bit.
    assert torch.equal(forward(model, x), first)
    for (_, role), state in slots(model).items():
        assert state.history.shape == (1,)
        limit = 57344.0 if role == GRAD_OUTPUT else 448.0
        assert state.scale == torch.tensor(limit) / state.history[0]


def test_a_module_first_called_at_step_three_is_cold_until_then() -> None:
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.use_late = False
    for step in range(3):
        optimizer.zero_grad()
        forward(model, batch(step)).sum().backward()
        optimizer.step()
    assert slots(model)["late", INPUT].scale == 0
    model.use_late = True
    optimizer.zero_grad()
    (forward(model, batch(3)).float() * 1e-6).sum().backward()
    assert model.late.weight.grad.any()
    with torch.autocast("cpu", torch.bfloat16):
        stock = Block()
        stock.load_state_dict(model.state_dict())
        (stock(batch(3)).float() * 1e-6).sum().backward()
    assert numerics.sqnr(stock.late.weight.grad, model.late.weight.grad) > 18
    optimizer.step()
    forward(model, batch(4)).sum().backward()
    states = slots(model)
    assert {len(states["late", role].history) for role in ROLES} == {1}
    assert {len(states["first", role].history) for role in ROLES} == {4}
    assert all(state.scale > 0 for state in states.values())


def test_all_zero_gradients_first_and_real_ones_later() -> None:
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        (forward(model, batch(step)) * 0).sum().backward()
        assert not any(g.any() for g in gradients(model).values())
        optimizer.step()
    forward(model, batch())
    for (_, role), state in slots(model).items():
        assert (state.scale == 0) == (role == GRAD_OUTPUT)
    optimizer.zero_grad()
    (forward(model, batch(2)).float() * 1e-6).sum().backward()
    assert all(g.any() for g in gradients(model).values())
    optimizer.step()
    forward(model, batch())
    assert all(state.scale > 0 for state in slots(model).values())


# -- one update a step --------------------------------------------------------------------------


def test_scales_are_fixed_over_micro_batches_and_move_once_a_step() -> None:
    model = converted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # Until an optimizer has stepped, each backward counts as a step: nobody can know better.
    forward(model, batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    lengths = []
    for step in range(4):
        seen = []
        for micro in range(3):
            # Each micro-batch larger than the last: scales that follow would show it.
            forward(model, batch(step) * (micro + 1)).sum().backward()
            if micro == 1:
                with torch.no_grad():
                    forward(model, batch(9) * 100)
            seen.append(slots(model))
        assert same(seen[0], seen[1], "scale", "history")
        assert same(seen[0], seen[2], "scale", "history")
        lengths.append({len(state.history) for state in seen[0].values()})
        optimizer.step()
        optimizer.zero_grad()
    assert lengths == [{1}, {2}, {3}, {4}]
    forward(model, batch())
    largest = batch(3).abs().max() * 3
    assert slots(model)["first", INPUT].history[-1] == largest


def test_two_optimizers_of_one_model_are_one_step() -> None:
    model = converted()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model.children()]
    for _ in range(3):
        forward(model, batch()).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    forward(model, batch())
    assert {len(state.history) for state in slots(model).values()} == {3}


def test_another_models_optimizer_moves_nothing() -> None:
    model, other = converted(), nn.Linear(2, 2)
    mine = torch.optim.SGD(model.parameters(), lr=0.01)
    theirs = torch.optim.SGD(other.parameters(), lr=0.01)
    forward(model, batch()).sum().backward()
    mine.step()
    forward(model, batch()).sum().backward()
    other(torch.ones(1, 2)).sum().backward()
    theirs.step()
    forward(model, batch()).sum().backward()
    assert {len(state.history) for state in slots(model).values()} == {1}


def test_a_loop_over_p_data_steps_by_its_backwards_and_never_runs_on_stale_weights() -> None:
    model = converted()
    for step in range(3):
        forward(model, batch(step)).sum().backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-1e-4)
            p.grad = None
    x = batch(5)
    y = forward(model, x)
    assert {len(state.history) for state in slots(model).values()} == {3}
    twin = converted(seed=1)
    twin.load_state_dict(model.state_dict())
    twin._fp8_bank.restore(slots(model))
    twin._fp8_bank.observed = True
    assert torch.equal(forward(twin, x), y)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert numerics.sqnr(model(x), y) > 20


def test_an_optimizer_that_skips_its_step_does_not_roll() -> None:
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    forward(model, batch()).sum().backward()
    optimizer.step()
    for _ in range(3):  # a non-finite loss that the script notices: no step
        forward(model, batch()).sum().backward()
    assert {len(state.history) for state in slots(model).values()} == {1}


# -- without gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("trained", [False, True])
def test_a_forward_without_gradients_writes_nothing(mode: Any, trained: bool) -> None:
    model = converted()
    if trained:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        forward(model, batch()).sum().backward()
        optimizer.step()
        forward(model, batch()).sum().backward()
    before = slots(model)
    with mode():
        y = forward(model, batch() * 7)
    assert y.isfinite().all()
    assert same(slots(model), before)
    forward(model, batch()).sum().backward()
    assert not same(slots(model), before)


def test_without_gradients_the_model_mode_does_not_matter() -> None:
    model = converted().eval()
    forward(model, batch()).sum().backward()
    assert all(state.amax > 0 for state in slots(model).values())


@pytest.mark.parametrize("enabled", [True, False])
def test_calibration_writes_and_sets_the_scales_at_its_end(enabled: bool) -> None:
    model = converted()
    x = batch()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        stock = model(x)
        with fp8patch.autocast(enabled, backend="emulate", calibrating=True):
            y = model(x)
            model(x * 3)
            assert all(state.scale == 0 for state in slots(model).values())
    assert torch.equal(y, stock) == (not enabled)
    for (_, role), state in slots(model).items():
        assert len(state.history) == (0 if role == GRAD_OUTPUT else 1)
        assert (state.scale > 0) == (role != GRAD_OUTPUT)
    assert slots(model)["first", INPUT].history[0] == (x * 3).abs().max()
    before = slots(model)
    with torch.no_grad():
        z = forward(model, x)
    assert same(slots(model), before)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert numerics.sqnr(model(x), z) > 20
