"""Training steps of the named workloads, everybody side by side: `fp8patch bench` on all of them.

    python scripts/bench_train.py bert-large llama-8b-4l --json out.json --deadline 540

Without names: bert-large, llama-8b-4l, vit-huge, bert-4096-4l, gpt-4096, bert-base, in this order.
Rows of workloads that are not run stay in the file if it was there before.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fp8patch.bench.contenders import expand
from fp8patch.bench.report import kernels_text, plot, read_rows, table, write_rows
from fp8patch.bench.run import Settings, run
from fp8patch.bench.workloads import WORKLOADS, resolve

ORDER = ("bert-large", "llama-8b-4l", "vit-huge", "bert-4096-4l", "gpt-4096", "bert-base")
EVERYBODY = (
    "bf16,bf16-compile,bf16-graphs,fp8,fp8-compile,fp8-graphs,torchao,torchao-graphs,te,"
    "ours-head-bf16"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=ORDER, help=", ".join(WORKLOADS))
    parser.add_argument("--contenders", default=EVERYBODY)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--parallel", type=int)
    parser.add_argument("--deadline", type=float, help="seconds, for all workloads together")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--profile", type=Path, help="the slowest kernels to this text file")
    parser.add_argument("--commit", help="to note in the rows, instead of git's")
    parser.add_argument("--emulate", action="store_true", help="on the CPU, to try this script")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    began = time.monotonic()
    workloads = [resolve(name) for name in options.workloads]
    everything: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        names = {w.name for w in workloads}
        everything = [r for r in read_rows(options.json) if r["workload"] not in names]
    kept = len(everything)
    memory = 0.0
    if not options.emulate:
        memory = 0.94 * torch.cuda.get_device_properties(0).total_memory / 2**30
    for workload in workloads:
        settings = Settings(
            warmup=options.warmup,
            rounds=options.rounds,
            steps=options.steps,
            deadline=None if options.deadline is None else began + options.deadline,
            device="cpu" if options.emulate else "cuda",
            capacity=memory,
            profile=True,
            commit=options.commit,
            parallel=options.parallel,
        )

        def done(rows: list[dict[str, Any]], before: Any = tuple(everything)) -> None:
            if options.json is not None:
                write_rows([*before, *rows], options.json)

        everything += run(
            workload,
            expand(options.contenders.split(","), workload),
            settings,
            done=done,
            say=lambda text: print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True),
        )
    if options.profile is not None:
        options.profile.write_text(kernels_text(everything[kept:]) + "\n")
    print(table(everything[kept:]))
    if options.plot is not None:
        plot(everything, options.plot)
    return 0 if any(row["step_ms"] is not None for row in everything[kept:]) else 1


if __name__ == "__main__":
    sys.exit(main())
