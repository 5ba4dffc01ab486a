"""Every family of scripts on the GPU: `fp8patch train --fp8` ends where `--no-fp8` ends.

    python scripts/check_families.py --out DIR                  # one GPU; two to three minutes
    python scripts/check_families.py --out DIR --emulate --only plain   # a CPU

The scripts are those of `tests/scripts/`, and trl's own `sft.py` where trl is installed. Each runs
in BF16 with three seeds and in FP8 with one, several at once. FP8 passes if its mean of the last 50
losses is within 2 standard deviations of BF16's, the parameters that BF16 moved have moved, and the
report counts the calls and FLOPs that the shapes give. Compiled runs (Inductor) are measured by the
noise of the eager ones. Writes families.json and families.md; exits with 1 if anything fails.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import trl_case  # noqa: E402
from check_ddp import machine  # noqa: E402
from families import (  # noqa: E402
    ALLOWED,
    FAMILIES,
    SEEDS,
    VIT,
    Ends,
    Family,
    Outcome,
    counts,
    ends_of,
    losses_of,
)
from injected import stdlib_text  # noqa: E402

LIMIT_SECONDS = 170


@dataclass(frozen=True)
class Sft(Family):
    """trl's script, run in the folder that was prepared for it."""

    @property
    def script(self) -> Path:
        found = trl_case.sft()
        assert found is not None
        return found

    def arguments(self, text: Path, out: Path, seed: int, device: str = "cpu") -> list[object]:
        where = ("--use_cpu", "True") if device == "cpu" else ()
        rest = ("--learning_rate", 5e-3, "--seed", seed, "--output_dir", out)
        return [*trl_case.arguments(self.steps), *where, *rest]

    def outcome(self, out: Path, seed: int) -> Outcome:
        place = out / f"checkpoint-{self.steps}"
        start = load_file(out.parent / "tiny" / "model.safetensors")
        return Outcome(losses_of(place), start, load_file(place / "model.safetensors"))


@dataclass(frozen=True)
class Case:
    """A family as it is run here.

    Attributes:
        extra: More of the script's arguments.
        noise_of: The case whose BF16 runs say what noise is; its own where None.
    """

    name: str
    family: Family
    extra: tuple[object, ...] = ()
    noise_of: str | None = None

    @property
    def seeds(self) -> tuple[int, ...]:
        return SEEDS if self.noise_of is None else SEEDS[:1]


def cases(device: str) -> list[Case]:
    """All that can run here."""
    found = [Case(family.name, family) for family in (*FAMILIES, VIT)]
    of = {case.name: case.family for case in found}
    backend = "inductor" if device != "cpu" else "aot_eager"
    compiled = ("--torch_compile", "--torch_compile_backend", backend)
    words = tuple(word for word in of["trainer"].words if word != "--gradient_checkpointing")
    trainer = dataclasses.replace(of["trainer"], words=words)
    found.append(Case("trainer, compiled", trainer, compiled, "trainer"))
    found.append(Case("plain, compiled", of["plain"], ("--compile", backend), "plain"))
    if importlib.util.find_spec("timm"):
        found.append(Case("timm ViT, spawned", VIT, ("--timm",)))
    if trl_case.sft() is not None:
        # The head is not called: its weight is read.
        sft = Sft("sft", (), 100, (), of["trainer"].linears, (), 0, micro=2)
        found.append(Case("trl sft", sft))
    return found


@dataclass(frozen=True)
class Result:
    """One run: what it left, its report, and how long it took."""

    outcome: Outcome
    report: dict[str, Any]
    seconds: float


def run(case: Case, mode: str, seed: int, args: argparse.Namespace, folder: Path) -> Result:
    """Raises RuntimeError if it fails."""
    out = folder / f"{case.name}-{mode}-{seed}".replace(", ", "-").replace(" ", "-")
    out.mkdir()
    report = out / "report.json"
    flag = {"bf16": "--no-fp8", "fp8": "--emulate" if args.emulate else "--fp8"}[mode]
    words = case.family.arguments(folder / "text.txt", out, seed, args.device)
    recipe = folder / "recipe.yaml"
    command = [sys.executable, "-m", "fp8patch", "train", flag, "--recipe", recipe]
    command += ["--report", report, case.family.script, *words, *case.extra]
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path.rstrip(os.pathsep)}
    started = time.monotonic()
    try:
        done = subprocess.run(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=env | trl_case.ENV,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"still running after {LIMIT_SECONDS} s\n{error.output}") from None
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-2500:]}")
    found = json.loads(report.read_text())
    return Result(case.family.outcome(out, seed), found, time.monotonic() - started)


def judge(case: Case, results: dict[tuple[str, str, int], Result]) -> dict[str, Any]:
    """One row. KeyError if a run of the case is missing."""
    fp8 = results[(case.name, "fp8", 0)]
    bf16 = [results[(case.name, "bf16", seed)] for seed in case.seeds]
    losses = [result.outcome.losses for result in bf16]
    ends = ends_of(fp8.outcome.losses, losses if len(losses) > 1 else [*losses, *losses])
    if case.noise_of is not None:
        others = [results[(case.noise_of, "bf16", seed)].outcome.losses for seed in SEEDS]
        noise = ends_of(losses[0], others)
        # As far apart as BF16's own seeds, around the compiled run.
        shifted = [end + ends.bf16[0] - noise.bf16[0] for end in noise.bf16]
        ends = Ends(ends.fp8, shifted, ends.learned)
    moved = [fp8.outcome.moved(), bf16[0].outcome.moved()]
    expected = expected_counts(case)
    counted = counts(fp8.report, expected)
    checks = {
        "loss": ends.learned and ends.in_deviations <= ALLOWED,
        "moved": bool(moved[0]) and moved[0] == moved[1],
        "counts": counted == expected and not fp8.report["coverage"]["never_ran"],
        "steps": fp8.report["steps"] == case.family.steps,
        "other": fp8.outcome.losses != losses[0],
    }
    return {
        "case": case.name,
        "fp8": ends.fp8,
        "bf16": [statistics_of(one) for one in losses],
        "deviation": ends.deviation,
        "in_deviations": ends.in_deviations,
        "moved": len(moved[0]),
        "counted": counted,
        "expected": expected,
        "model": fp8.report["models"][0]["class"],
        "seconds": fp8.seconds,
        "checks": checks,
        "ok": all(checks.values()),
    }


def expected_counts(case: Case) -> dict[str, float]:
    expected = case.family.expected()
    if isinstance(case.family, Sft):  # texts differ in length: rows are not known
        return {key: expected[key] for key in ("fp8_calls", "calls")}
    return expected


def statistics_of(losses: list[float]) -> float:
    return ends_of(losses, [losses, losses]).fp8


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| script | model | FP8 | BF16, by seed | apart, in deviations | moved | in FP8 | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        failed = [name for name, ok in row["checks"].items() if not ok]
        bf16 = " ".join(f"{value:.4f}" for value in row["bf16"])
        calls = f"{row['counted']['fp8_calls']} of {row['counted']['calls']} calls"
        lines.append(
            f"| {row['case']} | {row['model']} | {row['fp8']:.4f} | {bf16} | "
            f"{row['in_deviations']:.2f} of {row['deviation']:.4f} | {row['moved']} | {calls} | "
            f"{'ok' if row['ok'] else 'FAIL: ' + ', '.join(failed)} |"
        )
    return lines


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--emulate", action="store_true", help="no GPU: FP8 emulated")
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--jobs", type=int, default=8, help="runs at once")
    args = parser.parse_args(words)
    args.device = "cpu" if args.emulate else "cuda"
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in cases(args.device) if not args.only or case.name in args.only]
    results: dict[tuple[str, str, int], Result] = {}
    failed, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        folder = Path(name)
        # At these sizes every layer is predicted to be slower in FP8; here accuracy is at stake.
        (folder / "recipe.yaml").write_text("base: delayed\nmin_gain: 0\n")
        trl_case.prepare(folder, texts=900)
        stdlib_text(folder)
        wanted = [(c, "fp8", 0) for c in chosen] + [(c, "bf16", s) for c in chosen for s in c.seeds]
        # What compiles takes longest.
        wanted.sort(key=lambda w: w[0].noise_of is None)
        futures = [(w, pool.submit(run, *w, args, folder)) for w in wanted]
        for (case, mode, seed), future in futures:
            try:
                results[(case.name, mode, seed)] = future.result()
            except Exception as error:  # the others go on, and the row is missing
                failed += 1
                print(f"FAIL {case.name} {mode} {seed}: {error}", flush=True)
    rows = []
    for case in chosen:
        try:
            rows.append(judge(case, results))
        except KeyError as error:
            failed += 1
            print(f"FAIL {case.name}: {error} is missing")
    where = machine()
    head = ", ".join(f"{name} {value}" for name, value in where.items())
    print(f"{len(results)} runs, {time.monotonic() - started:.0f} s, {head}\n")
    print("\n".join(table(rows)))
    text = [f"# {Path(__file__).name}, {head}", "", *table(rows), ""]
    (args.out / "families.md").write_text("\n".join(text))
    (args.out / "families.json").write_text(json.dumps({"machine": where, "rows": rows}) + "\n")
    return 0 if not failed and all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
