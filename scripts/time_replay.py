"""Where the CPU time of a step that replays CUDA graphs goes, in BF16 and in FP8.

    python scripts/time_replay.py [--workload bert-base] [--batch B --seq S] [--steps 50]

A small model under CUDA graphs is bound by the CPU. Each step begins on an idle GPU and ends when
its Python returns. Parts lie in each other: `block` holds `replayed` (what Dynamo's guards and
wrappers take is the rest), which holds the forward half of `graph launch`. Taking the time of a
part adds about 0.2 us a call, so that the parts are taken in a second round of steps.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from fp8patch.bench.contenders import CONTENDERS
from fp8patch.bench.measure import Session
from fp8patch.bench.workloads import WORKLOADS, Workload, resolve

WARM_UP = 12


def parts() -> list[tuple[str, Any, str]]:
    """(name, where it is, its name there) of what is timed."""
    from fp8patch.blocks import graphs, memory, recorded, replay, run
    from fp8patch.modules import base
    from fp8patch.scaling import Bank

    return [
        ("scales, weights", Bank, "enter"),
        ("of which weights", base, "refresh_together"),
        ("may graphs run", graphs.Graphs, "begin"),
        ("block", run.BlockCall, "__call__"),
        ("replayed", replay.Replayed, "__call__"),
        ("backward of a block", recorded.Recorded, "backward"),
        ("graph launch", memory.Graph, "replay"),
        ("optimizer's hook", Bank, "optimizer_stepped"),
    ]


class Clock:
    """Seconds and calls by part, of functions that `watch` was told of."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        function: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - began
                self.calls[name] += 1

        timed.__dict__.update(function.__dict__)
        setattr(owner, attribute, timed)


def run_steps(session: Session, count: int) -> float:
    """Median milliseconds until a step's Python returns."""
    found = []
    for _ in range(count):
        session.wait()
        began = time.perf_counter()
        session.step()
        found.append(1e3 * (time.perf_counter() - began))
    session.wait()
    return statistics.median(found)


def measure(workload: Workload, device: str, count: int) -> None:
    sessions = {n: Session(workload, CONTENDERS[n], device) for n in ("bf16-graphs", "fp8-graphs")}
    whole = {}
    for name, session in sessions.items():
        session.warm_up(WARM_UP)
        whole[name] = run_steps(session, count)
    clock = Clock()
    for part in parts():
        clock.watch(*part)
    print(f"{workload.name}, {count} steps, ms of CPU time a step (calls a step)")
    for name, session in sessions.items():
        run_steps(session, 3)
        clock.seconds.clear()
        clock.calls.clear()
        timed = run_steps(session, count)
        print(f"\n{name}: {whole[name]:.2f}, with its parts timed {timed:.2f}")
        for part, _, _ in parts():
            if clock.calls[part]:
                calls = clock.calls[part] / count
                print(f"  {part:24s} {1e3 * clock.seconds[part] / count:7.3f}  ({calls:.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="bert-base", choices=list(WORKLOADS))
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    workload = resolve(args.workload, batch=args.batch, seq=args.seq)
    measure(workload, args.device, args.steps)


if __name__ == "__main__":
    main()
