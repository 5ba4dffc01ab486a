"""`fp8patch inspect`: what cannot be read is one line, and any width shows the layers."""

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from directories import run, write
from reported import POINTS, report, slot, written
from rich.console import Console

from fp8patch.cli import inspect_view
from fp8patch.cli.columns import fitting, left_out
from fp8patch.inspect import source as inspect_source
from fp8patch.inspect.slots import layers_of


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patched")
    write(folder / "plain")
    done = run("convert", folder / "plain", "-o", folder / "patched")
    assert done.exit_code == 0, done.output
    return folder / "patched"


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
