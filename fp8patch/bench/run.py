"""The benchmark: contenders side by side, in turns on one GPU, a row for each.

Within a group each contender is a process that is kept alive. They build and compile at once, as
far as memory allows, and nothing is timed until all have. Then they take turns, a few steps each,
several rounds, so that what changes on the machine over time changes for all; the base has a place
in each group, and ratios are to the base of the same group. What is free of a contender's memory
goes back to the GPU after its turn.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from fp8patch.bench.contenders import BASE, CONTENDERS, Contender, Mode, best_of
from fp8patch.bench.facts import commit
from fp8patch.bench.groups import Need, groups, needs
from fp8patch.bench.turns import Group, Result, Settings
from fp8patch.bench.workloads import Workload

__all__ = ["Settings", "run"]

_BASES: dict[Mode, str] = {"eager": BASE, "compile": "bf16-compile", "graphs": "bf16-graphs"}


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
    base, *_ = contenders

    def group(members: Sequence[Contender]) -> Group:
        made = Group(workload, members, need, settings, say)
        made.start()
        return made

    # All at once: what comes later imports its libraries while the first group compiles.
    split = groups(contenders, need, settings.capacity or float("inf"))
    todo = [group(members) for members in split]
    rows: list[dict[str, Any]] = []
    retried: set[str] = set()
    number = 0
    try:
        while todo:
            current = todo[0]
            current.run(todo[1:])
            current.close()
            todo.pop(0)
            for contender in _crowded_out(current, base):
                if contender.name not in retried:
                    retried.add(contender.name)
                    del current.results[contender.name]
                    todo.append(group([base, contender]))
            rows += [{**row, "group": number} for row in _rows(workload, current.results, settings)]
            number += 1
            done([*rows, *best_of(rows)])
    finally:
        for left in todo:
            left.close()
    return [*rows, *best_of(rows)]


def _crowded_out(group: Group, base: Contender) -> list[Contender]:
    """Members that ran out of memory beside others: an estimate was too low."""
    return [
        member
        for member in group.members
        if member is not base
        and len(group.members) > 2
        and "out of memory" in (group.results[member.name].error or "").lower()
    ]


def _rows(
    workload: Workload, results: Mapping[str, Result], settings: Settings
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


def _figures(workload: Workload, result: Result) -> dict[str, Any]:
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
        "left_eager": ready.get("left_eager"),
        "converted": ready.get("converted"),
        "predicted_gain": ready.get("predicted_gain"),
        "params": ready.get("params"),
        "loss": finished.get("loss"),
        "warm_s": result.seconds,
    }
