"""Weights that no optimizer owns, cast in one launch: to the bit as `prepare` does one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_weight_again import (  # noqa: F401
    D,
    OneByOne,
    elsewhere,
    replaced,
    together,
    transposed,
    written,
)
from torch import Tensor, nn

import fp8patch
from fp8patch import numerics
from fp8patch.modules import weight_afresh, weight_batch
from fp8patch.slots import WEIGHT

LAYERS = 4


def build(
    recipe: Any = "delayed", device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = D
) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    return fp8patch.convert_model(model.to(device, dtype), recipe)


def forward(model: Any, seed: int, backend: str = "emulate") -> Tensor:
    weight = model[0].weight
    x = torch.randn(32, weight.shape[1], generator=torch.Generator().manual_seed(seed))
    with fp8patch.autocast(backend=backend):
        output: Tensor = model(x.to(weight.device, weight.dtype))
    return output


def move(model: Any, factor: float = 0.9) -> None:
    """By `.data`, which leaves no trace."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.mul_(factor)
            parameter.grad = None


def warm(model: Any) -> Any:
    """After two steps: every slot is set, and the next entry is like any other."""
    for seed in range(2):
        forward(model, seed).square().mean().backward()
        move(model)
    return model


def slots_of(model: Any) -> list[list[float]]:
    return [model._fp8_bank.read(path, WEIGHT).numbers() for path in model._fp8_bank.paths]


def weights_of(model: Any) -> list[tuple[Tensor, ...]]:
    """A copy."""
    return [
        tuple(t.clone().view(torch.uint8 if t.dim() else t.dtype) for t in module._fp8_weight_q)
        for module in model
    ]


def trained(model: Any, launches: int | None = None) -> list[Any]:
    """What seven steps of two micro-batches show; the weights move far in one of them."""
    seen: list[Any] = []
    for at in range(7):
        before = OneByOne.launches
        losses = [forward(model, 2 * at).square().mean()]
        if at == 4:  # (The backward of what ran is of the weights as they were.)
            model[1].weight.data.neg_()
        losses.append(forward(model, 2 * at + 1).square().mean())
        seen.append(weights_of(model))
        for loss in losses:
            loss.backward()
        seen += [loss.detach() for loss in losses] + [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            seen.append(forward(model, at))
        if launches is not None and at > 1:
            assert OneByOne.launches - before == 3 * launches
        seen.append(slots_of(model))
        move(model, 1.1)
        if at == 3:
            model[2].weight.data.mul_(1000)
    return seen


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


MARGIN = fp8patch.Recipe(margin=1)
MIXED = fp8patch.Recipe.from_dict({"overrides": {"[01]": {"margin": 2}}})


@pytest.mark.parametrize(
    ("recipe", "launches"),
    [("delayed", 1), (MARGIN, 1), (MIXED, 2), (fp8patch.Recipe(scaling="current"), 1)],
    ids=["delayed", "margin", "two margins", "current"],
)
def test_steps_are_the_same(recipe: Any, launches: int, request: pytest.FixtureRequest) -> None:
    expected = trained(build(recipe))
    request.getfixturevalue("together")
    assert same(trained(build(recipe), launches), expected)


def test_frozen_weights_too(request: pytest.FixtureRequest) -> None:
    """They are scaled by their live amax; the others' launch is another one."""

    def steps() -> list[Any]:
        model = warm(build())
        model[1].requires_grad_(False)
        model[2].requires_grad_(False)
        seen: list[Any] = []
        for seed in range(3):
            model[1].weight.data.mul_(1.5)
            forward(model, seed).square().mean().backward()
            seen += [weights_of(model), slots_of(model)]
        return seen

    expected = steps()
    request.getfixturevalue("together")
    assert same(steps(), expected)
    assert OneByOne.launches


def test_a_weight_that_grew_a_thousandfold_fits(together: None) -> None:  # noqa: F811
    model = warm(build())
    scales = [float(module._fp8_weight_slot.scale) for module in model]
    model[1].weight.data.mul_(1000)
    model[2].weight.data.mul_(1.5)  # clips, as in a run that is resumed before its optimizer is met
    model._fp8_bank.clock.backward_finished = False  # (the scales stay)
    forward(model, 5)
    assert OneByOne.launches
    used = [1 / float(module._fp8_weight_q.scale_inv) for module in model]
    amax = float(model[1].weight.detach().abs().max())
    assert used[1] == pytest.approx(448 / amax, rel=1e-6)
    assert used[1] < scales[1] / 500
    for at in (0, 2, 3):
        assert used[at] == pytest.approx(scales[at], rel=1e-6)
    stored = numerics.dequantize(model[1]._fp8_weight_q.rows, model[1]._fp8_weight_q.scale_inv)
    assert numerics.sqnr(model[1].weight.detach(), stored) > 28


def test_a_backward_that_is_still_to_run_finds_the_old_ones(together: None) -> None:  # noqa: F811
    model = warm(build())
    output = forward(model, 7)
    held, before = [module._fp8_weight_q for module in model], weights_of(model)
    for module in model:
        module.weight.data.neg_()
    launches = OneByOne.launches
    forward(model, 7)
    assert OneByOne.launches == launches + 1
    for module, old, copy in zip(model, held, before, strict=True):
        assert not {t.data_ptr() for t in old} & {t.data_ptr() for t in module._fp8_weight_q}
        assert torch.equal(old.rows_t.view(torch.uint8), copy[1])
        assert torch.equal(old.rows_t.float(), -module._fp8_weight_q.rows_t.float())
    output.square().mean().backward()  # no version has moved


def test_observed_once_between_two_updates(together: None) -> None:  # noqa: F811
    model = warm(build())
    numel, before = D * D, [numbers[-1] for numbers in slots_of(model)]
    for seed in range(3):
        forward(model, seed)
    assert [numbers[-1] for numbers in slots_of(model)] == [count + numel for count in before]


def test_what_a_failed_launch_leaves_is_cast_again(
    together: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("as if")

    model = warm(build())
    with torch.no_grad():
        expected = forward(model, 3)
    for broken in ("run_into", "_new_outputs"):
        with monkeypatch.context() as patched:
            patched.setattr(OneByOne if broken == "run_into" else weight_afresh, broken, fail)
            with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
                forward(model, 3)
        assert all(module._fp8_weight_state.outdated for module in model)
        with torch.no_grad():
            assert torch.equal(forward(model, 3), expected)


def test_no_second_set_while_the_first_is_held(
    together: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, alive = warm(build()), []
    stock = weight_afresh._new_outputs

    def watched(weight: Tensor) -> Any:
        alive.append([module._fp8_weight_q for module in model])
        return stock(weight)

    monkeypatch.setattr(weight_afresh, "_new_outputs", watched)
    forward(model, 0)
    assert alive == [[None] * LAYERS] * LAYERS


def announced(model: Any) -> None:
    model[1].outdate_weight(replaced=True)


def forgotten(model: Any) -> None:
    model._fp8_bank.forget("1")


def gathered(model: Any) -> None:
    model[1]._fp8_weight_state.gathered = True


@pytest.mark.parametrize(
    "change", [written, replaced, elsewhere, transposed, announced, forgotten, gathered]
)
def test_left_to_be_cast_by_itself(
    change: Callable[[Any], None],
    together: None,  # noqa: F811
) -> None:
    model = warm(build())
    change(model)
    model._fp8_bank.entry += 1000  # an entry that no weight has seen
    others = weight_batch.refresh_together(list(model), True)
    assert others == [model[1]]


def test_a_part_of_a_flat_buffer_is_cast_by_itself(together: None) -> None:  # noqa: F811
    """The kernel loads 16 bytes at a time."""
    model = build()
    flat = torch.randn(D * D + 1)
    model[1].weight.data = flat[1:].view(D, D)
    warm(model)
    model._fp8_bank.entry += 1000
    assert weight_batch.refresh_together(list(model), True) == [model[1]]


def test_while_somebody_captures_nothing_is_cast_together(
    together: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = warm(build())
    model._fp8_bank.entry += 1000
    monkeypatch.setattr(weight_afresh, "_captured", lambda device: True)
    assert weight_batch.refresh_together(list(model), True) == list(model)


def test_tables_of_what_is_stepped_survive_frozen_weights(together: None) -> None:  # noqa: F811
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[3].requires_grad_(False)
    tables = []
    for seed in range(5):
        for half in range(2):
            forward(model, seed + half).square().mean().backward()
        tables.append(model._fp8_bank.casts.get(weight_batch._AGAIN))
        optimizer.step()
        optimizer.zero_grad()
    assert tables[-1] is not None
    assert tables[-1] is tables[-2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    stock = weight_afresh.cast_together

    def counted(*args: Any) -> bool:
        calls.append(stock(*args))
        return calls[-1]

    monkeypatch.setattr(weight_afresh, "cast_together", counted)

    def steps() -> list[Any]:
        model, seen = build(device="cuda", dtype=dtype, width=256), []
        for at in range(6):
            outputs = [forward(model, at, "fp8") for _ in range(2)]
            seen += [weights_of(model), slots_of(model)]
            for output in outputs:
                output.float().square().mean().backward()
            model[at % LAYERS].weight.data.mul_(1000 if at == 3 else 1.25)
        return seen

    found = steps()
    # (The first entry is one by one; the second of its step is not, nor is any after.)
    assert sum(calls) >= 10
    monkeypatch.setattr(weight_batch, "_has_kernel", lambda weight: False)
    calls.clear()
    assert same(found, steps())
    assert not calls
