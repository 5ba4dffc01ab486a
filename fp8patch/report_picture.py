"""The picture of `report --png`: what the page shows, for a message or a paper. No torch."""

import base64
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp8patch import __version__
from fp8patch.inspect.slots import layers_of
from fp8patch.inspect.source import Source
from fp8patch.messages import printable
from fp8patch.output_files import figure
from fp8patch.report_data import FACTS, METRICS, ROLES, facts_of, part, title_of

__all__ = ["MARK", "save_picture"]

# In the first bytes of every picture of ours: what may be replaced.
MARK = b"Software\0fp8patch report"

# Inches, from the left and the top, and points. More layers than that can't be read.
_WIDTH, _MARGIN, _NAMES, _GAP = 12.0, 0.35, 2.3, 0.15
_LINE, _CURVES, _SMALL, _SOFT = 0.23, 2.0, 6.5, "#5f656b"
_MOST_LAYERS = 40
_DPI = 150

# Where a fact begins, or, of numbers, ends; and how many characters there is room for.
_COLUMNS = ((0.55, 30), (2.8, 36), (5.4, 15), (7.65, 20), (8.45, 12), (9.45, 12), (10.5, 12),
            (11.65, 14))  # fmt: skip

# The page's, in light.
_SERIES = ("#1f6feb", "#c2570c", "#16794f", "#8246b8", "#b02a63", "#6f6000")
_HEAT = ("#eeeeea", "#fbdcb2", "#ef8a35", "#b3261e", "#4a0d0a")
_TICKS = {1e-8: "1e-6%", 1e-6: "1e-4%", 1e-4: "0.01%", 1e-2: "1%", 1.0: "100%"}


def save_picture(sources: Sequence[Source], drawn: dict[str, Any], path: Path) -> None:
    """Write a PNG, 1800 pixels wide, of what `report_data.drawing` made of these runs.

    Raises:
        Fp8PatchError: There is no matplotlib.
        OSError: The file cannot be written.
    """
    sheet = figure("--png", "The page is written, without it.", facecolor="white")
    from matplotlib import style

    # Not in the user's own style, and no formula between two dollars of a name.
    plain = {"text.parse_math": False, "axes.edgecolor": "#dddeda", "font.size": 8}
    with style.context(["default", plain]), warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph")
        _draw(_Sheet(sheet), sources, drawn)
        sheet.savefig(path, format="png", dpi=_DPI, metadata={"Software": MARK[9:].decode()})


class _Sheet:
    """A figure that is filled from the top down; places are in inches.

    Everything is drawn before the height is known, so it is placed once at the end.
    """

    def __init__(self, sheet: Any) -> None:
        self.sheet = sheet
        self.down = _MARGIN
        self._texts: list[tuple[Any, float, float]] = []
        self._panels: list[tuple[Any, tuple[float, float, float, float]]] = []

    def text(self, x: float, text: str, **options: Any) -> None:
        made = self.sheet.text(0, 0, printable(text), **{"va": "baseline", **options})
        self._texts.append((made, x, self.down))

    def panel(self, x: float, width: float, height: float) -> Any:
        made = self.sheet.add_axes((0, 0, 1, 1), label=str(len(self._panels)))
        made.tick_params(length=0, labelsize=7, labelcolor=_SOFT)
        self._panels.append((made, (x, self.down, width, height)))
        return made

    def place(self) -> None:
        height = self.down + _MARGIN
        self.sheet.set_size_inches(_WIDTH, height)
        for text, x, y in self._texts:
            text.set_position((x / _WIDTH, 1 - y / height))
        for panel, (x, y, w, h) in self._panels:
            panel.set_position((x / _WIDTH, 1 - (y + h) / height, w / _WIDTH, h / height))


def _draw(sheet: _Sheet, sources: Sequence[Source], drawn: dict[str, Any]) -> None:
    names = [run["name"] for run in drawn["runs"]]
    sheet.down += 0.15
    sheet.text(_MARGIN, _cut(title_of(names, sources), 90), fontsize=14, weight="bold")
    sheet.down += 0.38
    _facts(sheet, FACTS, None)
    for at, (name, source) in enumerate(zip(names, sources, strict=True)):
        sheet.down += _LINE
        _facts(sheet, facts_of(name, source), _SERIES[at % len(_SERIES)])
    sheet.down += 0.45
    _curves(sheet, sources, drawn["runs"])
    shown = next((at for at, run in enumerate(drawn["runs"]) if run["heat"]), None)
    if shown is None:
        sheet.text(_MARGIN, "Layers over time: no run has a history.", color=_SOFT)
    else:
        _maps(sheet, sources[shown], drawn["runs"][shown], several=len(sources) > 1)
    versions = sources[0].values.get("settings", {}).get("versions", {})
    said = [f"fp8patch {sources[0].values['fp8patch_version']}"]
    said += [f"{key} {value}" for key, value in versions.items()]
    sheet.down += 0.3
    line = f"Run with {', '.join(said)}. Drawn by fp8patch {__version__}."
    sheet.text(_MARGIN, _cut(line, 170), color=_SOFT, fontsize=7)
    sheet.place()


def _facts(sheet: _Sheet, facts: Sequence[str], colour: str | None) -> None:
    head = {} if colour else {"color": _SOFT, "weight": "bold"}
    if colour:
        sheet.text(_MARGIN, "■", color=colour, fontsize=9)
    for at, (fact, (x, room)) in enumerate(zip(facts, _COLUMNS, strict=True)):
        sheet.text(x, _cut(fact, room), ha="left" if at < 3 else "right", **head)


def _curves(sheet: _Sheet, sources: Sequence[Source], runs: Sequence[dict[str, Any]]) -> None:
    emulated = any(source.values["execution"] == "emulate" for source in sources)
    note = " (emulated: no measure of speed)" if emulated else ""
    left, wide = 0.45, 5.0
    for x, key, said in (
        (_MARGIN + left, "losses", "Loss over steps"),
        (_WIDTH - _MARGIN - wide, "milliseconds", f"Step time over steps, ms{note}"),
    ):
        sheet.text(x - left, said, fontsize=10, weight="bold")
        sheet.down += 0.15
        panel = sheet.panel(x, wide, _CURVES)
        sheet.down -= 0.15
        _curve(panel, [run[key] for run in runs], from_zero=key == "milliseconds")
    sheet.down += 0.15 + _CURVES + 0.6


def _curve(panel: Any, lines: Sequence[list[list[Any]]], *, from_zero: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    known = [value for points in lines for _, value in points if value is not None]
    panel.spines[["top", "right", "left"]].set_visible(False)
    if not known:
        panel.set(xticks=[], yticks=[])
        panel.text(0.02, 0.85, "not in these reports", transform=panel.transAxes, color=_SOFT)
        return
    for points, colour in zip(lines, _SERIES, strict=False):
        values = [float("nan") if value is None else value for _, value in points]
        # One point makes no line.
        marker = "o" if len(points) == 1 else ""
        panel.plot([step for step, _ in points], values, color=colour, lw=1.4, marker=marker)
    if from_zero:
        # Warm-up takes many times as long as a step: it would flatten all the others.
        top = min(max(known), 3 * float(np.median(known)))
        panel.set_ylim(0, 1.05 * top or 1)
    panel.margins(x=0.01)
    panel.grid(axis="y", color="#e8e9e6", lw=0.6)
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_major_locator(MaxNLocator(5))


def _maps(sheet: _Sheet, source: Source, run: dict[str, Any], *, several: bool) -> None:
    heat = run["heat"]
    rows = _rows(source, heat["layers"])
    total = len(heat["layers"])
    which = f"the {len(rows)} of {total} layers most at risk, " if len(rows) < total else ""
    title = "Layers over time" + (f" of {_cut(run['name'], 40)}" if several else "")
    sheet.text(_MARGIN, title, fontsize=10, weight="bold")
    sheet.down += 0.2
    note = f"{which}in the order of the model; white: nothing was cast"
    sheet.text(_MARGIN, note[0].upper() + note[1:], color=_SOFT, fontsize=7)
    sheet.down -= 0.2
    legend = sheet.panel(_WIDTH - _MARGIN - 3.2, 3.0, 0.11)
    sheet.down += 0.45
    names = [_tail(heat["layers"][row], 38) for row in rows]
    high = len(rows) * (0.115 if len(rows) > 20 else 0.17)
    wide = (_WIDTH - 2 * _MARGIN - _NAMES - 2 * _GAP) / 3
    for metric, said in METRICS.items():
        cells = {role: _parts(heat, metric, role, rows) for role in ROLES}
        # Most runs have no value that is not finite, and need no map of none.
        if metric == "non_finite" and not any(part.filled(0).any() for part in cells.values()):
            continue
        for at, (role, parts) in enumerate(cells.items()):
            x = _MARGIN + _NAMES + at * (wide + _GAP)
            sheet.text(x, f"{ROLES[role].capitalize()} {said}", color=_SOFT, weight="bold")
            sheet.down += 0.07
            panel = sheet.panel(x, wide, high)
            sheet.down -= 0.07
            image = _map(panel, parts, heat["steps"], [] if at else names)
        sheet.down += 0.07 + high + 0.42
    bar = sheet.sheet.colorbar(image, cax=legend, orientation="horizontal", ticks=[*_TICKS])
    bar.set_ticklabels([*_TICKS.values()], fontsize=_SMALL)
    bar.outline.set_visible(False)
    legend.minorticks_off()
    sheet.down -= 0.15


def _rows(source: Source, layers: Sequence[str]) -> list[int]:
    """Those of `layers` to show, in their order: the worst where there are too many."""
    rank = {layer.path or "(root)": at for at, layer in enumerate(layers_of(source.slots))}
    worst = sorted(range(len(layers)), key=lambda row: rank.get(layers[row], len(rank)))
    return sorted(worst[:_MOST_LAYERS])


def _parts(heat: dict[str, Any], metric: str, role: str, rows: Sequence[int]) -> Any:
    """Parts of the values cast, [rows, points]; masked where nothing was cast."""
    codes = np.frombuffer(base64.b64decode(heat["cells"][metric][role]), "<u2")
    shown = codes.reshape(len(heat["layers"]), -1)[rows]
    return np.ma.masked_invalid(np.vectorize(part, otypes=[float])(shown))


def _map(panel: Any, parts: Any, steps: Sequence[int], names: Sequence[str]) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    colours = LinearSegmentedColormap.from_list("heat", _HEAT).with_extremes(bad="white")
    # Clipped to it, nothing lost has the lowest colour.
    norm = LogNorm(1e-8, 1, clip=True)
    image = panel.imshow(parts, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    panel.set_yticks(range(len(names)), [printable(name) for name in names], fontsize=_SMALL)
    ends = [steps[0], steps[-1]][: len(steps)]
    panel.set_xticks([-0.5, len(steps) - 0.5][: len(ends)], [f"step {end:,}" for end in ends])
    for label, side in zip(panel.get_xticklabels(), ("left", "right"), strict=False):
        label.set_horizontalalignment(side)
    return image


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _tail(text: str, room: int) -> str:
    return text if len(text) <= room else "…" + text[1 - room :]
