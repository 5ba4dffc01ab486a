"""The note by which a step's cast of all weights is repeated: what makes it void, and that steps
taken by it are the steps taken without."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8patch
from fp8patch.modules import weight_afresh, weight_batch
from fp8patch.modules.weight_again import Batch
from fp8patch.ops import quantize as quantize_op
from fp8patch.slots import WEIGHT

D = 32


class OneByOne:
    """What `many_casts` returns, without a GPU: the definition, for each weight."""

    launches = 0

    def __init__(self, jobs: list[tuple[Tensor, ...]]) -> None:
        self.jobs = jobs

    def run(self, limit: float, live: bool, observe: bool) -> None:
        OneByOne.launches += 1
        for weight, rows, rows_t, scale_inv, *slot in self.jobs:
            made = quantize_op.quantize_now(weight, *slot, limit, False, live, observe, True, False)
            for target, source in zip((rows, rows_t, scale_inv), made, strict=False):
                assert source is not None
                target.copy_(source)

    def run_into(self, outputs: Any, limit: float, live: bool, observe: bool) -> None:
        given = self.jobs
        self.jobs = []
        for (weight, *_, scale, amax, counts), made in zip(given, outputs, strict=True):
            product = float(weight.float().abs().max()) * float(scale)
            fits = float(scale) > 0 and product <= 2 * limit
            self.jobs = [(weight, *made, scale, amax, counts)]
            OneByOne.launches -= 1
            self.run(limit, live or not fits, observe)
        self.jobs = given
        OneByOne.launches += 1


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(weight_batch, "_has_kernel", lambda weight: True)
    monkeypatch.setattr(weight_batch, "many_casts", OneByOne)
    monkeypatch.setattr(weight_afresh, "many_casts", OneByOne)
    monkeypatch.setattr(OneByOne, "launches", 0)


def build() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(D, D) for _ in range(4)))
    fp8patch.convert_model(model, "delayed")
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def step(model: Any, optimizer: Any, seed: int = 0) -> Tensor:
    x = torch.randn(16, D, generator=torch.Generator().manual_seed(seed))
    with fp8patch.autocast(backend="emulate"):
        output: Tensor = model(x)
    output.square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return output.detach()


def batch_of(model: Any) -> Batch:
    batch: Batch = model._fp8_bank.casts[weight_batch._AGAIN]
    return batch


def fits(model: Any, batch: Batch) -> bool:
    bank = model._fp8_bank
    return batch.fits(list(bank.members()), bank.weights_seen)


def stepped() -> tuple[Any, torch.optim.Optimizer, Batch]:
    """Where the next forward would repeat the cast."""
    model, optimizer = build()
    for seed in range(4):
        step(model, optimizer, seed)
    model._fp8_bank.update()
    return model, optimizer, batch_of(model)


def test_steps_are_the_same(together: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    found = []
    for seed in range(6):
        before = OneByOne.launches
        found.append(step(model, optimizer, seed))
        found.append(step(model, None, seed + 10))  # the same weights again
        optimizer.zero_grad()
        assert OneByOne.launches - before == 1
        if seed == 4:  # a weight that is not as noted, in one step
            with torch.no_grad():
                model[2].weight.data = model[2].weight * 1.5
    slots = [model._fp8_bank.read(str(at), WEIGHT).numbers() for at in range(4)]
    assert all(each.known is model[at]._fp8_weight_state
               for at, each in enumerate(batch_of(model).noted))  # fmt: skip
    monkeypatch.undo()
    model, optimizer = build()
    expected = []
    for seed in range(6):
        expected.append(step(model, optimizer, seed))
        expected.append(step(model, None, seed + 10))
        optimizer.zero_grad()
        if seed == 4:
            with torch.no_grad():
                model[2].weight.data = model[2].weight * 1.5
    assert slots == [model._fp8_bank.read(str(at), WEIGHT).numbers() for at in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def replaced(model: Any) -> None:
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())


def elsewhere(model: Any) -> None:
    model[1].weight.data = model[1].weight.data.clone()


def transposed(model: Any) -> None:
    model[1].weight.data = model[1].weight.data.t()


def written(model: Any) -> None:
    with torch.no_grad():
        model[1].weight.add_(1)


def loaded(model: Any) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def frozen(model: Any) -> None:
    model[1].weight.requires_grad_(False)


def hidden(model: Any) -> None:
    model[1].__dict__["weight"] = model[1].weight.detach()


def quantized_anew(model: Any) -> None:
    model[1]._fp8_weight_q = model[1]._fp8_weight_q._replace()


def bound_anew(model: Any) -> None:
    model[1]._fp8_weight_slot = model[1]._fp8_weight_slot._replace()


def forgotten(model: Any) -> None:
    model._fp8_bank.forget("1")


def announced(model: Any) -> None:
    model[1].outdate_weight(replaced=True)


def gathered(model: Any) -> None:
    model[1]._fp8_weight_state.gathered = True


def fresh(model: Any) -> None:
    model[1]._fp8_weight_state.outdated = False


def seen(model: Any) -> None:
    model._fp8_bank.weights_seen.add("1")


def reverted(model: Any) -> None:
    fp8patch.revert_model(model[1])


def quantized_by_itself(model: Any) -> None:
    before = model[1].weight
    replaced(model)
    model[1].refresh_weight(True)
    model[1].weight = before
    model[1].outdate_weight()


CHANGES: list[Callable[[Any], None]] = [
    replaced, elsewhere, transposed, written, loaded, frozen, hidden, quantized_anew,
    bound_anew, forgotten, announced, gathered, fresh, seen, reverted, quantized_by_itself,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(together: None, change: Callable[[Any], None]) -> None:
    model, _, batch = stepped()
    assert fits(model, batch)
    change(model)
    assert not fits(model, batch)


def test_an_optimizer_that_is_gone_is_noticed(together: None) -> None:
    model, optimizer, batch = stepped()
    assert fits(model, batch)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    other.step()
    assert not fits(model, batch)
    del optimizer
    assert not fits(model, batch)


def test_one_that_is_gone_before_anybody_asked(together: None) -> None:
    model, optimizer = build()
    for seed in range(2):
        step(model, optimizer, seed)
    assert batch_of(model)
    del optimizer
    gc.collect()
    step(model, None)  # a reference to what is gone can't be hashed for the first time
    assert weight_batch._AGAIN not in model._fp8_bank.casts


def test_the_note_keeps_no_model_alive(together: None) -> None:
    model, optimizer, batch = stepped()
    reference = batch.noted[0].module
    del model, optimizer
    gc.collect()
    assert reference() is None
