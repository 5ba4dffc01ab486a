"""Every family of scripts, trained through `fp8patch train --emulate`, ends where BF16 ends.

Each script runs bare in BF16 with three seeds, and once through the command. The text is read at
most once, so there is nothing to memorise. What the summary counts is counted here from the shapes.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from injected import SCRIPTS, moved, python, script, stdlib_text, train
from safetensors.torch import load_file

SEEDS = (0, 1, 2)
LAST = 50


@dataclass(frozen=True)
class Family:
    """A script, and what its first optimizer step consists of.

    Attributes:
        steps: Optimizer steps.
        bf16: What makes the bare script compute in BF16.
        linears: (N, K) of each Linear to run in FP8, those of one layer; there are two layers.
        others: (N, K) of the others.
        rows: M of a forward.
        micro: Forwards in a step.
        evaluated: Rows of an evaluation that comes first.
        losses: The report has them: they are in the model's output.
    """

    name: str
    words: tuple[object, ...]
    steps: int
    bf16: tuple[object, ...]
    linears: tuple[tuple[int, int], ...]
    others: tuple[tuple[int, int], ...]
    rows: int
    once: tuple[tuple[int, int], ...] = ()
    micro: int = 1
    evaluated: int = 0
    losses: bool = True

    @property
    def in_fp8(self) -> list[tuple[int, int]]:
        return [*self.linears * 2, *self.once]

    def expected(self) -> dict[str, float]:
        """Each training forward takes three GEMMs a Linear, an evaluation's one."""
        passes = self.micro + (1 if self.evaluated else 0)
        work = 2 * (3 * self.micro * self.rows + self.evaluated)
        fp8 = sum(n * k for n, k in self.in_fp8)
        total = fp8 + sum(n * k for n, k in self.others)
        return {
            "fp8_calls": passes * len(self.in_fp8),
            "calls": passes * (len(self.in_fp8) + len(self.others)),
            "fp8_flops": work * fp8,
            "flops": work * total,
        }


ACCELERATE = ("--mixed_precision", "bf16")
GPT = ("plain_gpt", "--steps", 200)
LLAMA = ("clm_no_trainer", "--model", "llama", "--max_train_steps", 100)
# Slower to learn: after 100 steps the loss still falls by its noise every ten steps.
GPT2 = ("clm_no_trainer", "--model", "gpt2", "--max_train_steps", 200)
TRAINER = (
    *("clm_trainer", "--max_steps", 100, "--logging_steps", 1, "--logging_nan_inf_filter", "False"),
    *("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2, "--use_cpu"),
    *("--gradient_checkpointing", "--bf16", "--learning_rate", 5e-3, "--report_to", "none"),
    *("--save_strategy", "no", "--disable_tqdm", "True"),
)
FAMILIES = (
    Family(
        "mlm", ("mlm_no_trainer", "--max_train_steps", 150, "--learning_rate", 3e-3), 150,
        ACCELERATE, ((32, 32),) * 4 + ((64, 32), (32, 64)), ((144, 32),), 256, once=((32, 32),),
    ),
    Family(
        "llama", LLAMA, 100, ACCELERATE,
        ((48, 48), (16, 48), (16, 48), (48, 48), (96, 48), (96, 48), (48, 96)), ((128, 48),), 256,
        micro=2,
    ),
    Family(
        "gpt2", GPT2, 200, ACCELERATE,
        ((144, 48), (48, 48), (192, 48), (48, 192)), ((128, 48),), 256, micro=2,
    ),
    Family(
        "trainer", TRAINER, 100, (), ((32, 32),) * 4 + ((64, 32), (64, 32), (32, 64)),
        ((128, 32),), 128, micro=2,
    ),
    Family(
        "plain", GPT, 200, ("--autocast",), ((96, 32), (32, 32), (128, 32), (32, 128)),
        ((96, 32),), 128, evaluated=128, losses=False,
    ),
)  # fmt: skip


def within_noise(fp8: list[float], bf16: list[list[float]]) -> None:
    ends = [statistics.fmean(losses[-LAST:]) for losses in bf16]
    end, noise = statistics.fmean(fp8[-LAST:]), statistics.stdev(ends)
    print(f"FP8 {end:.4f}, BF16 {', '.join(f'{e:.4f}' for e in ends)}, deviation {noise:.4f}")
    first = statistics.fmean(bf16[0][:5])
    assert all(e < 0.9 * first for e in ends), "BF16 has learned nothing"
    assert abs(end - ends[0]) <= 2 * noise


def losses_of(directory: Path) -> list[float]:
    state = directory / "trainer_state.json"
    if state.exists():
        return [e["loss"] for e in json.loads(state.read_text())["log_history"] if "loss" in e]
    return torch.load(directory / "losses.pt")


def summary(err: str) -> str:
    return " ".join(line for line in err.splitlines() if line.startswith("fp8patch: "))


def check_counts(family: Family, report: dict[str, Any], err: str) -> None:
    expected = family.expected()
    cover = report["coverage"]
    assert {key: cover[key] for key in expected} == expected
    assert cover["never_ran"] == []
    assert report["steps"] == len(report["step_seconds"]) == family.steps
    assert report["state"] == "finished"
    assert sum(report["models"][0]["converted"].values()) >= len(family.in_fp8)
    said = summary(err)
    kind = "8 of 8 Conv1Ds" if family.name == "gpt2" else None
    number = len(family.in_fp8)
    assert (kind or f"{number} of {number + len(family.others)} Linears") in said
    assert f"in FP8: {expected['fp8_calls']:.0f} of {expected['calls']:.0f} GEMM calls" in said
    assert f"{expected['fp8_flops'] / expected['flops']:.1%} of GEMM FLOPs (up to" in said
    assert f"summary: {family.steps} optimizer steps, median " in said
    for ratios in report["ratios"].values():
        assert ratios["non_finite"] == 0
        assert ratios["saturated"] < 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the Trainer renames its arguments in 5.x
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_fp8_ends_where_bf16_ends(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *words = family.words
    text = ("--text", stdlib_text(tmp_path))
    saves = family.name != "plain"
    out = ("--output_dir", tmp_path / "bf16") if saves else ()
    bare: list[dict[str, Any]] = []
    for seed in SEEDS:
        at = (*words, *text, *out, *family.bf16, "--seed", seed)
        run = script(str(name), *at, patch=monkeypatch)
        # Only the first one's parameters are looked at.
        bare.append(run if seed == 0 else {"losses": run["losses"]})
    place = tmp_path / "fp8"
    place.mkdir()
    out = ("--output_dir", place) if saves else ("--save", place / "model.pt")
    options = ("--emulate", "--report", "report.json")
    # BF16 is what the run brings where the script asks for nothing.
    done = train(*options, SCRIPTS / f"{name}.py", *words, *text, *out, "--seed", 0, cwd=tmp_path)
    if saves:
        losses, weights = (
            losses_of(place)[: len(bare[0]["losses"])],
            load_file(place / "model.safetensors"),
        )
    else:
        saved = torch.load(place / "model.pt")
        losses, weights = saved["losses"], saved["model"]
    within_noise(losses, [run["losses"] for run in bare])
    assert losses != bare[0]["losses"]
    report = json.loads((tmp_path / "report.json").read_text())
    check_counts(family, report, done.stderr)
    if family.losses and family.name != "trainer":  # whose losses are parts of a batch's
        pairs = zip(*[iter(losses)] * family.micro, strict=False)
        each = [statistics.fmean(pair) for pair in pairs][: family.steps]
        assert [loss for _, loss in report["losses"]] == pytest.approx(each, rel=1e-6)
    start = bare[0]["start"]
    now = {key: value for key, value in weights.items() if key in start}
    assert {k for k, v in now.items() if not torch.equal(v, start[k])} == moved(bare[0]) & set(now)
    assert len(now) >= len(start) - 1  # a tied head is saved once


VIT = Family(
    "vit", (), 100, (), ((96, 32), (32, 32), (128, 32), (32, 128)), ((10, 32),), 128, losses=False
)


@pytest.mark.slow
def test_spawned_ranks_end_where_bf16_ends(tmp_path: Path) -> None:
    """Two processes by `mp.spawn`, DDP, and a loss inside the script's own autocast."""
    common = (SCRIPTS / "vit_spawn.py", "--steps", VIT.steps, "--save")
    for name in ("bf16", "fp8"):
        (tmp_path / name).mkdir()
    python(*common, tmp_path / "bf16", "--seeds", *SEEDS, cwd=tmp_path)
    done = train("--emulate", "--report", "r.json", *common, tmp_path / "fp8", cwd=tmp_path)
    bf16 = [torch.load(tmp_path / "bf16" / f"{seed}.pt") for seed in SEEDS]
    fp8 = torch.load(tmp_path / "fp8" / "0.pt")
    within_noise(fp8["losses"], [run["losses"] for run in bf16])
    digests = {line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("rank")}
    assert len(digests) == 1, done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["world_size"] == 2
    cover = report["coverage"]
    # The head's rows are images, and not their patches.
    head = 6 * 8 * 10 * 32
    assert (cover["fp8_calls"], cover["calls"]) == (8, 9)
    assert cover["fp8_flops"] == VIT.expected()["fp8_flops"]
    assert cover["flops"] == cover["fp8_flops"] + head
    assert report["steps"] == VIT.steps
    assert "ViT: 8 of 9 Linears in FP8 (98.7% of GEMM FLOPs), 5 of 5 norms with them" in done.stderr
    assert done.stderr.count("summary: 100 optimizer steps") == 1

    def changed(run: dict[str, Any]) -> set[str]:
        return {k for k, v in run["model"].items() if not torch.equal(v, run["start"][k])}

    assert changed(fp8) == changed(bf16[0])
    assert sys.executable in done.args


@pytest.mark.slow
def test_a_compiled_loop(tmp_path: Path) -> None:
    """The script compiles its model; FP8 is then what it is in eager, to rounding."""
    words = (SCRIPTS / "plain_gpt.py", "--steps", 8, "--text", stdlib_text(tmp_path), "--save")
    eager = train("--emulate", *words, tmp_path / "eager.pt", cwd=tmp_path)
    compiled = train(
        "--emulate", *words, tmp_path / "compiled.pt", "--compile", "aot_eager", cwd=tmp_path
    )
    counts = [line for line in eager.stderr.splitlines() if "GEMM calls" in line]
    assert counts == [line for line in compiled.stderr.splitlines() if "GEMM calls" in line]
    assert len(counts) == 1
    runs = [torch.load(tmp_path / f"{name}.pt") for name in ("eager", "compiled")]
    assert runs[0]["model"].keys() == runs[1]["model"].keys()
    assert runs[1]["losses"] == pytest.approx(runs[0]["losses"], rel=5e-3)


@pytest.mark.slow
def test_a_compiled_trainer(tmp_path: Path) -> None:
    """`--torch_compile`, with a backend that needs no C++ compiler."""
    words = (
        *(SCRIPTS / "clm_trainer.py", "--max_steps", 6, "--logging_steps", 1, "--use_cpu"),
        *("--per_device_train_batch_size", 4, "--report_to", "none", "--save_strategy", "no"),
        *("--bf16", "--disable_tqdm", "True", "--output_dir"),
    )
    compile_it = ("--torch_compile", "--torch_compile_backend", "aot_eager")
    train("--emulate", *words, tmp_path / "eager", cwd=tmp_path)
    options = ("--emulate", "--report", "r.json")
    train(*options, *words, tmp_path / "compiled", *compile_it, cwd=tmp_path)
    losses = [losses_of(tmp_path / name) for name in ("eager", "compiled")]
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["steps"], report["coverage"]["fp8_calls"]) == (6, 14)
    keys = [
        load_file(tmp_path / name / "model.safetensors").keys() for name in ("eager", "compiled")
    ]
    assert keys[0] == keys[1]
