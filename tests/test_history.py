"""Points of the slots over a run: equal to an independent count, bounded, never waited for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counted import Counted
from injected import armed
from torch import Tensor, nn

import fp8patch
from fp8patch.inject import history as inject_history
from fp8patch.inject.history import History
from fp8patch.inject.series import Series

NAMES = ("saturated", "flushed", "non_finite", "seen")
WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def batch(step: int, micro: int = 0) -> Tensor:
    """Grows from step to step, so that it clips; heavy tails, so that some of it is flushed."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(8, WIDTH, generator=generator) ** 7 * 1.7**step
    x[0, 0] = torch.nan if step == 4 else 1.0
    return x


class Training:
    """A model with a history, steps of it, and (in eager) an independent count."""

    def __init__(self, every: int = 1, *, recipe: str = "delayed", compiled: bool = False) -> None:
        torch.manual_seed(0)
        blocks = nn.Sequential(Block(), Block())
        self.model: Any = fp8patch.convert_model(blocks, recipe, include=["*"])
        # As in a run, whose optimizer is found: without one, each micro-batch would be a step.
        self.model._fp8_bank.clock.optimizer_seen = True
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.history = History(self.model._fp8_bank, every)
        self.counted = None if compiled else Counted(self.model)
        for block in blocks if compiled else ():
            block.compile(fullgraph=True, backend="aot_eager")

    def steps(self, first: int, last: int, micro: int = 1) -> "Training":
        for step in range(first, last):
            for part in range(micro):
                with fp8patch.autocast(backend="emulate"):
                    y = self.model(batch(step, part))
                y.square().mean().backward()
            self.optimizer.step()
            if self.counted is not None:
                self.counted.step()
        return self

    def points(self) -> dict[str, Any]:
        self.history.finish()
        return json.loads(json.dumps(self.history.to_dict()))


def series(points: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """{(path, role): INT64 [4, points]}."""
    return {(s["path"], s["role"]): np.array([s[n] for n in NAMES]) for s in points["slots"]}


def check_counts(points: dict[str, Any], counted: Counted) -> None:
    """Every point equals what `counted` found up to its step."""
    assert points["steps"]
    for key, found in series(points).items():
        before = np.zeros(4, np.int64)
        for at, step in enumerate(points["steps"]):
            counts = np.array(counted.steps[step - 1][0][key])
            assert found[:, at].tolist() == (counts - before).tolist(), (key, step)
            before = counts


def test_every_step_is_what_was_counted() -> None:
    training = Training().steps(0, 6)
    points = training.points()
    assert points["steps"] == [1, 2, 3, 4, 5, 6]
    assert points["ranks"] == [1] * 6
    check_counts(points, training.counted)
    totals = sum(counts.sum(1) for counts in series(points).values())
    assert all(totals > 0), "nothing clipped, flushed or not finite: the test shows nothing"
    for slot in points["slots"]:
        assert (slot["limit"], slot["format"]) in ((448, "e4m3"), (57344, "e5m2"))
        assert slot["scaling"] == "delayed"
        for at, step in enumerate(points["steps"]):
            _, amax, scales = training.counted.steps[step - 1]
            key = slot["path"], slot["role"]
            # The nan of the fifth step is no number in JSON.
            wanted = None if np.isnan(amax[key]) else pytest.approx(amax[key], rel=1e-3)
            assert slot["amax"][at] == wanted
            assert slot["scale"][at] == pytest.approx(scales[key], rel=1e-3)


@pytest.mark.parametrize(("every", "micro"), [(2, 1), (3, 4)])
def test_points_of_several_steps_and_of_micro_batches(every: int, micro: int) -> None:
    training = Training(every).steps(0, 7, micro)
    points = training.points()
    # The last one is taken at the end, whatever step that is.
    assert points["steps"] == [*range(every, 7, every), 7]
    check_counts(points, training.counted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_blocks_count_the_same() -> None:
    torch._dynamo.reset()
    eager, compiled = Training().steps(0, 5), Training(compiled=True).steps(0, 5)
    points = compiled.points()
    check_counts(points, eager.counted)
    assert points == eager.points()


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_other_scalings_have_points_too(recipe: str) -> None:
    points = Training(recipe=recipe).steps(0, 3).points()
    found = series(points)
    assert all((counts[3] > 0).all() for counts in found.values())
    assert all((counts[0] == 0).all() for counts in found.values())  # nothing is out of range
    assert {slot["scaling"] for slot in points["slots"]} == {recipe}


def test_an_evaluation_counts_nothing() -> None:
    training = Training().steps(0, 2)
    with torch.no_grad(), fp8patch.autocast(backend="emulate"):
        training.model(batch(9))
    points = training.points()
    assert points["steps"] == [1, 2]
    check_counts(points, training.counted)


def test_restored_counts_are_not_counted_again() -> None:
    state = dict(Training().steps(0, 3).model._fp8_bank.state())
    # Before the first step, as from_pretrained does, and in the middle of a run.
    for done in (0, 2):
        resumed = Training().steps(0, done)
        bank = resumed.model._fp8_bank
        bank.restore(dict(state))
        resumed.counted.counts.clear()
        resumed.counted.steps.clear()
        points = resumed.steps(4, 7).points()
        at = [points["steps"].index(step) for step in points["steps"] if step > done]
        for key, found in series(points).items():
            if key[1] != "weight":
                assert found[:, at].sum(1).tolist() == resumed.counted.counts[key].tolist()


def test_a_slot_that_begins_again_counts_from_zero() -> None:
    training = Training(2).steps(0, 3)
    training.model._fp8_bank.forget("0.up")
    points = training.steps(3, 4).points()
    found = series(points)
    whole = np.diff([0, *(counts[0]["0.down", "input"][3] for counts in training.counted.steps)])
    assert found["0.down", "input"][3].tolist() == [whole[:2].sum(), whole[2:].sum()]
    assert found["0.up", "input"][3].tolist()[1] * 2 == found["0.up", "input"][3].tolist()[0]


def test_the_number_of_points_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject_history, "MOST_POINTS", 8)
    training = Training().steps(0, 37)
    points = training.points()
    assert len(points["steps"]) < 9
    assert points["steps"][-1] == 37
    assert set(np.diff(points["steps"][:-1])) == {8}
    check_counts(points, training.counted)
    slot = next(s for s in points["slots"] if s["role"] == "input")
    key = slot["path"], "input"
    largest = max(a[key] for _, a, _ in training.counted.steps[8:16])
    assert slot["amax"][1] == pytest.approx(largest, rel=1e-3)


def test_series_are_bounded_and_keep_their_mean() -> None:
    short, long = Series(8), Series(8)
    for step in range(1, 101):
        long.append(step, float(step))
        if step < 8:
            short.append(step, float(step))
    assert list(short) == [(step, float(step)) for step in range(1, 8)]
    assert short.each == 1
    assert len(long) < 9
    assert long.last == 100.0
    # Each point is the mean of the steps up to it.
    assert list(long)[0] == (long.each, (1 + long.each) / 2)
    weights = np.diff([0, *(step for step, _ in long)])
    assert np.dot(weights, long.values()) / 100 == pytest.approx(50.5)


def test_a_runs_report_has_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(), nn.LayerNorm(WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with armed(backend="emulate", report=path, log_every=2) as run:
        for step in range(5):
            model(batch(0, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        going = json.loads(path.read_text())
        run.finish()
    ended = json.loads(path.read_text())
    assert ended["format_version"] == 2
    # Scales move in the forward after a step, so its point is one refresh late.
    assert going["models"][0]["history"]["steps"] == [2]
    history = ended["models"][0]["history"]
    assert history["steps"] == [2, 4, 5]
    found = series(history)
    assert set(found) == {(f"0.{p}", r) for p in ("up", "down") for r in fp8patch.slots.ROLES}
    for role, ratios in ended["ratios"].items():
        total = sum(counts.sum(1) for key, counts in found.items() if key[1] == role)
        assert ratios["flushed"] == total[1] / total[3]
        assert ratios["saturated"] == total[0] / total[3]
