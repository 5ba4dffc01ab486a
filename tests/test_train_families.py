"""Every family of scripts, trained through `fp8patch train --emulate`, ends where BF16 ends.

Each script runs bare in BF16 with three seeds, and once through the command. What the summary
counts is counted here from the shapes.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import ALLOWED, FAMILIES, SEEDS, VIT, Family, counts, ends_of, losses_of
from injected import SCRIPTS, moved, python, script, stdlib_text, train
from safetensors.torch import load_file


def within_noise(fp8: list[float], bf16: list[list[float]]) -> None:
    ends = ends_of(fp8, bf16)
    print(ends)
    assert ends.learned, "BF16 has learned nothing"
    assert ends.in_deviations <= ALLOWED


def summary(err: str) -> str:
    return " ".join(line for line in err.splitlines() if line.startswith("fp8patch: "))


def check_counts(family: Family, report: dict[str, Any], err: str) -> None:
    expected = family.expected()
    assert counts(report, expected) == expected
    assert report["coverage"]["never_ran"] == []
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
    text, name = stdlib_text(tmp_path), family.script.stem
    bare: list[dict[str, Any]] = []
    for seed in SEEDS:
        at = (*family.arguments(text, tmp_path / "bf16", seed), *family.bf16)
        (tmp_path / "bf16").mkdir(exist_ok=True)
        run = script(name, *at, patch=monkeypatch)
        # Only the first one's parameters are looked at.
        bare.append(run if seed == 0 else {"losses": run["losses"]})
    place = tmp_path / "fp8"
    place.mkdir()
    # BF16 is what the run brings where the script asks for nothing.
    words = (family.script, *family.arguments(text, place, 0))
    done = train("--emulate", "--report", "report.json", *words, cwd=tmp_path)
    outcome = family.outcome(place, 0)
    losses = outcome.losses
    within_noise(losses, [run["losses"] for run in bare])
    assert losses != bare[0]["losses"]
    report = json.loads((tmp_path / "report.json").read_text())
    check_counts(family, report, done.stderr)
    if family.losses and family.name != "trainer":  # whose losses are parts of a batch's
        pairs = zip(*[iter(losses)] * family.micro, strict=False)
        each = [statistics.fmean(pair) for pair in pairs][: family.steps]
        assert [loss for _, loss in report["losses"]] == pytest.approx(each, rel=1e-6)
    assert outcome.start.keys() == bare[0]["start"].keys()
    assert outcome.moved() == moved(bare[0]) & outcome.end.keys()
    assert len(outcome.end) >= len(outcome.start) - 1  # a tied head is saved once


@pytest.mark.slow
def test_spawned_ranks_end_where_bf16_ends(tmp_path: Path) -> None:
    """Two processes by `mp.spawn`, DDP, and a loss inside the script's own autocast."""
    for name in ("bf16", "fp8"):
        (tmp_path / name).mkdir()
    bare, injected = (
        VIT.arguments(tmp_path, tmp_path / name, seed) for name, seed in (("bf16", 0), ("fp8", 0))
    )
    bare[bare.index("--seeds") + 1 : bare.index("--seeds") + 2] = SEEDS
    python(VIT.script, *bare, cwd=tmp_path)
    done = train("--emulate", "--report", "r.json", VIT.script, *injected, cwd=tmp_path)
    runs = [VIT.outcome(tmp_path / "bf16", seed) for seed in SEEDS]
    fp8 = VIT.outcome(tmp_path / "fp8", 0)
    within_noise(fp8.losses, [run.losses for run in runs])
    digests = {line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("rank")}
    assert len(digests) == 1, done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["world_size"] == 2
    assert counts(report, VIT.expected()) == VIT.expected()
    assert report["steps"] == VIT.steps
    assert "ViT: 8 of 9 Linears in FP8 (98.7% of GEMM FLOPs), 5 of 5 norms with them" in done.stderr
    assert done.stderr.count("summary: 100 optimizer steps") == 1

    assert fp8.moved() == runs[0].moved()
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
