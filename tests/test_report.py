"""`fp8patch report`: the page's parts, and what a real browser makes of it."""

import base64
import html
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from directories import run
from test_inspect import POINTS, at, large_report, report, slot, written

from fp8patch.inspect.source import read_source
from fp8patch.report_data import drawing

LAYERS = [f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")]
ROLES = ("input", "weight", "grad_output")


def fp8_run(path: Path, **changes: Any) -> Path:
    slots = [slot(layer, role) for layer in LAYERS for role in ROLES]
    bad = next(s for s in slots if (s["path"], s["role"]) == ("blocks.1.up", "grad_output"))
    bad.update(flushed=at(5, 6, value=900), saturated=at(2, value=1), non_finite=at(9, value=3))
    values = report(*slots, **changes)
    values["models"][0]["skipped"] = {
        "head": ["lm_head"],
        "misaligned": [f"blocks.{i}.odd</script>" for i in range(4)],
    }
    values["settings"] = {
        "options": {"only": ["blocks.*"], "skip": [], "include": [], "roots": [], "tokens": 4096},
        "recipe": {"scaling": "delayed", "skip": []},
        "versions": {"torch": "2.13.0"},
    }
    path.write_text(json.dumps(values))
    return path


def page(tmp_path: Path, *runs: Path) -> str:
    done = run("report", *runs, "-o", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"Wrote {tmp_path / 'page.html'}\n"
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []
    return (tmp_path / "page.html").read_text()


# -- what is in it --------------------------------------------------------------------------------


def test_a_page_holds_all_there_is_to_know(tmp_path: Path) -> None:
    bf16 = written(tmp_path / "bf16.json", models=[{"class": "Net", "plan": None}],
                   execution="bf16", backend="bf16", median_step_seconds=0.4)  # fmt: skip
    text = page(tmp_path, fp8_run(tmp_path / "fp8.json", recipe="/r/mine.yaml"), bf16)
    plain = html.unescape(re.sub(r"<[^>]+>", " ", text))
    for said in ("500.0 ms", "400.0 ms", "1.00 GiB", "2.0000", "100 (finished)"):
        assert said in plain
    assert "blocks.*.odd</script> x4" in plain
    assert "a dimension that FP8 GEMMs do not take" in plain
    assert "blocks.1.up : 10% of the gradients flushed to zero (at worst 90%, step 30)" in plain
    assert '  "blocks.1.up":\n    fprop: bf16' in plain
    assert (
        'fp8patch train --emulate --recipe /r/mine.yaml --only "blocks.*" --tokens 4096 SCRIPT'
        in plain
    )
    assert "torch 2.13.0" in plain
    # Nothing of it comes from anywhere: the one address is the name of a language.
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert "odd</script>" not in text


def test_maps_hold_every_point(tmp_path: Path) -> None:
    source = read_source(fp8_run(tmp_path / "fp8.json"))
    values = report(*(slot(p, r) for p in "qk" for r in ROLES if (p, r) != ("k", "input")))
    values["models"][0]["history"]["shared"] = {"k": "q"}
    shared = tmp_path / "shared.json"
    shared.write_text(json.dumps(values))
    first, second = drawing([source, read_source(shared)])["runs"]
    heat = first["heat"]
    assert heat["layers"] == LAYERS
    assert heat["steps"] == list(range(5, 105, 5))
    codes = decoded(heat["cells"]["flushed"]["grad_output"])
    assert len(codes) == 6 * POINTS
    hot = {i: code for i, code in enumerate(codes) if code > 1}
    # On a scale from 1e-8 to 1.
    code = 2 + round(65533 * (1 + math.log10(0.9) / 8))
    assert hot == {2 * POINTS + 5: code, 2 * POINTS + 6: code}
    clipped = decoded(heat["cells"]["saturated"]["grad_output"])
    assert clipped[2 * POINTS + 2] == 2 + round(65533 * 5 / 8)
    assert set(decoded(heat["cells"]["flushed"]["weight"])) == {1}
    # A follower's input is its leader's.
    assert set(decoded(second["heat"]["cells"]["flushed"]["input"])) == {1}


def decoded(text: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text), "<u2").tolist()


def test_curves_of_any_length_are_short(tmp_path: Path) -> None:
    losses = [[step, None if step == 3000 else float(step)] for step in range(1, 5001)]
    path = written(
        tmp_path / "run.json", losses=losses, step_seconds=[0.25] * 700, step_seconds_each=4
    )
    (found,) = drawing([read_source(path)])["runs"]
    assert len(found["losses"]) <= 600
    assert found["losses"][0] == [9, 5.0]
    assert found["losses"][-1][0] == 5000
    holes = [step for step, loss in found["losses"] if loss is None]
    assert holes == [3006]
    assert found["milliseconds"][-1] == [2800, 250.0]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        written(tmp_path / name / "run.json", slot())
    sources = [read_source(tmp_path / name / "run.json") for name in "aba"]
    assert [r["name"] for r in drawing(sources)["runs"]] == ["a/run", "b/run", "a/run (2)"]


def test_what_cannot_be_shown_is_one_line(tmp_path: Path) -> None:
    good = written(tmp_path / "run.json", slot())
    cut = tmp_path / "cut.json"
    cut.write_text(good.read_text()[:500])
    notes = tmp_path / "notes.html"
    notes.write_text("<p>my own notes</p>")
    os.mkfifo(tmp_path / "fifo")
    for args, said in (
        ([cut], "no whole JSON file"),
        ([good] * 7, "at most 6"),
        ([good, "-o", notes], "no page of ours"),
        ([good, "-o", tmp_path / "none" / "page.html"], "cannot be written"),
        ([good, "-o", tmp_path], "cannot be written: Is a directory"),
        ([good, "-o", ""], "cannot be written: Is a directory"),
        ([good, "-o", "n" * 300], "cannot be written: File name too long"),
        # Would wait for a writer for ever, if it were read.
        ([good, "-o", tmp_path / "fifo"], "is a device or a pipe"),
    ):
        done = run("report", *args)
        assert done.exit_code == 1, args
        (line,) = done.stderr.splitlines()
        assert said in line
    assert notes.read_text() == "<p>my own notes</p>"
    page(tmp_path, good)
    assert "Net: run" in page(tmp_path, good)  # its own page it may replace


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """Of a file, in bytes that are not UTF-8; of a module, in half a surrogate pair."""
    good = written(tmp_path / os.fsdecode(b"r\xff.json"), slot("half\ud800"))
    text = page(tmp_path, good)
    assert "Net: r?" in text
    assert "half?" in text


def test_a_patched_folder_is_no_run(tmp_path: Path) -> None:
    import torch

    import fp8patch

    model = fp8patch.convert_model(torch.nn.Sequential(torch.nn.Linear(16, 16)), include=["*"])
    fp8patch.save(model, tmp_path)
    done = run("report", tmp_path)
    assert done.exit_code == 1
    assert "`fp8patch inspect" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# -- in a browser ---------------------------------------------------------------------------------

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture
def chromium() -> str:
    if CHROMIUM is None and os.environ.get("FP8PATCH_REQUIRE_BROWSER") == "1":
        pytest.fail("FP8PATCH_REQUIRE_BROWSER=1, but there is no Chromium on PATH", pytrace=False)
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH")
    return CHROMIUM


# What a reader would do, put into the page by the test: read, hover, press buttons, change themes.
DRIVER = """
<script>
const seen = { errors: [] };
addEventListener("error", (event) => seen.errors.push(String(event.message)));
function hover(target, x, y) {
  const box = target.getBoundingClientRect();
  target.onpointermove({ clientX: box.left + x * box.width, clientY: box.top + y * box.height });
  return document.getElementById("tip").innerText;
}
function pixel(canvas, x, y) {
  const at = canvas.getContext("2d").getImageData(x * canvas.width, y * canvas.height, 1, 1).data;
  return Array.from(at);
}
addEventListener("load", () => {
  const maps = Object.fromEntries(
    Array.from(document.querySelectorAll("canvas[data-role]"), (c) => [c.dataset.role, c]));
  const gradients = maps.grad_output;
  // Third of six layers, sixth of twenty points.
  const look = () => ({
    pressed: Array.from(document.querySelectorAll("[aria-pressed=true]"), (b) => b.innerText),
    hot: pixel(gradients, 5.5 / 20, 2.5 / 6), cold: pixel(gradients, 15.5 / 20, 2.5 / 6),
    tip: hover(gradients, 5.5 / 20, 2.5 / 6),
    ground: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
  });
  seen.drawn = document.documentElement.dataset.drawn;
  seen.theme = document.documentElement.dataset.theme;
  seen.first = look();
  const curves = Array.from(document.querySelectorAll("svg.chart"));
  seen.curves = curves.map((svg) => svg.querySelectorAll("path").length);
  seen.curve = hover(document.querySelector("svg.chart"), 0.5, 0.5);
  document.getElementById("theme").click();
  seen.other = look();
  document.querySelector("[data-metric=saturated]").click();
  seen.clipped = look();
  seen.wide = document.documentElement.scrollWidth - innerWidth;
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(seen);
  document.body.append(result);
});
</script>
"""


def browse(chromium: str, file: Path, *flags: str) -> str:
    done = subprocess.run(
        [
            chromium,
            "--headless=new",
            "--no-sandbox",  # tests may run as root
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={file.parent / 'profile'}",
            *flags,
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_browser_draws_it_in_light_and_dark(chromium: str, tmp_path: Path) -> None:
    bf16 = written(tmp_path / "bf16.json", models=[{"class": "Net", "plan": None}])
    text = page(tmp_path, fp8_run(tmp_path / "fp8.json"), bf16)
    driven = tmp_path / "driven.html"
    # Before the page's own script, so that its errors are caught.
    driven.write_text(text.replace('<script id="data"', DRIVER + '<script id="data"'))
    dom = browse(chromium, driven, "--window-size=1200,1600", "--dump-dom")
    found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    seen = json.loads(html.unescape(found[1]))
    assert seen["errors"] == []
    assert (seen["drawn"], seen["theme"]) == ("true", "light")
    assert seen["curves"] == [2, 2]
    assert "fp8: 2.5" in seen["curve"]
    first, other, clipped = seen["first"], seen["other"], seen["clipped"]
    assert first["pressed"] == ["Flushed to zero"]
    assert first["tip"].splitlines() == ["blocks.1.up", "steps 26 to 30", "90% flushed to zero"]
    # Dark red on light grey; light sand on dark grey.
    assert brightness(first["hot"]) < 60 < 200 < brightness(first["cold"])
    assert brightness(other["cold"]) < 60 < 200 < brightness(other["hot"])
    assert brightness(colour(first["ground"])) > 200 > 60 > brightness(colour(first["ink"]))
    assert brightness(colour(other["ground"])) < 60 < 200 < brightness(colour(other["ink"]))
    assert clipped["pressed"] == ["Clipped"]
    assert clipped["tip"].endswith("none clipped")
    assert clipped["hot"] == clipped["cold"]
    assert seen["wide"] <= 0


def colour(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", text)]


def brightness(rgb: list[float]) -> float:
    return sum(rgb[:3]) / 3


@pytest.mark.slow
def test_a_narrow_screen_and_a_70b_model(chromium: str, tmp_path: Path) -> None:
    """All rows are drawn, nothing is wider than a phone, and the page takes little to make."""
    large = large_report(tmp_path / "large.json")
    text = page(tmp_path, large)
    assert len(text) < 3e6
    probe = (
        '<script>addEventListener("load", () => { document.title = JSON.stringify(['
        'document.querySelector("canvas[data-role=input]").clientHeight, '
        "document.documentElement.scrollWidth - innerWidth, "
        "document.documentElement.dataset.drawn]); });</script></body>"
    )
    narrow = tmp_path / "narrow.html"
    narrow.write_text(text.replace("</body>", probe))
    dom = browse(chromium, narrow, "--window-size=500,900", "--dump-dom")
    found = re.search(r"<title>(.*?)</title>", dom)
    assert found
    assert json.loads(html.unescape(found[1])) == [560 * 4, 0, "true"]
