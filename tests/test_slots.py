"""Slots and the bank: layout, the update against a loop over random histories, round trips."""

import copy
import gc
import pickle
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8patch import numerics
from fp8patch.ops import quantize as ops
from fp8patch.recipe import Recipe
from fp8patch.scaling import Bank
from fp8patch.slots import GRAD_OUTPUT, INPUT, WEIGHT, Slots, SlotState, grad_is_e5m2, limit

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")
observed = st.one_of(st.sampled_from([0.0, INF, NAN, 1.0]), st.floats(min_value=0, width=32))


def slots_of(rows: int = 6, **fields: Any) -> Slots:
    return Slots(rows, Recipe(**fields), CPU)


def observe(slots: Slots, row: int, value: float) -> None:
    """A cast of one value through the slot of `row`."""
    slot = slots[row]
    ops.quantize(
        torch.tensor([[value]]), *slot, slots._limit[row].item(), False, False, True, False
    )


def same(a: SlotState, b: SlotState) -> bool:
    return all(
        np.array_equal(x.numpy(), y.numpy(), equal_nan=True) for x, y in zip(a, b, strict=True)
    )


def test_what_amax_is_scaled_to() -> None:
    assert [limit(Recipe(), role) for role in range(3)] == [448, 448, 57344]
    assert [limit(Recipe(margin=2), role) for role in range(3)] == [112, 112, 14336]
    assert [limit(Recipe(fp8_format="e4m3"), role) for role in range(3)] == [448] * 3
    assert grad_is_e5m2(Recipe())
    assert not grad_is_e5m2(Recipe.load("rowwise"))


def test_scales_and_amax_are_16_byte_aligned() -> None:
    slots = slots_of(9)
    for row in range(9):
        for view in (slots[row].scale, slots[row].amax):
            assert view.data_ptr() % 16 == 0
    assert slots[4] is slots[4]  # the same Tensor objects every time
    assert len({slots[row].scale.data_ptr() for row in range(9)}) == 9


@settings(max_examples=60)
@given(
    length=st.sampled_from([1, 2, 5, 16]),
    algo=st.sampled_from(["max", "most_recent"]),
    margin=st.integers(0, 3),
    steps=st.lists(st.lists(observed, max_size=3), max_size=24),
)
def test_casts_and_updates_are_a_loop_over_a_deque(
    length: int, algo: str, margin: int, steps: list[list[float]]
) -> None:
    """Each step holds what several micro-batches show; a nan or inf in one spoils the step."""
    slots = slots_of(3, amax_history_len=length, amax_compute_algo=algo, margin=margin)
    history: deque[np.float32] = deque(maxlen=length)
    scale = np.float32(0)
    for values in steps:
        for value in values:
            observe(slots, INPUT, value)
        slots.update()
        if values and all(np.isfinite(values)) and max(values) > 0:
            history.append(np.float32(max(values)))
            chosen = max(history) if algo == "max" else history[-1]
            with np.errstate(over="ignore"):
                quotient = np.float32(448 * 2.0**-margin) / chosen
            scale = min(quotient, np.float32(numerics.FP32_MAX))
        state = slots.read(INPUT)
        assert state.history.tolist() == [float(v) for v in history]
        assert state.scale.item() == scale
        assert state.amax.item() == 0
        assert (slots[INPUT].scale.data_ptr() in ops._cold) == (scale == 0)
    assert slots.read(INPUT).counts[numerics.SEEN] == sum(map(len, steps))
    assert same(slots.read(WEIGHT), slots_of(3).read(WEIGHT))


@pytest.mark.parametrize("length", [1, 3, 4])
@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 11])
def test_a_ring_is_read_oldest_first_and_written_back(length: int, steps: int) -> None:
    slots = slots_of(amax_history_len=length)
    for step in range(steps):
        observe(slots, 1, step + 1.0)
        slots.update()
    observe(slots, 1, 0.3)
    state = slots.read(1)
    assert state.history.tolist() == [i + 1.0 for i in range(steps)][-length:]
    assert state.amax == torch.tensor(0.3)

    other = slots_of(amax_history_len=length)
    other.write(1, state)
    assert same(other.read(1), state)
    # From here on both do the same, bit for bit.
    for value in (0.0, 9.0, NAN, 0.5, 1e-20):
        for one in (slots, other):
            observe(one, 1, value)
            one.update()
        assert same(slots.read(1), other.read(1))
    # A copy: what happens later does not reach it.
    assert state.amax == torch.tensor(0.3)


@pytest.mark.parametrize("amax", [0.0, 2.5, INF, NAN])
def test_any_pending_amax_survives_the_round_trip(amax: float) -> None:
    state = SlotState(
        torch.tensor([3.0, 1e-38]),
        torch.tensor(7.0),
        torch.tensor(amax),
        torch.tensor([1, 2, 3, 2**53 + 1]),
    )
    slots = slots_of()
    slots.write(2, state)
    assert same(slots.read(2), state)
    assert slots.read(2).counts[3] == 2**53 + 1


def test_a_longer_history_keeps_its_newest_part() -> None:
    slots = slots_of(amax_history_len=3)
    state = slots.read(0)._replace(history=torch.arange(1.0, 6.0), scale=torch.tensor(2.0))
    slots.write(0, state)
    assert slots.read(0).history.tolist() == [3, 4, 5]
    assert slots.read(0).scale == 2  # kept, not recomputed
    observe(slots, 0, 1.0)
    slots.update()
    assert slots.read(0).history.tolist() == [4, 5, 1]


def test_writing_a_scale_warms_and_clearing_it_cools() -> None:
    slots = slots_of()
    address = slots[0].scale.data_ptr()
    assert address in ops._cold
    state = slots.read(0)
    slots.write(0, state._replace(scale=torch.tensor(4.0)))
    assert address not in ops._cold
    slots.write(0, state)
    assert address in ops._cold


def test_memory_that_is_given_back_takes_its_mark_along() -> None:
    slots = slots_of()
    addresses = [slots[row].scale.data_ptr() for row in range(6)]
    observe(slots, 0, 1.0)
    assert addresses[0] in ops._cold_used
    del slots
    gc.collect()
    assert ops._cold.isdisjoint(addresses)
    assert ops._cold_used.isdisjoint(addresses)


def test_an_update_touches_no_version() -> None:
    slots = slots_of()
    tensors = (slots[0].scale, slots[0].amax, slots[0].counts, slots._history, slots._cursor)
    before = [t._version for t in tensors]
    observe(slots, 0, 1.0)
    slots.update()
    slots.write(1, slots.read(0))
    slots.merge_pending(0, 1)
    assert [t._version for t in tensors] == before


def test_merging_takes_the_larger_pending() -> None:
    slots = slots_of()
    for row, value in ((0, 3.0), (1, 5.0)):
        observe(slots, row, value)
    slots.merge_pending(0, 1)
    slots.merge_pending(1, 0)
    assert slots.pending[:2].tolist() == [5, 5]


def test_slots_made_under_inference_mode_can_be_written_later() -> None:
    with torch.inference_mode():
        slots = slots_of()
    observe(slots, 0, 2.0)
    slots.update()
    assert slots.read(0).scale == 224


@pytest.mark.parametrize("fields", [{"scaling": "current"}, {"scaling": "rowwise"}], ids=str)
def test_live_scalings_keep_one_amax(fields: dict[str, Any]) -> None:
    slots = slots_of(**fields)
    for value in (1.0, 4.0):
        observe(slots, 0, value)
        slots.update()
    assert slots.read(0).history.tolist() == [4]


# -- the bank -----------------------------------------------------------------------------------


class Holder(torch.nn.Linear):
    """As much of a converted module as a bank needs."""

    def __init__(self, path: str) -> None:
        super().__init__(16, 16)
        self._fp8_path = path


def test_a_bank_gives_back_what_was_written_before_and_after_binding() -> None:
    bank = Bank(Recipe(amax_history_len=2), ["a", "b"])
    state = SlotState(
        torch.tensor([1.0]), torch.tensor(2.0), torch.tensor(3.0), torch.tensor([0, 1, 0, 9])
    )
    bank.write("a", WEIGHT, state)
    assert same(bank.read("a", WEIGHT), state)
    modules = [Holder(path) for path in ("a", "b")]
    for module in modules:
        bank.bind(module)
    assert same(bank.read("a", WEIGHT), state)
    bank.write("b", GRAD_OUTPUT, state)
    assert same(bank.read("b", GRAD_OUTPUT), state)
    assert [key for key, _ in bank.state()] == [("a", WEIGHT), ("b", GRAD_OUTPUT)]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_bank_is_independent(how: str) -> None:
    bank = Bank(Recipe(), ["a"])
    module = Holder("a")
    bank.bind(module)
    slots = bank._slots[CPU]
    observe(slots, INPUT, 4.0)
    twin: Bank = copy.deepcopy(bank) if how == "deepcopy" else pickle.loads(pickle.dumps(bank))
    twin.bind(Holder("a"))
    assert twin.read("a", INPUT).amax == 4
    observe(slots, INPUT, 9.0)
    bank.update()
    assert twin.read("a", INPUT).amax == 4
    assert len(twin.read("a", INPUT).history) == 0
