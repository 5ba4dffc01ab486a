"""`fp8patch inspect`: ranking, views of reports and folders, comparison, and broken input."""

import io
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
from rich.console import Console
from safetensors.torch import load_file, save_file

import fp8patch
from fp8patch.checkpoint.sidecar import BankMeta, write_sidecar
from fp8patch.cli import inspect_view
from fp8patch.cli.columns import fitting, left_out
from fp8patch.cli.inspect_view import sparkline
from fp8patch.inspect import source as inspect_source
from fp8patch.inspect.advice import advise, overrides, recipe_line, recipe_lines
from fp8patch.inspect.run import slots_of
from fp8patch.inspect.slots import Layer, SlotPoints, layers_of
from fp8patch.plan.types import Decision, Plan
from fp8patch.recipe import Recipe
from fp8patch.recipe_yaml import read_yaml
from fp8patch.slots import SlotState

POINTS = 20


def slot(path: str = "a", role: str = "input", **changes: Any) -> dict[str, Any]:
    """A healthy slot over 20 points, as a report has it."""
    wide = role == "grad_output"
    limit = 57344.0 if wide else 448.0
    return {
        "path": path,
        "role": role,
        "scaling": "delayed",
        "format": "e5m2" if wide else "e4m3",
        "limit": limit,
        "amax": [2.0] * POINTS,
        "scale": [limit / 2] * POINTS,
        "saturated": [0] * POINTS,
        "flushed": [0] * POINTS,
        "non_finite": [0] * POINTS,
        "seen": [1000] * POINTS,
        **changes,
    }


def report(*slots: dict[str, Any], **changes: Any) -> dict[str, Any]:
    steps = list(range(5, 5 * POINTS + 5, 5))
    history = {"steps": steps, "ranks": [1] * POINTS, "shared": {}, "slots": list(slots)}
    model = {"class": "Net", "plan": {"converted": 3}, "skipped": {}, "history": history}
    return {
        "format_version": 2,
        "fp8patch_version": "0.1.0",
        "state": "finished",
        "backend": "emulate",
        "execution": "emulate",
        "device": "CPU",
        "world_size": 1,
        "recipe": "delayed",
        "models": [model],
        "steps": 100,
        "step_seconds": [0.5] * 100,
        "median_step_seconds": 0.5,
        "losses": [[step, 3 - step / 100] for step in range(1, 101)],
        "peak_memory_bytes": 2**30,
        "peak_memory_kind": "resident in memory",
        "coverage": {},
        "ratios": {},
        **changes,
    }


def written(path: Path, *slots: dict[str, Any], **changes: Any) -> Path:
    path.write_text(json.dumps(report(*slots, **changes)))
    return path


def at(*steps: int, value: int, zero: int = 0) -> list[int]:
    return [value if i in steps else zero for i in range(POINTS)]


def points(**changes: Any) -> SlotPoints:
    (found,) = slots_of(report(slot(**changes))["models"][0])
    return found


# -- what the points say --------------------------------------------------------------------------


def test_ratios_are_of_the_run_and_of_its_end() -> None:
    early = points(saturated=at(0, 1, value=500), flushed=at(16, 19, value=40))
    clipped, flushed = early.ratios["saturated"], early.ratios["flushed"]
    # The first tenth is what scales take to settle; it is the worst point all the same.
    assert (clipped.whole, clipped.recent, clipped.worst, clipped.step) == (0, 0, 0.5, 5)
    assert flushed.whole == 80 / 18_000
    assert flushed.recent == 80 / 5_000
    assert flushed.value == flushed.recent
    assert (flushed.worst, flushed.step) == (0.04, 85)
    assert early.severity == pytest.approx(flushed.recent / 0.02)


def test_how_far_a_scale_was_off() -> None:
    assert points().fill == 0
    late = points(amax=[2.0] * 10 + [2.0**-11] * 10)
    assert late.fill == -12
    assert points(amax=[2.0] * 10 + [16.0] + [2.0] * 9).fill == 3
    # Of a scale that was made from the tensor itself there is nothing to be off.
    assert points(scaling="current", amax=[2.0] * 10 + [9.0] * 10).fill is None
    assert points(scale=[0.0] * POINTS).fill is None
    # It ranks, and is no trouble by itself.
    assert 0.5 < late.severity < 1
    assert not advise(layers_of([late]))


def test_what_is_not_finite_counts_while_it_lasts() -> None:
    over, lasting = (points(non_finite=at(p, value=1), amax=[None] * POINTS) for p in (8, 19))
    assert over.severity == 0.5
    assert lasting.severity > 1
    (said,) = advise(layers_of([lasting]))
    assert said.remedy == "none"
    assert "0.02% of the inputs not finite" in said.why


def test_a_moving_scale_is_told_from_a_wide_tensor() -> None:
    def remedy(**changes: Any) -> str:
        return advise(layers_of([points(**changes)]))[0].remedy

    half = [500] * POINTS
    assert remedy(saturated=half) == "rowwise"
    assert remedy(flushed=half, amax=[2.0**-15] * POINTS) == "rowwise"
    assert remedy(flushed=half) == "bf16"
    assert remedy(flushed=half, scaling="current") == "bf16"
    assert remedy(flushed=half, scaling="rowwise", amax=[2.0**-15] * POINTS) == "bf16"


def test_recipe_lines_name_all_alike_by_one_pattern() -> None:
    half = [500] * POINTS
    layers = [
        *(slot(f"layers.{i}.down", saturated=half) for i in range(12)),
        *(slot(f"layers.{i}.up", flushed=half if i == 3 else at(value=0)) for i in range(12)),
        slot("head", "grad_output", flushed=half),
        slot("head", "input", saturated=half),
    ]
    slots = slots_of(report(*layers)["models"][0])
    advice = advise(layers_of(slots))
    chosen = overrides(advice, [s.path for s in slots])
    bf16 = dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16")
    wanted = {"layers.*.down": {"scaling": "rowwise"}, "layers.3.up": bf16, "head": bf16}
    for text in ("\n".join(recipe_lines(chosen)), recipe_line(chosen)):
        path = Path("recipe.yaml")
        assert yaml(text, path) == {"overrides": wanted}
    assert recipe_lines({}) == []


def yaml(text: str, path: Path) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path
        file.write_text(text)
        return read_yaml(file)


def test_what_shares_an_input_is_advised_with_it() -> None:
    values = report(slot("q", saturated=[500] * POINTS), slot("k", "weight"), slot("v", "weight"))
    values["models"][0]["history"]["shared"] = {"k": "q", "v": "q"}
    slots = slots_of(values["models"][0])
    advice = advise(layers_of(slots))
    assert set(overrides(advice, [s.path for s in slots])) == {"q", "k", "v"}


def test_sparklines() -> None:
    assert sparkline([1.0, 2.0, 4.0, 128.0]) == "▁▂▃█"
    assert sparkline([1.0, 1.01, 1.0]) == "▁▁▁"
    assert sparkline([1.0, None, 256.0]) == "▁!█"
    assert sparkline([None] * 3) == "!!!"
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([]) == ""
    # A peak is not averaged away.
    assert sparkline([1.0] * 500 + [99.0] + [1.0] * 499, width=10).count("█") == 1
    assert sparkline([1.0, 256.0], plain=True) == "_#"


# -- the command ----------------------------------------------------------------------------------


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


# -- broken input ---------------------------------------------------------------------------------


def broken(values: dict[str, Any]) -> dict[str, str]:
    """{what is wrong: the file's text}."""
    good = json.dumps(values)

    def changed(change: Any) -> str:
        copy = json.loads(good)
        change(copy)
        return json.dumps(copy)

    def of_slot(**fields: Any) -> str:
        return changed(lambda v: v["models"][0]["history"]["slots"][0].update(fields))

    return {
        "no whole JSON file": good[: len(good) // 2],
        "no whole JSON file ": "",
        "it holds a list": "[1, 2]",
        "'format_version' is missing": "{}",
        "give the folder": changed(lambda v: v.update(bank={}, plan={})),
        "Upgrade fp8patch": changed(lambda v: v.update(format_version=9)),
        "'losses' is missing": changed(lambda v: v.pop("losses")),
        "losses holds 'x'": changed(lambda v: v["losses"].append([3, "x"])),
        "steps is True": changed(lambda v: v.update(steps=True)),
        "amax of 'a' has not one value a step": of_slot(amax=[1.0]),
        "saturated of 'a' holds None": of_slot(saturated=[None] * POINTS),
        "seen of 'a' is negative": of_slot(seen=[-1] * POINTS),
        "role of 'a' is 'output'": of_slot(role="output"),
        "scaling of 'a' is 'mx'": of_slot(scaling="mx"),
        "limit is 0": of_slot(limit=0),
        "amax of 'a' holds inf": of_slot(amax=[math.inf] * POINTS),
        "scale of 'a' holds nan": of_slot(scale=[math.nan] * POINTS),
        "seen of 'a' holds 0.5, no count": of_slot(seen=[0.5] * POINTS),
        "flushed of 'a' holds 1000": of_slot(flushed=[10**400] * POINTS),
        "fp8_flops_share holds 'x'": changed(lambda v: v.update(coverage={"fp8_flops_share": "x"})),
        "peak_memory_bytes holds 1000": changed(lambda v: v.update(peak_memory_bytes=10**400)),
        "'execution' is missing": changed(lambda v: v.pop("execution")),
        "settings: options is None": changed(lambda v: v.update(settings={"options": None})),
        "settings: skip is 5": changed(lambda v: v.update(settings={"options": {"skip": 5}})),
        "no JSON": "\x00" * 5000 + good,
    }


@pytest.mark.parametrize("wrong", broken(report(slot())))
def test_a_broken_report_is_one_line(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(broken(report(slot()))[wrong])
    done = run("inspect", path)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert wrong.strip() in line
    assert str(path) in line


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    names = ["a[0]", "[bold]", "x[/]"]
    slots = [slot(name, flushed=[600] * POINTS) for name in names]
    values = report(*slots, recipe="/mine[b].yaml", device="GPU [/]")
    values["models"][0]["history"]["shared"] = {"y[/z]": "x[/]"}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(values))
    for args in ([], ["--layer", "*"], [path]):
        done = run("inspect", path, *args)
        assert done.exit_code == 0, done.output
        assert all(name in done.stdout for name in [*names, "mine[b]"])
    assert "GPU [/]" in run("inspect", path).stdout
    assert "also that of y[/z]" in run("inspect", path, "--layer", "*").stdout


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_width_shows_the_layers_and_says_what_it_leaves_out(
    tmp_path: Path, width: int
) -> None:
    name = "model.layers.0.self_attn.q_proj"
    source = inspect_source.read_source(written(tmp_path / "run.json", slot(name), slot("lm_head")))
    layers = layers_of(source.slots)
    figures = {40: ["risk"], 80: ["risk", "clipped", "flushed", "of range", "amax"]}.get(width)
    for view in (
        lambda screen: inspect_view.show(source, layers, screen, every=False),
        lambda screen: inspect_view.show_slots(source, layers, screen),
        lambda screen: inspect_view.show_both([source] * 2, [layers] * 2, screen, every=False),
    ):
        screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        view(screen)
        text = screen.file.getvalue()
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        joined = text.replace(" ", "").replace("\n", "")
        assert "lm_head" in joined
        assert name[:12] in joined
        assert ("Left out for want of room" in " ".join(text.split())) is (width < 200)
    screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    inspect_view.show(source, layers, screen, every=False)
    head = next(x for x in screen.file.getvalue().splitlines() if x.startswith("layer"))
    if figures is not None:
        assert head.split()[:2] == ["layer", "worst"]
        assert " ".join(head.split()[2:]) == " ".join(figures)


def test_columns_go_in_order_and_empty_ones_first() -> None:
    names, rows = ["layer", "a", "b", "c"], [["x" * 30, "aaaa", "", "[bold]cccc[/]"]]
    drop = ["a", "b"]
    # 30 of the name, of which 24 have to be shown, and 4 + 1 + 4 in three gaps of 2.
    for width, shown in ((39, [0, 1, 2, 3]), (38, [0, 1, 3]), (36, [0, 1, 3]), (35, [0, 3])):
        assert fitting(names, rows, drop, width) == shown
    assert fitting(names, rows, drop, 10) == [0, 3]
    assert left_out(names, rows, [0, 1, 3]) == ""
    assert "room: a. " in left_out(names, rows, [0, 3])


def test_a_loss_that_became_nan_is_the_last(tmp_path: Path) -> None:
    good = written(tmp_path / "good.json", slot(), losses=[[1, 3.0], [2, 2.5]])
    lost = written(tmp_path / "lost.json", slot(), losses=[[1, 3.0], [2, None]])
    (row,) = [r for r in run("inspect", good, lost).stdout.splitlines() if "last loss" in r]
    assert row.split() == ["last", "loss", "2.5000", "not", "finite"]


def test_what_is_not_there_is_one_line(tmp_path: Path, patched: Path) -> None:
    report_file = written(tmp_path / "run.json", slot())
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    bare = shutil.copytree(patched, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    for args, said in (
        (["none.json"], "no such file or folder"),
        ([tmp_path / "empty"], "holds no fp8patch.json"),
        ([tmp_path / "binary"], "no whole JSON file"),
        ([report_file, "--sqnr"], "holds no weights"),
        ([bare, "--sqnr"], "holds no weights"),
    ):
        done = run("inspect", *args)
        assert done.exit_code == 1, args
        (line,) = done.stderr.splitlines()
        assert said in line
    assert run("inspect", bare).exit_code == 0


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
