"""The benchmark: contenders side by side, in turns on one GPU, a row for each.

Within a group each contender is a process that is kept alive. They build and compile at once, as
far as memory allows, and nothing is timed until all have. Then they take turns, a few steps each,
several rounds, so that what changes on the machine over time changes for all; the base has a place
in each group, and ratios are to the base of the same group. What is free of a contender's memory
goes back to the GPU after its turn.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue
from statistics import median, quantiles
from typing import Any

from fp8patch.bench_contenders import BASE, CONTENDERS, Contender, Mode, best_of
from fp8patch.bench_facts import commit
from fp8patch.bench_groups import Need, groups, needs
from fp8patch.bench_process import WORKER, Events, Worker
from fp8patch.bench_workloads import Workload

__all__ = ["Settings", "run"]

_CONTEXT_GIB = 1.0
_BASES: dict[Mode, str] = {"eager": BASE, "compile": "bf16-compile", "graphs": "bf16-graphs"}
# Seconds that the turns of one contender may take: those that are still compiling when no more are
# left are given up for those that are ready.
_TURNS = 8.0
# Seconds that what comes after the last turn may take: CPU time and profile of each contender.
_RESERVE = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long to measure, and on what.

    Attributes:
        warmup: Steps before anything is timed; observation, compilation and capture take five.
        rounds, steps: Turns of each contender, and timed steps in a turn.
        settle: Untimed steps that begin a turn.
        parallel: Contenders that build and compile at once; None is one for two cores.
        deadline: `time.monotonic()` after which nothing begins, and what runs is ended; or None.
        device: `cuda` or `cpu`.
        capacity: GiB of GPU memory that all of a group together may take.
        profile: Keep the kernels with most time in the rows.
        commit: Of the code; asked of git unless given.
        command: What starts a worker.
    """

    warmup: int = 6
    rounds: int = 4
    steps: int = 5
    settle: int = 2
    parallel: int | None = None
    deadline: float | None = None
    device: str = "cuda"
    capacity: float = 0.0
    profile: bool = False
    commit: str | None = None
    command: tuple[str, ...] = WORKER


def run(
    workload: Workload,
    contenders: Sequence[Contender],
    settings: Settings,
    *,
    done: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Measure every contender on `workload`.

    Args:
        contenders: From `expand`, the base among them.
        done: Gets all rows so far after each group.
        say: Gets a line now and then on what is going on.

    Returns:
        A row for each contender and group, JSON-safe, and one for the best of each family of
        variants. What failed has its `error`, and None for what was not measured.
    """
    need = needs(workload, contenders) if settings.device == "cuda" else {}
    need = need or {c.name: Need(0.0, 0.0) for c in contenders}
    todo = groups(contenders, need, settings.capacity or float("inf"))
    base = todo[0][0]
    rows: list[dict[str, Any]] = []
    retried: set[str] = set()
    number = 0
    while todo:
        members = todo.pop(0)
        group = _Group(workload, members, need, settings, say)
        found = group.run()
        for row in found:
            row["group"] = number
        rows += found
        number += 1
        for contender in members:
            # An estimate was too low: once more, with the base alone.
            row = next(r for r in found if r["contender"] == contender.name)
            crowded = "out of memory" in (row["error"] or "").lower() and len(members) > 2
            if crowded and contender is not base and contender.name not in retried:
                retried.add(contender.name)
                todo.append([base, contender])
                rows.remove(row)
        done([*rows, *best_of(rows)])
    return [*rows, *best_of(rows)]


@dataclass(slots=True)
class _Result:
    """What a contender has said so far."""

    ready: dict[str, Any] | None = None
    turns: list[list[float]] = field(default_factory=list)
    steady_gib: float | None = None
    finished: dict[str, Any] | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class _Late(Exception):
    """The deadline has passed."""


class _Group:
    def __init__(
        self,
        workload: Workload,
        members: Sequence[Contender],
        need: dict[str, Need],
        settings: Settings,
        say: Callable[[str], None],
    ) -> None:
        self._workload, self._members, self._need = workload, members, need
        self._settings, self._say = settings, say
        self._events: Events = Queue()
        self._results = {c.name: _Result() for c in members}
        self._workers: dict[str, Worker] = {}

    def run(self) -> list[dict[str, Any]]:
        names = ", ".join(self._results)
        self._say(f"{self._workload.name}: {names}")
        try:
            self._check_time()
            self._start()
            try:
                self._warm()
            except _Late:
                self._give_up_what_is_not_ready()
            self._turns()
            self._finish()
        except _Late:
            for result in self._results.values():
                if result.error is None and result.finished is None:
                    result.error = "the deadline had passed before this was all measured"
        finally:
            for worker in self._workers.values():
                worker.close()
        return _rows(self._workload, self._results, self._settings)

    def _start(self) -> None:
        for contender in self._members:
            self._workers[contender.name] = Worker(
                contender,
                self._workload,
                self._settings.device,
                self._events,
                self._settings.command,
            )

    def _warm(self) -> None:
        """Build and compile all, as many at once as memory and `parallel` allow."""
        waiting = list(self._workers.values())
        warming: dict[str, float] = {}
        while waiting or warming:
            while waiting and self._has_room(waiting[0].name, warming):
                worker = waiting.pop(0)
                warming[worker.name] = time.monotonic()
                worker.send("warm", steps=self._settings.warmup)
            worker, message = self._next(_TURNS * len(self._members))
            name = worker.name
            if message["event"] != "started" and name in warming:
                taken = time.monotonic() - warming.pop(name)
                self._results[name].seconds = taken
                said = self._results[name].error or "ready"
                self._say(f"{self._workload.name}: {name}: {said} after {taken:.0f} s")
            elif message["event"] == "failed":
                waiting = [each for each in waiting if each is not worker]

    def _give_up_what_is_not_ready(self) -> None:
        for worker in self._alive():
            if self._results[worker.name].ready is None:
                self._results[worker.name].error = "not compiled in time, with this deadline"
                worker.close()

    def _has_room(self, name: str, warming: dict[str, float]) -> bool:
        if not warming:
            return True
        if len(warming) >= (self._settings.parallel or max(1, (os.cpu_count() or 2) // 2)):
            return False
        taken = sum(self._need[other].peak for other in warming)
        for result in self._results.values():
            if result.ready is not None and result.error is None:
                taken += result.ready["held_gib"] + _CONTEXT_GIB
        capacity = self._settings.capacity
        return not capacity or taken + self._need[name].peak <= capacity

    def _turns(self) -> None:
        for number in range(self._settings.rounds):
            # There and back, so that nobody is always the first.
            alive = self._alive()
            for worker in alive if number % 2 == 0 else reversed(alive):
                self._check_time(_RESERVE * len(alive) if number else 0.0)
                worker.send("turn", steps=self._settings.steps, settle=self._settings.settle)
                self._answer(worker)

    def _finish(self) -> None:
        for worker in self._alive():
            worker.send("finish", settle=self._settings.settle)
            self._answer(worker)

    def _alive(self) -> list[Worker]:
        return [w for w in self._workers.values() if self._results[w.name].error is None]

    def _answer(self, worker: Worker) -> None:
        while self._next()[0] is not worker:
            pass

    def _check_time(self, reserve: float = 0.0) -> None:
        deadline = self._settings.deadline
        if deadline is not None and time.monotonic() + reserve > deadline:
            raise _Late

    def _next(self, reserve: float = 0.0) -> tuple[Worker, dict[str, Any]]:
        """The next thing that any worker says, noted down."""
        deadline = self._settings.deadline
        try:
            left = None if deadline is None else max(0.0, deadline - reserve - time.monotonic())
            worker, message = self._events.get(timeout=left)
        except Empty:
            raise _Late from None
        result = self._results[worker.name]
        if result.error is not None:
            return worker, message
        if message["event"] == "started":
            result.facts = message["facts"]
        elif message["event"] == "ready":
            result.ready = message
        elif message["event"] == "turn":
            result.turns.append(message["times"])
            if message["reserved_gib"] is not None:
                result.steady_gib = max(result.steady_gib or 0.0, message["reserved_gib"])
        elif message["event"] == "finished":
            result.finished = message
        else:
            result.error, result.traceback = message["error"], message["traceback"]
        return worker, message


def _rows(
    workload: Workload, results: dict[str, _Result], settings: Settings
) -> list[dict[str, Any]]:
    facts = next((r.facts for r in results.values() if r.facts), {"gpu": None, "torch": None})
    code = settings.commit or commit()
    rows = []
    for name, result in results.items():
        row = {
            "workload": workload.name,
            "contender": name,
            "batch": workload.batch,
            "seq": workload.seq,
            **_figures(workload, result),
            "rounds": settings.rounds,
            "steps": settings.steps,
            "error": result.error,
            "traceback": result.traceback,
            **(result.facts or facts),
            "commit": code,
        }
        if settings.profile and result.finished is not None:
            row["top_kernels"] = result.finished["top_kernels"]
        rows.append(row)
    times = {row["contender"]: row["step_ms"] for row in rows}
    for row in rows:
        mode = CONTENDERS[row["contender"]].mode
        row["ratio_bf16"] = _ratio(times[BASE], row["step_ms"])
        row["ratio_same_mode"] = _ratio(times.get(_BASES[mode]), row["step_ms"])
    return rows


def _ratio(base: float | None, other: float | None) -> float | None:
    return None if base is None or other is None else base / other


def _figures(workload: Workload, result: _Result) -> dict[str, Any]:
    times = [each for turn in result.turns for each in turn]
    step = median(times) if times else None
    quarters = quantiles(times, n=4) if len(times) > 1 else None
    ready, finished = result.ready or {}, result.finished or {}
    return {
        "step_ms": step,
        "spread_ms": quarters[2] - quarters[0] if quarters else None,
        "min_ms": min(times) if times else None,
        "rounds_ms": [median(turn) for turn in result.turns],
        "kernel_ms": finished.get("kernel_ms"),
        "cpu_ms": finished.get("cpu_ms"),
        "reserved_gib": ready.get("reserved_gib"),
        "reserved_steady_gib": result.steady_gib,
        f"{workload.unit}_per_s": 1e3 * workload.per_step / step if step else None,
        "converted": ready.get("converted"),
        "predicted_gain": ready.get("predicted_gain"),
        "params": ready.get("params"),
        "loss": finished.get("loss"),
        "warm_s": result.seconds,
    }
