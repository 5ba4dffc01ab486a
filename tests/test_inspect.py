"""`fp8patch inspect`: ranking, views of reports and folders, comparison, size."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from directories import run, write
from reported import POINTS, at, points, report, slot, written
from safetensors.torch import load_file, save_file

import fp8patch
from fp8patch.checkpoint.sidecar import BankMeta, write_sidecar
from fp8patch.inspect import source as inspect_source
from fp8patch.inspect.slots import Layer, layers_of
from fp8patch.plan.types import Decision, Plan
from fp8patch.recipe import Recipe
from fp8patch.slots import SlotState


def test_the_worst_layer_comes_first(tmp_path: Path) -> None:
    healthy = [slot(f"layers.{i}", role) for i in range(30) for role in ("input", "weight")]
    bad = slot("layers.7", "grad_output", flushed=at(10, 11, value=1000))
    done = run("inspect", written(tmp_path / "run[1].json", *healthy, bad))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith(str(tmp_path / "run[1].json"))
    first = next(line for line in lines if line.startswith("layers."))
    assert first.split()[:5] == ["layers.7", "gradient", "5.56", "0", "11%"]
    assert "… and 10 layers of less risk" in done.stdout
    assert "layers.7: 11% of the gradients flushed to zero (at worst 100%, step 55)." in lines
    assert '    "layers.7":' in lines
    assert "      fprop: bf16" in lines
    every = run("inspect", tmp_path / "run[1].json", "--all").stdout
    assert sum(line.startswith("layers.") for line in every.splitlines()) == 31
    calm = run("inspect", written(tmp_path / "calm.json", *healthy))
    assert "No layer loses more to FP8" in calm.stdout


def test_one_layer_in_full(tmp_path: Path) -> None:
    slots = [slot(f"layers.{i}.{n}", r) for i in (0, 10) for n in "ab" for r in ("input", "weight")]
    path = written(tmp_path / "run.json", *slots)
    done = run("inspect", path, "--layer", "layers.0")
    shown = [line for line in done.stdout.splitlines() if line.startswith("layers.")]
    assert shown == ["layers.0.a", "layers.0.b"]
    assert done.stdout.count("delayed  E4M3") == 4
    missed = run("inspect", path, "--layer", "layers.3")
    assert missed.exit_code == 1
    assert "--layer layers.3: matches none of the 4 layers" in missed.stderr


def test_json_has_every_figure(tmp_path: Path) -> None:
    bad = slot("a", saturated=at(10, value=600), amax=[None] + [2.0] * (POINTS - 1))
    path = written(tmp_path / "run.json", slot("b"), bad)
    (found,) = json.loads(run("inspect", path, "--json").stdout)["sources"]
    assert [layer["path"] for layer in found["layers"]] == ["a", "b"]
    (first,) = found["layers"][0]["slots"]
    assert first["saturated"]["worst"] == 0.6
    assert first["saturated"]["worst_step"] == 55
    assert first["saturated"]["whole"] == pytest.approx(600 / 18000)
    assert first["fill_log2"] == 0
    assert first["amax"] == bad["amax"]
    assert found["advice"][0]["remedy"] == "rowwise"
    assert found["overrides"] == {"a": {"scaling": "rowwise"}}


def test_two_runs_beside_each_other(tmp_path: Path) -> None:
    first = written(tmp_path / "a.json", slot("x"), slot("y", flushed=at(10, value=900)), slot("z"))
    second = written(tmp_path / "b.json", slot("x"), slot("y"), steps=50, recipe="/r/mine.yaml")
    done = run("inspect", first, second)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines]
    assert ["recipe", "delayed", "mine"] in rows
    assert ["steps", "100", "50"] in rows
    layers = [row for row in rows if row and row[0] in "xyz"]
    # What one run alone has, then what differs most.
    assert [row[0] for row in layers] == ["z", "y", "x"]
    assert layers[1][:8] == ["y", "input", "2.50", "0.00", "0", "0", "5%", "0"]
    both = json.loads(run("inspect", first, second, "--json").stdout)["sources"]
    assert [entry["recipe"] for entry in both] == ["delayed", "mine"]
    assert run("inspect", first, second, first).exit_code == 2


def test_two_models_of_one_class_are_told_apart(tmp_path: Path) -> None:
    values = report(slot("up"))
    values["models"] = values["models"] * 2
    path = tmp_path / "run.json"
    path.write_text(json.dumps(values))
    found = inspect_source.read_source(path)
    assert [s.path for s in found.slots] == ["Net:up", "Net#2:up"]


def test_a_run_without_fp8_says_so(tmp_path: Path) -> None:
    model = {"class": "Net", "plan": None}
    path = written(tmp_path / "run.json", models=[model], execution="bf16")
    assert "Nothing ran in FP8" in run("inspect", path).stdout
    path = written(tmp_path / "old.json", format_version=1)
    values = json.loads(path.read_text())
    del values["models"][0]["history"]
    path.write_text(json.dumps(values))
    assert "before slots had a history" in run("inspect", path).stdout


# -- folders --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patched")
    write(folder / "plain")
    done = run("convert", folder / "plain", "-o", folder / "patched")
    assert done.exit_code == 0, done.output
    return folder / "patched"


def test_a_patched_folder(patched: Path) -> None:
    done = run("inspect", patched, "--sqnr")
    assert done.exit_code == 0, done.output
    layers = [line.split() for line in done.stdout.splitlines() if line.startswith("model.")]
    assert len(layers) == 14
    assert all(row[1] == "weight" for row in layers)
    found = json.loads(run("inspect", patched, "--sqnr", "--json").stdout)["sources"][0]
    weights = load_file(patched / "model.safetensors")
    for layer in found["layers"]:
        (only,) = layer["slots"]
        weight = weights[f"{layer['path']}.weight"].float()
        assert only["amax"] == [weight.abs().max().item()]
        # By another route: torch's own cast, which the scale keeps in range.
        scale = 448 / weight.abs().max()
        error = (weight * scale).to(torch.float8_e4m3fn).float() / scale - weight
        wanted = 10 * math.log10(weight.double().square().sum() / error.double().square().sum())
        assert only["sqnr_db"] == pytest.approx(wanted, abs=0.01)


def test_a_trained_model_that_was_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
    fp8patch.convert_model(model, "delayed", include=["*"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        with fp8patch.autocast(backend="emulate"):
            y = model(torch.randn(8, 16) * 2.0**step)
        y.sum().backward()
        optimizer.step()
    fp8patch.save(model, tmp_path)
    found = inspect_source.read_source(tmp_path)
    of_input = next(s for s in found.slots if (s.path, s.role) == ("0", "input"))
    metrics = fp8patch.metrics(model)
    assert of_input.amax[-1] == metrics["fp8/0/input/amax"]
    assert len(of_input.amax) == 4
    assert of_input.ratios["saturated"].whole == metrics["fp8/0/input/saturated"] > 0
    wanted = math.log2(metrics["fp8/0/input/amax"] * metrics["fp8/0/input/scale"] / 448)
    assert of_input.fill == pytest.approx(wanted)
    assert "0.input" not in run("inspect", tmp_path).stdout
    assert run("inspect", tmp_path, "--layer", "0").stdout.count("delayed  E") == 3


def test_a_sidecar_of_another_model(patched: Path, tmp_path: Path) -> None:
    for case, change in {
        "larger": lambda t: t.update({k: torch.zeros(16, 16) for k in t if "q_proj" in k}),
        "other": lambda t: t.update({f"x{i}": t.pop(k) for i, k in enumerate(list(t))}),
    }.items():
        folder = shutil.copytree(patched, tmp_path / case)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        done = run("inspect", folder)
        assert done.exit_code == 1
        assert "belongs to another model" in done.stderr
        assert len(done.stderr.splitlines()) == 1


# -- size -----------------------------------------------------------------------------------------

PEAK = """
import sys
from fp8patch import cli
try:
    cli.app(sys.argv[1:], prog_name="fp8patch")
except SystemExit as ended:
    assert not ended.code, ended.code
status = open("/proc/self/status").read().splitlines()
print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024)
"""


def large_report(path: Path) -> Path:
    """As of a 70B Llama: 80 blocks of 7 layers of 3 slots, with as many points as there can be."""
    names = [f"self_attn.{n}_proj" for n in "qkvo"]
    names += [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    rng = np.random.default_rng(0)
    amax = [float(f"{v:.4g}") for v in rng.lognormal(size=128)]
    columns: dict[str, Any] = {"amax": amax, "scale": amax, "seen": [10**9] * 128}
    columns |= {"saturated": [0] * 128, "non_finite": [0] * 128}
    columns["flushed"] = rng.integers(0, 10**6, 128).tolist()
    slots = [
        slot(f"model.layers.{i}.{name}", role, **columns)
        for i in range(80)
        for name in names
        for role in ("input", "weight", "grad_output")
    ]
    values = report(*slots)
    values["models"][0]["history"].update(steps=list(range(1, 129)), ranks=[8] * 128)
    path.write_text(json.dumps(values))
    return path


def large_folder(path: Path) -> Path:
    """The sidecar of such a model, with a whole history of amax."""
    names = [f"self_attn.{n}_proj" for n in "qkvo"]
    names += [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    shape = {"out_features": 8192, "in_features": 8192, "params": 2**26}
    decisions = tuple(
        Decision(
            path=f"model.layers.{i}.{name}",
            kind="linear",
            action="convert",
            code="ok",
            reason="runs in FP8",
            class_name="Linear",
            flops_share=1 / 560,
            param_share=1 / 560,
            gain=None,
            **shape,
        )
        for i in range(80)
        for name in names
    )
    plan = Plan(recipe=Recipe(), decisions=decisions, tokens=4096, gpu=None, model="Llama")
    seen = SlotState(
        torch.rand(1024) + 0.5, torch.tensor(300.0), torch.zeros(()), torch.tensor([3, 5, 0, 99])
    )
    state = {(d.path, role): seen for d in decisions for role in range(3)}
    path.mkdir()
    write_sidecar(path, plan.to_dict(), BankMeta(observed=True), state, {})
    return path


@pytest.mark.slow
def test_a_70b_model_takes_little_memory(tmp_path: Path) -> None:
    file, folder = large_report(tmp_path / "run.json"), large_folder(tmp_path / "folder")
    for words in (["inspect", file], ["inspect", folder], ["report", file, "-o", "page.html"]):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        said = "Wrote page.html" if words[0] == "report" else "and 540 layers of less risk"
        assert said in done.stdout
        assert int(done.stdout.splitlines()[-1]) < 1.5e9
    assert file.stat().st_size < 20e6


def test_layers_without_slots_do_not_exist() -> None:
    assert layers_of([]) == []
    assert Layer("a", (points(),)).worst.path == "a"


@pytest.mark.parametrize(
    ("state", "said"),
    [("running", "No point was taken yet"), ("failed", "ended before a point was taken")],
)
def test_a_run_without_a_point_says_whether_it_goes_on(state: str, said: str) -> None:
    from types import SimpleNamespace

    from fp8patch.cli.inspect_view import _nothing

    values = {"format_version": 2, "models": [{"plan": {}}, {"plan": {"a": 1}}], "state": state}
    source: Any = SimpleNamespace(kind="report", values=values)
    assert said in _nothing(source)
