"""trl's own `scripts/sft.py`, as its wheel ships it, under `fp8patch train`."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
import trl_case
from injected import train
from safetensors.torch import load_file


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    if trl_case.sft() is None:
        pytest.skip("trl is not installed: pip install '.[dev]'")
    trl_case.prepare(tmp_path, texts=64)
    return tmp_path


@pytest.mark.slow
def test_sft(tiny: Path) -> None:
    common = (trl_case.sft(), *trl_case.arguments(6), "--use_cpu", "True", "--save_steps", 3)
    common += ("--learning_rate", 1e-3)
    env = trl_case.ENV
    options = ("--emulate", "--report", "r.json")
    done = train(*options, *common, "--output_dir", "fp8", cwd=tiny, env=env)
    bare = train("--off", *common, "--output_dir", "bare", cwd=tiny, env=env)
    assert sys.executable in bare.args
    report = json.loads((tiny / "r.json").read_text())
    # The head is never called: trl reads its weight. 14 Linears, two micro-batches.
    assert (report["coverage"]["fp8_calls"], report["coverage"]["calls"]) == (28, 28)
    assert report["steps"] == 6
    assert report["coverage"]["never_ran"] == []
    assert report["coverage"]["not_counted"] == ["lm_head"]
    assert "not in these figures, as it is never called: lm_head" in done.stderr
    assert "LlamaForCausalLM: 14 of 15 Linears in FP8" in done.stderr
    assert "summary: 6 optimizer steps" in done.stderr
    assert "fp8patch: " not in bare.stderr
    start, fp8, stock = (
        load_file(tiny / name / "model.safetensors") for name in ("tiny", "fp8", "bare")
    )

    def moved(end: dict[str, torch.Tensor]) -> set[str]:
        return {key for key in start if not torch.equal(start[key], end[key].to(start[key].dtype))}

    assert moved(fp8) == moved(stock) != set()
    losses = [
        [e["loss"] for e in json.loads(path.read_text())["log_history"] if "loss" in e]
        for path in (
            tiny / name / "checkpoint-6" / "trainer_state.json" for name in ("fp8", "bare")
        )
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    # A checkpoint resumes bit for bit, and the model loads as any other.
    words = ("--output_dir", "again", "--resume_from_checkpoint", "fp8/checkpoint-3")
    train("--emulate", *common, *words, cwd=tiny, env=env)
    again = load_file(tiny / "again" / "model.safetensors")
    assert all(torch.equal(again[key], fp8[key]) for key in fp8)
    transformers.LlamaForCausalLM.from_pretrained(tiny / "fp8")
