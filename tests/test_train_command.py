"""Whole runs of the command: `--check` and debug lines together, and accelerate's own launcher."""

import json
import re
from pathlib import Path

import pytest
import torch
from injected import SCRIPTS, script, train
from safetensors.torch import load_file


@pytest.mark.slow
def test_check_and_debug_lines(tmp_path: Path) -> None:
    """They end a script of 50 steps after the third, and name each GEMM module once."""
    words = ("--emulate", "--check", "--report", "r.json", SCRIPTS / "plain_gpt.py", "--steps", 50)
    done = train(*words, "--save", "never.pt", cwd=tmp_path, env={"FP8PATCH_DEBUG": "1"})
    assert not (tmp_path / "never.pt").exists()
    assert done.stdout == ""
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["steps"], len(report["step_seconds"])) == (3, 3)
    assert (report["coverage"]["fp8_calls"], report["coverage"]["calls"]) == (16, 18)
    # 8 sequences of 16; N and K of each.
    shapes = {"c_attn": (96, 32), "c_proj": (32, 32), "c_fc": (128, 32), "c_out": (32, 128)}
    expected = {f"h.{i}.{name}": sizes for i in range(2) for name, sizes in shapes.items()}
    expected["lm_head"] = (96, 32)
    found = re.findall(r"fp8patch: (\S+): M=128, N=(\d+), K=(\d+), (.*)", done.stderr)
    assert len(found) == len(expected)
    assert {path: (int(n), int(k)) for path, n, k, _ in found} == expected
    for path, _, _, ran in found:
        assert ("all GEMMs in bfloat16" in ran) == (path == "lm_head")
        assert ("wgrad FP8 E5M2 x E4M3" in ran) == (path != "lm_head")
    said = done.stderr
    assert "8 of 9 Linears in FP8" in said
    assert re.search(r"check: GPT: predicted [\d.]+x over BF16 on its GEMMs on \w+, [\d.]+x", said)
    assert re.search(r"check: measured steps: .* ms, .* ms, .* ms .* Stopped after step 3\.", said)
    assert "in FP8: 16 of 18 GEMM calls" in said


@pytest.mark.slow
def test_accelerates_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells its children "no" mixed precision where the user says nothing; they get BF16.

    Once: what comes out is what `--mixed_precision bf16` computes, to the last bit.
    """
    words = ("mlm_no_trainer", "--max_train_steps", 3, "--output_dir")
    script(*words, tmp_path / "bare", patch=monkeypatch)
    script(*words, tmp_path / "bf16", "--mixed_precision", "bf16", patch=monkeypatch)
    launch = ("accelerate", "launch", "--cpu", SCRIPTS / "mlm_no_trainer.py", *words[1:])
    done = train("--no-fp8", "--", *launch, "here", cwd=tmp_path)
    assert "BertForMaskedLM: BF16 autocast, no FP8" in done.stderr
    assert "summary: 3 optimizer steps" in done.stderr
    bare, bf16, here = (
        load_file(tmp_path / name / "model.safetensors") for name in ("bare", "bf16", "here")
    )
    assert all(torch.equal(here[key], bf16[key]) for key in bf16)
    assert any(not torch.equal(here[key], bare[key]) for key in bare)
