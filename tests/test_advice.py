"""Runs made to fail on purpose: the layer is named, and the advised recipe mends the run."""

import json
import re
from pathlib import Path

import pytest
from directories import run
from failing_runs import AT, train

from fp8patch.recipe import Recipe

# What the recipe is, which layer is at fault, and what helps it.
CASES = {
    # E4M3 reaches 2^18; gradients that shrink by 2^20 at once are all flushed.
    "gradients": ("fp8_format: e4m3", "down", "rowwise"),
    # What is not in the outlier channel is below the smallest number of any scale.
    "outlier": ("amax_history_len: 1024", "up", "bf16"),
    # A scale that looks back one step is late at each spike, and again after it.
    "spike": ("amax_history_len: 1", "up", "rowwise"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_failing_run_is_diagnosed_and_mended(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    field, layer, remedy = CASES[case]
    layer = f"blocks.{AT}.{layer}"
    recipe, mended = tmp_path / "recipe.yaml", tmp_path / "mended.yaml"
    recipe.write_text(f"base: delayed\n{field}\n")
    bf16 = train(case, None)
    failing = train(case, recipe, tmp_path / "failing.json")
    said = capsys.readouterr().err
    (warned, *_) = [line for line in said.splitlines() if "warning: blocks" in line]
    assert warned.startswith(f"fp8patch: warning: {layer}: ")
    assert "a recipe that helps has: overrides: {" in said

    done = run("inspect", tmp_path / "failing.json")
    rows = [line for line in done.stdout.splitlines() if line.startswith("blocks.")]
    assert rows[0].split()[0] == layer
    (found,) = json.loads(run("inspect", tmp_path / "failing.json", "--json").stdout)["sources"]
    assert found["layers"][0]["path"] == layer
    assert found["advice"][0]["remedy"] == remedy

    # The printed lines, as a user copies them: from "overrides:" to the next empty line.
    lines = [line.removeprefix("  ") for line in done.stdout.splitlines()]
    first = lines.index("overrides:")
    last = lines.index("", first) if "" in lines[first:] else len(lines)
    mended.write_text("\n".join([f"base: delayed\n{field}", *lines[first:last]]) + "\n")
    if case == "outlier":
        shown = (Path(__file__).resolve().parent.parent / "README.md").read_text("utf-8")
        assert "\n".join(f"  {line}" for line in lines[first:last]) in shown
    # What `tune` writes is the same recipe, with the reason.
    tuned = tmp_path / "tuned.yaml"
    done = run("tune", tmp_path / "failing.json", "-o", tuned)
    assert done.exit_code == 0, done.output
    assert Recipe.load(tuned) == Recipe.load(mended).replace(name="tuned")
    assert re.search(rf"^  # {re.escape(layer)}: .*%.*step \d+", tuned.read_text(), re.MULTILINE)
    assert run("recipes", "check", tuned).exit_code == 0
    better = train(case, tuned, tmp_path / "mended.json")

    # How far the block's weights end from where BF16 takes them.
    def off(outcome: dict) -> float:  # type: ignore[type-arg]
        return (outcome["weights"] - bf16["weights"]).norm().item()  # type: ignore[no-any-return]

    assert off(better) < off(failing) / 3, (off(better), off(failing))
    assert "warning" not in capsys.readouterr().err
    (left,) = json.loads(run("inspect", tmp_path / "mended.json", "--json").stdout)["sources"]
    assert all(entry["severity"] < 1 for entry in left["layers"])
    before = tuned.read_bytes()
    done = run("tune", tmp_path / "mended.json", "-o", tuned, "--force")
    assert (done.exit_code, tuned.read_bytes()) == (0, before)
    assert "nothing to change" in done.stdout


def test_a_healthy_run_is_advised_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("", "delayed", tmp_path / "run.json")
    assert "warning" not in capsys.readouterr().err
    assert "No layer loses more" in run("inspect", tmp_path / "run.json").stdout
