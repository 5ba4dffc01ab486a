"""`fp8patch train --nproc 2` on two GPUs with NCCL: equal ranks, nobody left waiting, scaling.

    python scripts/check_ddp.py --out DIR                    # two GPUs; about two minutes
    python scripts/check_ddp.py --out DIR --emulate --tiny   # two CPU processes with gloo

Runs `scripts/ddp_script.py`, which knows nothing of fp8patch, with one rank and with two, in FP8
and in BF16. Over two ranks of FP8 it checks: parameters, scales and histories are the same to the
last bit; one reduction an optimizer step, micro-batches under `no_sync` or not; evaluations that
rank 0 makes alone hang nobody. It prints tokens/s, and how two ranks compare with one at the same
batch a rank. Writes check_ddp.json and check_ddp.md; exits with 1 if a check fails.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "ddp_script.py"
WARM_UP = 10
READ_EVERY = 10
LIMIT_SECONDS = 150


@dataclass
class Run:
    """One run of the script: what each rank saved and found, by rank."""

    mode: str
    ranks: int
    found: list[dict[str, Any]]
    weights: list[dict[str, Any]]
    state: list[dict[str, Any]]
    said: list[str] = field(default_factory=list)

    def tokens_a_second(self) -> float:
        times = self.found[0]["step_seconds"]
        return float(self.found[0]["tokens_a_step"] / statistics.median(times[WARM_UP:] or times))


def run(mode: str, ranks: int, args: argparse.Namespace, folder: Path) -> Run:
    """Run the script to its end.

    Raises:
        RuntimeError: It failed, or hung.
    """
    recipe = folder / "recipe.yaml"
    # Every layer that can, also where that is predicted to be slower.
    recipe.write_text("base: delayed\nmin_gain: 0\n")
    out = folder / f"{mode}{ranks}"
    flag = {"bf16": "--no-fp8", "fp8": "--emulate" if args.emulate else "--fp8"}[mode]
    command = [
        sys.executable,
        "-m",
        "fp8patch",
        "train",
        flag,
        "--recipe",
        recipe,
        "--nproc",
        ranks,
    ]
    command += [SCRIPT, "--out", out, "--steps", args.steps, *(["--tiny"] if args.tiny else [])]
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
    try:
        done = subprocess.run(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=env,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"hung for {LIMIT_SECONDS} s\n{str(error.output)[-3000:]}") from None
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-3000:]}")
    places = [out / f"rank{rank}" for rank in range(ranks)]
    states = [place / "fp8patch_state.safetensors" for place in places]
    return Run(
        mode,
        ranks,
        [json.loads((place / "found.json").read_text()) for place in places],
        [load_file(place / "model.safetensors") for place in places],
        [load_file(state) for state in states] if mode == "fp8" else [],
        [line for line in done.stdout.splitlines() if line.startswith("fp8patch: ")],
    )


def same(first: dict[str, Any], second: dict[str, Any], ends: tuple[str, ...] = ("",)) -> bool:
    """Equal to the last bit, in the entries whose names end so; there has to be one."""
    names = [name for name in first if name.endswith(ends)]
    return (
        bool(names)
        and first.keys() == second.keys()
        and all(first[name].equal(second[name]) for name in names)
    )


def check(runs: dict[tuple[str, int], Run], steps: int) -> list[tuple[str, bool, str]]:
    """(what, whether it holds, how it came out)"""
    two, alone, bf16 = runs[("fp8", 2)], runs[("fp8", 1)], runs[("bf16", 2)]
    total = len(two.found[0]["losses"])
    # What the first step saw is reduced when the second begins, and what the last saw never is.
    expected = total - 1
    counts = [found["reductions"] for found in two.found]
    # Amax; and the counts, where the slots are read: at every tenth step.
    reductions = {"max": expected, "sum": expected // READ_EVERY}
    scales = sum(name.endswith(".scale") for name in two.state[0])
    ends = [statistics.fmean(run.found[0]["losses"][-5:]) for run in (two, bf16)]
    start = two.found[0]["losses"][0]
    return [
        ("parameters equal over ranks", same(*two.weights), f"{len(two.weights[0])} tensors"),
        ("scales equal over ranks", same(*two.state, (".scale", ".history")), f"{scales} scales"),
        (
            "one reduction an optimizer step",
            counts == [reductions] * 2,
            f"{counts[0]} in {total} steps, {total - steps} of them of three micro-batches",
        ),
        (
            "none with one rank, or without FP8",
            not any(sum(run.found[0]["reductions"].values()) for run in (alone, bf16)),
            "",
        ),
        (
            "rank 0 evaluates alone",
            len(two.found[0]["evaluations"]) > 0 and not two.found[1]["evaluations"],
            f"{len(two.found[0]['evaluations'])} evaluations, nobody hung",
        ),
        ("ranks saw different data", two.found[0]["losses"] != two.found[1]["losses"], ""),
        (
            "FP8 learns as BF16 does",
            abs(ends[0] - ends[1]) < 0.05 * start,
            f"loss {start:.3f} -> {ends[0]:.3f}, BF16 {ends[1]:.3f}",
        ),
    ]


def table(runs: dict[tuple[str, int], Run]) -> list[str]:
    lines = ["| | 1 rank, tokens/s | 2 ranks, tokens/s | scaling |", "|---|---|---|---|"]
    for mode in ("bf16", "fp8"):
        one, two = (runs[(mode, ranks)].tokens_a_second() for ranks in (1, 2))
        lines.append(f"| {mode.upper()} | {one:,.0f} | {two:,.0f} | {two / one:.2f}x |")
    return lines


def machine() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count()
    device = f"{count} x {torch.cuda.get_device_name()}" if count else "CPU"
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), **versions, "device": device}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--emulate", action="store_true", help="no GPU: FP8 emulated, gloo")
    parser.add_argument("--tiny", action="store_true", help="a model for the CPU")
    parser.add_argument("--steps", type=int, default=None, help="timed steps; default 30, tiny 4")
    args = parser.parse_args(words)
    args.steps = args.steps or (4 if args.tiny else 30)
    args.out.mkdir(parents=True, exist_ok=True)
    runs: dict[tuple[str, int], Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("fp8", "bf16"):
            for ranks in (2, 1):
                try:
                    runs[(mode, ranks)] = run(mode, ranks, args, Path(folder))
                except RuntimeError as error:
                    print(f"FAIL {mode}, {ranks} ranks: {error}")
                    return 1
                found = runs[mode, ranks]
                print(f"{mode}, {ranks} ranks: {found.tokens_a_second():,.0f} tokens/s", flush=True)
                if found.state and ranks == 2:  # At once: a machine may be taken away.
                    equal = same(*found.weights), same(*found.state, (".scale", ".history"))
                    print(f"  parameters and scales equal over ranks: {equal}", flush=True)
    rows = check(runs, args.steps)
    marks = [
        f"{'ok  ' if ok else 'FAIL'} {what}{f': {how}' if how else ''}" for what, ok, how in rows
    ]
    said = [f"    {line}" for line in runs[("fp8", 2)].said]
    lines = [*marks, "", *table(runs)]
    print("\n".join(lines))
    where = machine()
    head = ", ".join(f"{name} {value}" for name, value in where.items())
    text = [f"# {SCRIPT.name}, {head}", "", *(f"- {mark}" for mark in marks), "", *table(runs), ""]
    (args.out / "check_ddp.md").write_text("\n".join([*text, *said, ""]))
    values = {
        "machine": where,
        "checks": [{"what": what, "ok": ok, "how": how} for what, ok, how in rows],
        "runs": [{"mode": r.mode, "ranks": r.ranks, "found": r.found} for r in runs.values()],
    }
    (args.out / "check_ddp.json").write_text(json.dumps(values) + "\n")
    return 0 if all(ok for _, ok, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
