"""Loss curves in FP8 and BF16 of `scripts/curves_script.py`.

    python scripts/train_curves.py --out DIR    # curves.json, curves.png

For each model `--fp8` and `--no-fp8`, three seeds each; FP8 passes if its mean of the last 50
losses is within 2 standard deviations (over the BF16 seeds) of BF16's. Every layer that can run in
FP8 does, also where that is predicted to be slower. Runs that curves.json has are not run again.

BERT leaves the plateau of its first steps late, at a step that chance decides, and a comparison
around there compares when. So it is trained in BF16 first, once, until it is well past it, and all
its runs start from there, each with an order of the text of its own. ModernBERT and Llama start
from scratch. Six or twelve runs at once fill one H200:

    python scripts/train_curves.py --out DIR --families modernbert llama
    python scripts/train_curves.py --out DIR --families bert

FP8 runs eagerly unless `--modes` says otherwise: `fp8-compiled` is with `--compile`, `fp8-graphs`
with `--cuda-graphs`; BF16 is eager. `--tiny` does all of it on a CPU, emulated. Exits with 1 if a
run or a verdict fails.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "curves_script.py"
FAMILIES = {
    "bert": "BERT-base, masked words, from a start past the plateau",
    "modernbert": "ModernBERT 12 x 768, masked words",
    "llama": "Llama 12 x 768, next word",
}
# family: (most steps, the loss that is well below what the words' frequencies predict: 6.7)
STARTS = {"bert": (2500, 5.0)}
TINY_STARTS = {"bert": (25, 5.0)}
# What is held against BF16 in eager, and what `train` is told for each: BF16 that is compiled too,
# which tells what of a difference is the compiler's.
MODES: dict[str, list[str]] = {
    "bf16-compiled": ["--compile"],
    "fp8": [],
    "fp8-compiled": ["--compile"],
    "fp8-graphs": ["--cuda-graphs"],
}
COLOURS = {
    "bf16": "#8a8a8a",
    "bf16-compiled": "#c9a227",
    "fp8": "#d1495b",
    "fp8-compiled": "#2e86ab",
    "fp8-graphs": "#3b8b5a",
}
LAST = 50
ALLOWED_STD = 2.0


class Runner:
    """Runs the script, bare or under `fp8patch train`, in a folder of its own."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.starting = threading.Lock()
        self.recipe = folder / "recipe.yaml"
        # At these sizes many layers are predicted to be slower in FP8; here accuracy is at stake.
        self.recipe.write_text(f"base: {args.recipe}\nmin_gain: 0\n")
        path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        self.env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}

    def script(self, *words: object) -> list[str]:
        common = ["--tokens", self.folder / "tokens.pt", *(["--tiny"] if self.args.tiny else [])]
        return [str(word) for word in (SCRIPT, *common, *words)]

    def injected(self, mode: str, report: Path | None = None) -> list[str]:
        fp8 = "--emulate" if self.args.tiny else "--fp8"
        flags = ["--no-fp8" if mode.startswith("bf16") else fp8, *MODES.get(mode, [])]
        written = [] if report is None else ["--report", str(report)]
        return ["-m", "fp8patch", "train", *flags, "--recipe", str(self.recipe), *written]

    def __call__(self, command: list[str]) -> str:
        """Run it to its end; what it wrote.

        Raises:
            RuntimeError: It failed.
        """
        done = subprocess.run(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.env,
        )
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-3000:]}")
        return done.stdout

    def prepare(self) -> str:
        """Tokenise the text once for all runs."""
        return self(self.script("--prepare")).splitlines()[-1]

    def start(self, family: str) -> list[object]:
        """What makes the script begin where all runs of `family` do; made by the first to ask."""
        found = (TINY_STARTS if self.args.tiny else STARTS).get(family)
        if found is None:
            return []
        with self.starting:
            path = self.folder / f"{family}.pt"
            if not path.exists():
                steps, loss = found
                words = ("--family", family, "--seed", 1000, "--steps", steps, "--until", loss)
                output = self(self.script(*words, "--autocast-by-hand", "--save", path))
                print(f"{FAMILIES[family]}: {output.splitlines()[-1]}", flush=True)
            return ["--start", path]


def one_curve(runner: Runner, family: str, mode: str, seed: int) -> dict[str, Any]:
    """One run's losses and what fp8patch reported of it."""
    report = runner.folder / f"{family}-{mode}-{seed}.json"
    log = report.with_suffix(".log")
    steps = runner.args.steps
    words = [*runner.start(family), "--family", family, "--seed", seed, "--steps", steps]
    words += ["--log", log]
    output = runner([*runner.injected(mode, report), *runner.script(*words)])
    found = json.loads(report.read_text())
    losses = [loss for _, loss in found["losses"]]
    # The loop's own record: fp8patch's report has every step of it.
    if losses != json.loads(log.read_text())["losses"] or len(losses) != steps:
        raise RuntimeError(f"the report has {len(losses)} losses, which are not the script's")
    kept = ("execution", "device", "coverage", "ratios", "overhead", "peak_memory_bytes", "models")
    # The history of every slot is a thousand times what the curves are.
    models = [{k: v for k, v in model.items() if k != "history"} for model in found["models"]]
    return {
        "family": family,
        "mode": mode,
        "seed": seed,
        "steps": steps,
        "tiny": runner.args.tiny,
        "recipe": runner.args.recipe,
        "losses": [round(loss, 6) for loss in losses],
        "report": {key: found[key] for key in kept} | {"models": models},
        "lines": [line for line in output.splitlines() if line.startswith("fp8patch: ")],
    }


def key(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("family", "mode", "seed", "steps", "tiny", "recipe"))


def curves(runner: Runner) -> bool:
    """Run what is missing, then table, verdict and picture."""
    args = runner.args
    out = args.out / "curves.json"
    before = json.loads(out.read_text()) if out.exists() else {"runs": [], "text": ""}
    runs = before["runs"]
    how = (args.steps, args.tiny, args.recipe)
    modes = ("bf16", *args.modes)
    wanted = [(f, m, s, *how) for s in range(args.seeds) for f in args.families for m in modes]
    have = {key(run) for run in runs}
    missing = [w for w in wanted if w not in have]
    text = runner.prepare() if missing else before["text"]
    print(f"{len(missing)} of {len(wanted)} runs to do, {args.jobs} at once. {text}", flush=True)
    failed, started = 0, time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(one_curve, runner, *w[:3]): w for w in missing}
        for future in as_completed(futures):
            name = "{} {} seed {}".format(*futures[future][:3])
            try:
                runs.append(future.result())
            except (RuntimeError, OSError, ValueError) as error:
                failed += 1
                print(f"FAIL {name}: {error}", flush=True)
                continue
            write(out, {"machine": machine(runs), "text": text, "runs": runs})
            final = final_loss(runs[-1])
            print(f"{time.monotonic() - started:5.0f} s  {name}: {final:.4f}", flush=True)
    used = [run for run in runs if key(run) in wanted]
    pairs = [(family, mode) for family in args.families for mode in args.modes]
    rows = [row for pair in pairs if (row := verdict(*pair, used)) is not None]
    write(out, {"machine": machine(runs), "text": text, "verdicts": rows, "runs": runs})
    print_table(rows, used)
    picture(used, args.out / "curves.png")
    return not failed and len(rows) == len(pairs) and all(row["ok"] for row in rows)


def final_loss(run: dict[str, Any]) -> float:
    return statistics.fmean(run["losses"][-LAST:])


def verdict(family: str, mode: str, runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """FP8 in `mode` against BF16 for one family; None without two seeds of BF16 and one of FP8."""
    found: dict[str, dict[int, float]] = {"bf16": {}, mode: {}}
    for run in runs:
        if run["family"] == family and run["mode"] in found:
            found[run["mode"]][run["seed"]] = final_loss(run)
    if len(found["bf16"]) < 2 or not found[mode]:
        return None
    mean = {name: statistics.fmean(losses.values()) for name, losses in found.items()}
    std = statistics.stdev(found["bf16"].values())
    difference = mean[mode] - mean["bf16"]
    paired = [found[mode][s] - found["bf16"][s] for s in found[mode] if s in found["bf16"]]
    return {
        "family": family,
        "mode": mode,
        "final": found,
        "mean": mean,
        "bf16_std": std,
        "difference": difference,
        "in_std": abs(difference) / std if std else float(difference != 0) * 1e9,
        "same_seed_differences": paired,
        "ok": abs(difference) <= ALLOWED_STD * std,
    }


def print_table(rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    print(f"\nmean of the last {LAST} losses")
    for row in rows:
        print(f"\n{FAMILIES[row['family']]}")
        for mode, losses in row["final"].items():
            each = "  ".join(f"{value:.4f}" for _, value in sorted(losses.items()))
            print(f"  {mode:12s} {row['mean'][mode]:.4f}   seeds: {each}")
        for run in runs:
            cover = run["report"]["coverage"]
            ran = run["family"] == row["family"] and run["mode"] == row["mode"]
            if ran and not row["mode"].startswith("bf16"):
                calls = f"{cover['fp8_calls']} of {cover['calls']} GEMM calls"
                print(f"  in FP8: {calls}, {cover['fp8_flops_share']:.1%} of GEMM FLOPs")
                break
        same = "  ".join(f"{value:+.4f}" for value in row["same_seed_differences"])
        print(f"  {row['mode']} - bf16, same seed: {same}")
        said = "ok  " if row["ok"] else "FAIL"
        print(
            f"{said} |{row['mode']} - bf16| = {abs(row['difference']):.4f} = {row['in_std']:.2f} "
            f"standard deviations of BF16 ({row['bf16_std']:.4f}); allowed: {ALLOWED_STD:.0f}"
        )


def picture(runs: list[dict[str, Any]], path: Path) -> None:
    """Losses above, FP8 minus BF16 of the same seed below; running means of 20 steps."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed. Run this again where it is.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    families = [family for family in FAMILIES if any(r["family"] == family for r in runs)]
    figure, axes = pyplot.subplots(
        2, len(families), figsize=(6 * len(families), 6.5), squeeze=False, height_ratios=[3, 1.2]
    )
    for column, family in enumerate(families):
        above, below = axes[0][column], axes[1][column]
        smooth = {
            (r["mode"], r["seed"]): running_mean(r["losses"]) for r in runs if r["family"] == family
        }
        for mode, colour in COLOURS.items():
            label = mode.upper()
            for (kind, _), line in sorted(smooth.items()):
                if kind == mode:
                    above.plot(line, color=colour, lw=1, label=label)
                    label = None
        for (kind, seed), line in sorted(smooth.items()):
            other = smooth.get(("bf16", seed))
            if kind != "bf16" and other is not None:
                apart = [a - b for a, b in zip(line, other, strict=True)]
                below.plot(apart, color=COLOURS[kind], lw=1)
        ends = [final_loss(r) for r in runs if r["family"] == family and r["mode"] == "bf16"]
        if len(ends) > 1:
            band = ALLOWED_STD * statistics.stdev(ends)
            below.axhspan(-band, band, color="#dddddd", label="2 standard deviations of BF16")
            below.legend(frameon=False, fontsize=8, loc="upper right")
        above.set_title(FAMILIES[family], fontsize=10)
        above.set_ylabel("training loss")
        above.legend(frameon=False)
        below.set_ylabel("difference to BF16")
        below.set_xlabel("step")
        for axis in (above, below):
            axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(f"\n{path}")


def running_mean(values: list[float], width: int = 20) -> list[float]:
    return [statistics.fmean(values[max(0, at + 1 - width) : at + 1]) for at in range(len(values))]


def machine(runs: list[dict[str, Any]]) -> dict[str, Any]:
    found = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    devices = {run["report"]["device"] for run in runs if run["mode"] != "bf16"}
    return {"python": platform.python_version(), **found, "devices": sorted(devices)}


def write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values) + "\n")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--tiny", action="store_true", help="small models, emulated, on a CPU")
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--steps", type=int, help="default: 500, tiny 8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=12, help="curves: runs at once, on one GPU")
    parser.add_argument("--recipe", default="delayed")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["fp8"], help="default: fp8")
    args = parser.parse_args(words)
    args.steps = args.steps or (8 if args.tiny else 500)
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        ok = curves(Runner(args, Path(folder)))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
