"""What injection costs: `fp8patch train --no-fp8` against the same script with autocast by hand.

    python scripts/check_overhead.py --out DIR          # one GPU; about a minute
    python scripts/check_overhead.py --out DIR --tiny   # a CPU

Both runs of `scripts/curves_script.py` live at once and take turns on the GPU, a few steps each, so
that a drift of its clock falls on both alike. The batches are large, and a turn's time is its
kernels' and not its launches': the table says how much of it the launches took. The median turns
must be within 1 %. Writes overhead.json and exits with 1 otherwise.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from train_curves import FAMILIES, Runner, machine, write

ALLOWED = 0.01
# Where the launches take more of a turn than this, it is not the GPU that is measured.
GPU_BOUND = 0.9
KINDS = ("by hand", "injected")


class Turns:
    """The script, running, and waiting for its turn."""

    def __init__(self, runner: Runner, command: list[str], log: Path) -> None:
        self._log = log
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=runner.folder,
                env=runner.env,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:
            self._process.kill()
        self._process.communicate()

    def take(self) -> dict[str, float]:
        """What one turn took: seconds, those of them until the last launch, and the loss.

        Raises:
            RuntimeError: The script has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the next line says it
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the script ended early\n{self._log.read_text()[-3000:]}")
        found: dict[str, float] = json.loads(line)
        return found


def measure(runner: Runner, family: str, args: argparse.Namespace) -> dict[str, Any]:
    """One family's row."""
    size = () if args.tiny else ("--large",)
    words = ("--family", family, "--steps", args.steps, "--turns", *size)
    by_hand = runner.script(*words, "--autocast-by-hand")
    injected = [*runner.injected("bf16"), *runner.script(*words)]
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in KINDS}
    logs = [runner.folder / f"{family}{at}.log" for at in range(2)]
    with Turns(runner, by_hand, logs[0]) as first, Turns(runner, injected, logs[1]) as second:
        both = dict(zip(KINDS, (first, second), strict=True))
        for turn in range(args.warm_up + args.rounds):
            # First and second change places.
            for name in KINDS if turn % 2 else KINDS[::-1]:
                turns[name].append(both[name].take())
    summary = next(
        (line for line in logs[1].read_text().splitlines() if "own time" in line), "no summary"
    )
    late = {name: values[args.warm_up :] for name, values in turns.items()}
    steps = {n: [v["seconds"] / args.steps for v in values] for n, values in late.items()}
    launches = [v["launched"] / v["seconds"] for values in late.values() for v in values]
    typical = {name: statistics.median(values) for name, values in steps.items()}
    losses = [[v["loss"] for v in turns[name]] for name in KINDS]
    ratio, busy = typical["injected"] / typical["by hand"], statistics.median(launches)
    return {
        "family": family,
        "ratio": ratio,
        "step_seconds": steps,
        "launches": busy,
        "losses_apart": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "summary": summary,
        "ok": ratio <= 1 + ALLOWED and (args.tiny or busy <= GPU_BOUND),
    }


def say(row: dict[str, Any]) -> None:
    print(f"\n{FAMILIES[row['family']]}")
    for name, values in row["step_seconds"].items():
        ordered = sorted(1000 * value for value in values)
        middle = statistics.median(ordered)
        print(f"  {name:8s} {middle:.3f} ms a step ({ordered[0]:.3f} to {ordered[-1]:.3f})")
    print(f"  the launches took {row['launches']:.0%} of that (allowed: {GPU_BOUND:.0%})")
    print(f"  {row['summary']}")
    print(
        f"{'ok  ' if row['ok'] else 'FAIL'} injected / by hand = {row['ratio']:.4f}, allowed: "
        f"{1 + ALLOWED}; losses differ by {row['losses_apart']:.2g} at most",
        flush=True,
    )


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU")
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each, after the warm-up")
    parser.add_argument("--warm-up", type=int, default=3)
    args = parser.parse_args(words)
    args.recipe = "delayed"
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(args, Path(folder))
        print(runner.prepare(), flush=True)
        for family in args.families:
            rows.append(measure(runner, family, args))
            say(rows[-1])
            write(args.out / "overhead.json", {"machine": machine([]), "rows": rows})
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
