"""Contenders of one group: build and compile at once, then take turns on the GPU."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

from fp8patch.bench.contenders import Contender
from fp8patch.bench.groups import Need
from fp8patch.bench.process import WORKER, Events, Worker
from fp8patch.bench.workloads import Workload

__all__ = ["Group", "Result", "Settings"]

_CONTEXT_GIB = 1.0
# Seconds that one turn of one contender may take: those that are still compiling when no more are
# left than all turns take are given up for those that are ready.
_TURN = 2.0
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


@dataclass(slots=True)
class Result:
    """What a contender has said so far."""

    ready: dict[str, Any] | None = None
    turns: list[list[float]] = field(default_factory=list)
    steady_gib: float | None = None
    finished: dict[str, Any] | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Late(Exception):
    """The deadline has passed."""


class Group:
    """The processes of some contenders, started at once; close it whatever happens.

    `run` measures them. What each said is in `results`, by name.
    """

    def __init__(
        self,
        workload: Workload,
        members: Sequence[Contender],
        need: Mapping[str, Need],
        settings: Settings,
        say: Callable[[str], None],
    ) -> None:
        self.members = tuple(members)
        self.results = {contender.name: Result() for contender in members}
        self._workload, self._need, self._settings, self._say = workload, need, settings, say
        self._events: Events = Queue()
        self._workers: dict[str, Worker] = {}

    def start(self) -> None:
        """Start all processes, which import their libraries and wait then."""
        for contender in self.members:
            self._workers[contender.name] = Worker(
                contender,
                self._workload,
                self._settings.device,
                self._events,
                self._settings.command,
            )

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    def run(self, others: Sequence["Group"] = ()) -> None:
        """Measure; nothing is timed before `others` have been imported too."""
        self._say(f"{self._workload.name}: {', '.join(self.results)}")
        try:
            self._check_time()
            try:
                self._warm()
                for other in others:
                    other._imported()
            except Late:
                self._give_up_what_is_not_ready()
            self._turns()
            self._finish()
        except Late:
            for result in self.results.values():
                if result.error is None and result.finished is None:
                    result.error = "the deadline had passed before this was all measured"

    def _imported(self) -> None:
        while any(not self.results[w.name].facts for w in self._alive()):
            self._next()

    def _warm(self) -> None:
        """Build and compile all, as many at once as memory and `parallel` allow."""
        waiting = self._alive()
        warming: dict[str, float] = {}
        while waiting or warming:
            while waiting and self._has_room(waiting[0].name, warming):
                worker = waiting.pop(0)
                warming[worker.name] = time.monotonic()
                worker.send("warm", steps=self._settings.warmup)
            worker, message = self._next(_TURN * self._settings.rounds * len(self.members))
            name = worker.name
            if message["event"] != "started" and name in warming:
                taken = time.monotonic() - warming.pop(name)
                self.results[name].seconds = taken
                said = self.results[name].error or "ready"
                self._say(f"{self._workload.name}: {name}: {said} after {taken:.0f} s")
            elif message["event"] == "failed":
                waiting = [each for each in waiting if each is not worker]

    def _give_up_what_is_not_ready(self) -> None:
        for worker in self._alive():
            if self.results[worker.name].ready is None:
                self.results[worker.name].error = "not compiled in time, with this deadline"
                worker.close()

    def _has_room(self, name: str, warming: dict[str, float]) -> bool:
        if not warming:
            return True
        if len(warming) >= (self._settings.parallel or max(1, (os.cpu_count() or 2) // 2)):
            return False
        taken = sum(self._need[other].peak for other in warming)
        for result in self.results.values():
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
        return [w for w in self._workers.values() if self.results[w.name].error is None]

    def _answer(self, worker: Worker) -> None:
        while self._next()[0] is not worker:
            pass

    def _check_time(self, reserve: float = 0.0) -> None:
        deadline = self._settings.deadline
        if deadline is not None and time.monotonic() + reserve > deadline:
            raise Late

    def _next(self, reserve: float = 0.0) -> tuple[Worker, dict[str, Any]]:
        """The next thing that any worker says, noted down."""
        deadline = self._settings.deadline
        try:
            left = None if deadline is None else max(0.0, deadline - reserve - time.monotonic())
            worker, message = self._events.get(timeout=left)
        except Empty:
            raise Late from None
        result = self.results[worker.name]
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
