"""`fp8patch report --png`: what is drawn is what the report holds, and mistakes are one line."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from directories import run
from reported import POINTS, at, report, slot, written
from test_inspect import large_report
from test_report import LAYERS, ROLES, fp8_run

from fp8patch.inspect.source import read_source
from fp8patch.report_data import drawing
from fp8patch.report_picture import save_picture


def picture(tmp_path: Path, *runs: Path) -> np.ndarray:
    """Pixels of the picture, [height, width, 3] of 0 to 1; nothing else is left behind."""
    from matplotlib.image import imread

    file = tmp_path / "made.png"
    done = run("report", *runs, "-o", tmp_path / "made.html", "--png", file)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"Wrote {tmp_path / 'made.html'}\nWrote {file}\n"
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return np.asarray(imread(file))[..., :3]


def figure_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The figure, as it was when it was saved."""
    from matplotlib.figure import Figure

    saved = []
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, file, **options: saved.append(self))
        sources = [read_source(path)]
        save_picture(sources, drawing(sources), Path("nowhere.png"))
    return saved[0]


def maps_of(figure: Any) -> dict[str, Any]:
    """What each map was made of, by the text above it."""
    titles = [
        (text.get_position(), text.get_text())
        for text in figure.texts
        if text.get_text().endswith(("flushed to zero", "clipped", "not finite"))
    ]
    panels = [panel for panel in figure.axes if panel.get_images()]
    found = {}
    for panel in panels:
        box = panel.get_position()
        near = min(titles, key=lambda t: abs(t[0][0] - box.x0) + abs(t[0][1] - box.y1))
        found[near[1]] = panel
    assert len(found) == len(panels) == len(titles)
    return found


def healthy(path: Path) -> Path:
    return written(path, *(slot(layer, role) for layer in LAYERS for role in ROLES))


def test_maps_show_the_ratios_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fp8_run(tmp_path / "fp8.json")
    values = json.loads(path.read_text())
    slots = values["models"][0]["history"]["slots"]
    # One tensor that was not cast in one point.
    slots[0]["seen"][4] = 0
    path.write_text(json.dumps(values))
    maps = maps_of(figure_of(path, monkeypatch))
    assert len(maps) == 9
    said = {"flushed": "flushed to zero", "saturated": "clipped", "non_finite": "not finite"}
    names = {"input": "Inputs", "weight": "Weights", "grad_output": "Gradients"}
    for entry in slots:
        for metric, words in said.items():
            panel = maps[f"{names[entry['role']]} {words}"]
            drawn = panel.get_images()[0].get_array()[LAYERS.index(entry["path"])]
            seen = np.array(entry["seen"])
            assert (np.ma.getmaskarray(drawn) == (seen == 0)).all()
            expected = np.array(entry[metric]) / np.maximum(seen, 1)
            np.testing.assert_allclose(drawn.filled(0), expected, rtol=2e-4)
    labels = [label.get_text() for label in maps["Inputs clipped"].get_yticklabels()]
    assert labels == LAYERS


def test_a_bad_run_looks_bad(tmp_path: Path) -> None:
    """Dark cells where it clips, in a picture that is else the same; and the size is as said."""
    good = picture(tmp_path, healthy(tmp_path / "run.json"))
    values = report(*(slot(layer, role) for layer in LAYERS for role in ROLES))
    bad = next(s for s in values["models"][0]["history"]["slots"] if s["path"] == LAYERS[3])
    bad["saturated"] = at(8, 9, value=700)
    (tmp_path / "run.json").write_text(json.dumps(values))
    differs = np.abs(picture(tmp_path, tmp_path / "run.json") - good).max(-1) > 0.05
    assert good.shape[1] == 1800
    assert 900 < good.shape[0] < 1500
    rows, columns = np.nonzero(differs)
    # In the second row of maps, that of inputs; two of twenty points wide, one of six layers high.
    assert rows.min() > 0.6 * len(good)
    assert columns.max() < 0.5 * 1800
    assert 35 < np.ptp(columns) < 50
    assert 15 < np.ptp(rows) < 30
    # Where nothing was lost it is grey, and white is where nothing was cast.
    centre = (rows.min() + rows.max()) // 2, (columns.min() + columns.max()) // 2
    np.testing.assert_allclose(good[centre], np.array([0xEE, 0xEE, 0xEA]) / 255, atol=0.01)
    assert differs[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].mean() > 0.95


def test_the_words_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fp8_run(tmp_path / "fp8.json", device="NVIDIA H200", world_size=8)
    figure = figure_of(path, monkeypatch)
    words = " ".join(text.get_text() for text in figure.texts)
    for said in ("Net: fp8", "delayed", "NVIDIA H200, 8 ranks", "1.00 GiB", "500.0 ms", "2.0000",
                 "torch 2.13.0", "no measure of speed"):  # fmt: skip
        assert said in words
    losses, seconds = (panel.lines[0] for panel in figure.axes if panel.lines)
    assert losses.get_ydata()[:2].tolist() == [2.99, 2.98]
    assert set(seconds.get_ydata()) == {500.0}
    # No text of the table runs into the next.
    figure.canvas.draw()
    boxes = sorted((t.get_window_extent() for t in figure.texts), key=lambda b: (b.y0, b.x0))
    overlaps = [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :] if a.overlaps(b)]
    assert overlaps == []


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": 1, "models": [{"class": "Net", "plan": None}]},
        {"execution": "bf16", "models": [{"class": "Net", "plan": None}]},
        {"models": [], "losses": [], "step_seconds": [], "median_step_seconds": None},
        {"losses": [[1, None], [2, None]], "step_seconds": [0.0]},
        {"losses": [[1, 1e39], [2, -1e39]], "step_seconds": [1e39], "device": "$a\n$" * 40},
    ],
    ids=["format 1", "bf16", "nothing", "nan", "absurd"],
)
def test_a_picture_of_what_there_is(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert len(picture(tmp_path, written(tmp_path / "run.json", **changes))) < 900


def test_names_that_no_font_has(tmp_path: Path) -> None:
    one = {"steps": [7], "ranks": [1], "shared": {}}
    short = {key: [1] for key in ("amax", "scale", "saturated", "flushed", "non_finite", "seen")}
    slots = [slot(path, **short) for path in ("", "half\ud800", "$\\no$.\u5c42", "long." * 60)]
    models = [{"class": "Net", "plan": None, "history": {**one, "slots": slots}}]
    picture(tmp_path, written(tmp_path / os.fsdecode(b"r\xff.json"), models=models))


def test_the_worst_of_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [slot(f"layers.{i}") for i in range(60)]
    for i in (0, 45, 59):
        slots[i]["saturated"] = [i + 1] * POINTS
    figure = figure_of(written(tmp_path / "run.json", *slots), monkeypatch)
    panel = maps_of(figure)["Inputs clipped"]
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert len(labels) == 40
    assert labels[0] == "layers.0"
    assert labels[-3:] == ["layers.37", "layers.45", "layers.59"]
    row = panel.get_images()[0].get_array()[labels.index("layers.45")]
    np.testing.assert_allclose(row, 0.046, rtol=2e-4)
    assert any("40 of 60 layers" in text.get_text() for text in figure.texts)


def test_a_70b_model_takes_little(tmp_path: Path) -> None:
    large = large_report(tmp_path / "large.json")
    command = [sys.executable, "-m", "fp8patch", "report", large, "-o", tmp_path / "l.html"]
    limit = 1_500_000_000
    done = subprocess.run(
        [*command, "--png", tmp_path / "l.png"],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    size = (tmp_path / "l.png").read_bytes()[16:24]
    assert (int.from_bytes(size[:4]), int.from_bytes(size[4:]) < 3500) == (1800, True)


def test_without_matplotlib_there_is_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = healthy(tmp_path / "run.json")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("report", good, "-o", tmp_path / "a.html", "--png", tmp_path / "a.png")
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert "--png needs matplotlib: pip install 'fp8patch[plot]'" in line
    assert (tmp_path / "a.html").stat().st_size > 10_000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.html", "run.json"]


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    good = healthy(tmp_path / "run.json")
    photo = tmp_path / "photo.png"
    photo.write_bytes(b"\x89PNG\r\n\x1a\n of somebody")
    (tmp_path / "folder.png").mkdir()
    page = tmp_path / "a.html"
    for target, said in (
        (photo, "no picture of ours"),
        (tmp_path / "none" / "a.png", "cannot be written: No such file"),
        (tmp_path / "folder.png", "cannot be written: Is a directory"),
    ):
        done = run("report", good, "-o", page, "--png", target)
        assert done.exit_code == 1
        (line,) = done.stderr.splitlines()
        assert said in line
    assert photo.read_bytes().endswith(b"somebody")
    for options, said in (
        (["-o", tmp_path / "x.png"], "writes a picture beside it"),
        (["-o", page, "--png", tmp_path / "x.html"], "ends in .png"),
    ):
        done = run("report", good, *options)
        assert done.exit_code == 2
        assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "x.png").exists()
    # Its own it may replace.
    picture(tmp_path, good)
    picture(tmp_path, good)
