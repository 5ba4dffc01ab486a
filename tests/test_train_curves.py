"""`scripts/train_curves.py` and its neighbours, and the script that they run."""

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from injected import armed

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="no scripts: not a checkout")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports what lies in `scripts/`, as a script there would."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.fixture
def train_curves(scripts: Any) -> Any:
    return scripts("train_curves")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny text's tokens, from a run of the script that does nothing else."""
    path = tmp_path_factory.mktemp("text") / "tokens.pt"
    with pytest.raises(SystemExit):
        run_script("--prepare", tokens=path)
    return path


def run_script(*words: str, tokens: Path) -> dict[str, Any]:
    """Its globals after a run of it in this process."""
    argv = ["curves_script", "--tiny", "--steps", "3", "--tokens", str(tokens), *words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        return runpy.run_path(str(SCRIPTS / "curves_script.py"), run_name="__main__")


def test_the_tokens_are_the_same_every_time(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run_script("--prepare", tokens=tmp_path / "again.pt")
    first = torch.load(tokens)
    assert torch.equal(first, torch.load(tmp_path / "again.pt"))
    assert len(first) > 100_000
    assert first.max() < 512


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_injected_bf16_is_bf16_by_hand(family: str, tokens: Path) -> None:
    by_hand = run_script("--family", family, "--autocast-by-hand", tokens=tokens)["losses"]
    with armed(backend="bf16"):
        injected = run_script("--family", family, tokens=tokens)["losses"]
    assert injected == by_hand
    bare = run_script("--family", family, tokens=tokens)["losses"]
    assert bare != by_hand
    assert bare == pytest.approx(by_hand, abs=0.05)
    other = run_script("--family", family, "--seed", "1", tokens=tokens)["losses"]
    assert other != bare


def curve(mode: str, seed: int, final: float) -> dict[str, Any]:
    losses = [9.0] * 30 + [final] * 50
    return {"family": "bert", "mode": mode, "seed": seed, "losses": losses}


@pytest.mark.parametrize("mode", ["fp8", "fp8-graphs"])
@pytest.mark.parametrize(("fp8", "ok"), [(5.19, True), (4.81, True), (5.21, False), (4.79, False)])
def test_the_verdict(train_curves: Any, mode: str, fp8: float, ok: bool) -> None:
    runs = [curve("bf16", seed, final) for seed, final in enumerate((4.9, 5.0, 5.1))]
    assert train_curves.verdict("bert", mode, runs) is None
    runs += [curve(mode, seed, fp8) for seed in range(3)]
    runs += [curve("fp8-compiled", seed, 7.0) for seed in range(3)]
    row = train_curves.verdict("bert", mode, runs)
    assert row["bf16_std"] == pytest.approx(0.1)
    assert row["difference"] == pytest.approx(fp8 - 5.0)
    assert row["ok"] is ok
    assert train_curves.verdict("bert", "fp8-compiled", runs)["ok"] is False
    assert train_curves.verdict("llama", mode, runs) is None


def test_a_run_that_diverged_fails(train_curves: Any) -> None:
    runs = [curve("bf16", seed, 5.0 + seed) for seed in range(2)] + [curve("fp8", 0, float("nan"))]
    assert train_curves.verdict("bert", "fp8", runs)["ok"] is False


@pytest.mark.slow
def test_curves(train_curves: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tiny", "--families", "bert", "--seeds", "2", "--jobs", "2", "--steps", "3"]
    code = train_curves.main([*words, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "curves.json").read_text())
    assert [len(run["losses"]) for run in found["runs"]] == [3] * 4
    assert {run["report"]["execution"] for run in found["runs"]} == {"bf16", "emulate"}
    assert code == (0 if found["verdicts"][0]["ok"] else 1)
    assert "fp8 - bf16, same seed" in out
    train_curves.main([*words, "--out", str(tmp_path)])
    assert "0 of 4 runs to do" in capsys.readouterr().out


@pytest.mark.slow
def test_overhead(scripts: Any, tmp_path: Path) -> None:
    words = ["--tiny", "--families", "llama", "--rounds", "2", "--steps", "1", "--warm-up", "1"]
    scripts("check_overhead").main([*words, "--out", str(tmp_path)])  # so few prove nothing
    row = json.loads((tmp_path / "overhead.json").read_text())["rows"][0]
    assert row["losses_apart"] == 0
    assert [len(row["step_seconds"][name]) for name in ("by hand", "injected")] == [2, 2]
    assert "fp8patch's own time" in row["summary"]


def rank_of(rank: int, mode: str, **changes: Any) -> dict[str, Any]:
    found = {
        "reductions": {"max": 8 if mode == "fp8" else 0, "sum": 0},
        "losses": [2.0 + rank] * 9,
        "evaluations": [] if rank else [2.0],
        "step_seconds": [0.1] * 4,
        "tokens_a_step": 64,
    }
    return found | changes


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        (None, {}),
        ("parameters equal over ranks", {"weights": 1.5}),
        ("scales equal over ranks", {"scale": 3.0}),
        ("one reduction an optimizer step", {"reductions": {"max": 9, "sum": 0}}),
        ("one reduction an optimizer step", {"reductions": {"max": 8, "sum": 1}}),
    ],
)
def test_ranks_that_differ_are_found(scripts: Any, what: str | None, fault: dict[str, Any]) -> None:
    module = scripts("check_ddp")

    def run(mode: str, ranks: int, **of_last: Any) -> Any:
        last = ranks - 1
        found = [rank_of(at, mode) for at in range(ranks)]
        found[last] |= {key: of_last[key] for key in ("reductions",) if key in of_last}
        weights = [{"w": torch.tensor(1.0)} for _ in range(ranks)]
        weights[last]["w"] = torch.tensor(of_last.get("weights", 1.0))
        # What a rank has seen since the last reduction is its own.
        state = [{"a.scale": torch.tensor(2.0), "a.amax": torch.tensor(at)} for at in range(ranks)]
        state[last]["a.scale"] = torch.tensor(of_last.get("scale", 2.0))
        return module.Run(mode, ranks, found, weights, state)

    alone = {"reductions": {"max": 0, "sum": 0}}
    runs = {("fp8", 2): run("fp8", 2, **fault), ("fp8", 1): run("fp8", 1, **alone)}
    runs |= {("bf16", ranks): run("bf16", ranks) for ranks in (1, 2)}
    failed = [row[0] for row in module.check(runs, 4) if not row[1]]
    assert failed == ([] if what is None else [what])


def test_norm_output(scripts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert scripts("check_norm_output").main(["--tiny"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    logits = {row[0].strip(): float(row[1]) for row in rows}
    assert logits["BF16"] > 40
    assert 25 < logits["FP8, norms BF16"] < 35
    assert abs(logits["FP8, norms BF16"] - logits["FP8, norms FP32"]) < 2
