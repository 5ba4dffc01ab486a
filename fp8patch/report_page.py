"""The page of `fp8patch report`: one file of HTML that loads and sends nothing. No torch."""

import html
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fp8patch import __version__
from fp8patch.inspect.advice import advise, overrides, percent, recipe_lines
from fp8patch.inspect.slots import layers_of
from fp8patch.inspect.source import Source
from fp8patch.plan.types import CODES
from fp8patch.report_data import FACTS, METRICS, ROLES, facts_of, names_of, title_of

__all__ = ["MARK", "page"]

# The first line of every page of ours: what may be replaced.
MARK = "<!doctype html><!-- fp8patch report -->"

# Scripts and styles of the page itself, and nothing from anywhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_MOST_LAYERS = 15


def page(sources: Sequence[Source], drawn: dict[str, Any]) -> str:
    """The page of these runs, the first of which is what it is about; the others are compared.

    `drawn` is what `report_data.drawing` makes of them.
    """
    names = names_of(sources)
    data = json.dumps(drawn, separators=(",", ":"), allow_nan=False)
    first = sources[0]
    body = [
        _runs(names, sources),
        _curves(sources),
        _maps(names, sources),
        _risks(first),
        _skipped(first),
        *(_settings(name, source) for name, source in zip(names, sources, strict=True)),
    ]
    title = title_of(names, sources)
    return "\n".join(
        [
            MARK,
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title><style>{_file('report.css')}</style></head><body>",
            f'<header><h1>{_text(title)}</h1><button id="theme">Dark</button></header><main>',
            *body,
            f'<p class="soft">Written by fp8patch {_text(__version__)}.</p></main>',
            '<noscript><p class="soft">Curves and maps are drawn by a script.</p></noscript>',
            '<div id="tip" role="status"></div>',
            # "<" alone could end the element, whatever a module is called.
            f'<script id="data" type="application/json">{data.replace("<", _LESS)}</script>',
            f"<script>{_file('report.js')}</script></body></html>\n",
        ]
    )


_LESS, _NEW_LINE = "\\u003c", "\n"


def _file(name: str) -> str:
    return (Path(__file__).resolve().parent / "page" / name).read_text(encoding="utf-8")


def _text(value: Any) -> str:
    return html.escape(str(value))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers: Iterable[int] = ()) -> str:
    """`rows` hold HTML; `numbers` are the columns to align to the right."""
    right = set(numbers)

    def cells(tag: str, values: Iterable[str]) -> str:
        return "".join(
            f'<{tag} class="number">{v}</{tag}>' if i in right else f"<{tag}>{v}</{tag}>"
            for i, v in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells("th", map(_text, head))}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _runs(names: list[str], sources: Sequence[Source]) -> str:
    rows = []
    for at, (name, source) in enumerate(zip(names, sources, strict=True)):
        run, *others = map(_text, facts_of(name, source))
        rows.append([f'<span class="swatch" data-run="{at}"></span>{run}', *others])
    return f"<section><h2>Runs</h2>{_table(FACTS, rows, range(3, len(FACTS)))}</section>"


def _curves(sources: Sequence[Source]) -> str:
    emulated = any(source.values["execution"] == "emulate" for source in sources)
    note = '<p class="soft">Emulation is no measure of speed.</p>' if emulated else ""
    return (
        '<div class="two"><section><h2>Loss</h2><svg class="chart" data-key="losses" role="img" '
        'aria-label="Loss over steps, a curve a run"></svg></section><section><h2>Step time</h2>'
        '<svg class="chart" data-key="milliseconds" data-unit=" ms" data-cap="1" role="img" '
        f'aria-label="Time of each step, a curve a run"></svg>{note}</section></div>'
    )


def _maps(names: list[str], sources: Sequence[Source]) -> str:
    shown = [at for at, source in enumerate(sources) if any(slot.steps for slot in source.slots)]
    if not shown:
        return (
            '<section><h2>Layers over time</h2><p class="soft">No run has a history.</p></section>'
        )
    picker = ""
    if len(shown) > 1:
        options = "".join(f'<option value="{at}">{_text(names[at])}</option>' for at in shown)
        picker = f'<select id="run" aria-label="Run">{options}</select>'
    buttons = "".join(
        f'<button data-metric="{metric}" aria-pressed="false">{_text(said.capitalize())}</button>'
        for metric, said in METRICS.items()
    )
    maps = "".join(
        f'<div><h3>{_text(said.capitalize())}</h3><canvas data-role="{role}" role="img" '
        f'aria-label="{_text(said)} of each layer over time"></canvas>'
        '<div class="steps"></div></div>'
        for role, said in ROLES.items()
    )
    legend = '<span class="legend">1e-6%<canvas aria-hidden="true"></canvas>100%</span>'
    return (
        f'<section><h2>Layers over time</h2><div class="controls">{picker}{buttons}{legend}</div>'
        '<div class="maps"><div class="names"><h3>&nbsp;</h3><canvas aria-hidden="true"></canvas>'
        f"</div>{maps}</div></section>"
    )


def _risks(source: Source) -> str:
    layers = layers_of(source.slots)
    if not layers:
        return ""
    advice = advise(layers)
    bad = {item.path for item in advice}
    rows = []
    for layer in layers[:_MOST_LAYERS]:
        slot = layer.worst
        rows.append(
            [
                f"<strong>{_text(layer.path or '(root)')}</strong>"
                if layer.path in bad
                else _text(layer.path or "(root)"),
                _text(ROLES[slot.role]),
                f"{slot.severity:.2f}",
                percent(slot.ratios["saturated"].value),
                percent(slot.ratios["flushed"].value),
                _range(slot.fill),
            ]
        )
    head = ("layer", "worst in", "risk", "clipped", "flushed", "of its range")
    more = f" The {_MOST_LAYERS} worst of {len(layers)}." if len(layers) > _MOST_LAYERS else ""
    said = "".join(
        f"<p><strong>{_text(item.path or '(root)')}</strong>: {_powers(_text(item.why))}.</p>"
        for item in advice[:_MOST_LAYERS]
    )
    lines = recipe_lines(overrides(advice, [slot.path for slot in source.slots]))
    fix = f"<p>A recipe that helps:</p><pre>{_text(_NEW_LINE.join(lines))}</pre>" if lines else ""
    verdict = said or (
        '<p class="soft">No layer loses more to FP8 than runs do that train as well as BF16.</p>'
    )
    return (
        f"<section><h2>Layers by risk</h2>{verdict}{fix}"
        f'<p class="soft" style="margin-top:14px">From 1 on, a risk is worth a look.{more}</p>'
        f"{_table(head, rows, range(2, 6))}</section>"
    )


def _range(fill: float | None) -> str:
    if fill is None:
        return ""
    return f"2<sup>{fill:.0f}</sup>" if abs(fill) >= 0.5 else "all"


def _powers(text: str) -> str:
    return re.sub(r"2\^(-?\d+)", r"2<sup>\1</sup>", text)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _skipped(source: Source) -> str:
    rows = []
    for model in source.values["models"]:
        for code, paths in model.get("skipped", {}).items():
            alike: dict[str, int] = {}
            for path in paths:
                generic = _NUMBER.sub("*", path)
                alike[generic] = alike.get(generic, 0) + 1
            shown = "<br>".join(
                _text(path or "(root)") + (f" x{n}" if n > 1 else "") for path, n in alike.items()
            )
            rows.append([_text(code), _text(CODES.get(code, "")), str(len(paths)), shown])
    if not rows:
        return ""
    table = _table(("code", "why", "modules", ""), rows, [2])
    return f"<section><h2>Not in FP8</h2>{table}</section>"


def _settings(name: str, source: Source) -> str:
    values = source.values
    settings = values.get("settings", {})
    command = _command(values, settings.get("options", {}))
    lines = [f"{key}: {_value(value)}" for key, value in settings.get("recipe", {}).items()]
    versions = ", ".join(f"{key} {value}" for key, value in settings.get("versions", {}).items())
    recipe = ""
    if lines:
        recipe = (
            f"<details><summary>Recipe</summary><pre>{_text(chr(10).join(lines))}</pre></details>"
        )
    return (
        f"<section><h2>Settings of {_text(name)}</h2><pre>{_text(command)}</pre>"
        f'<p class="soft" style="margin-top:10px">fp8patch {_text(values["fp8patch_version"])}'
        f"{', ' if versions else ''}{_text(versions)}</p>{recipe}</section>"
    )


_FLAGS = {"fp8": "--fp8", "emulate": "--emulate", "bf16": "--no-fp8", "off": "--off"}


def _command(values: Any, options: Any) -> str:
    """What was asked for, as a command. The script's own words stay its own: they may be secret."""
    words = ["fp8patch train"]
    if values["backend"] in _FLAGS:
        words.append(_FLAGS[values["backend"]])
    if values["recipe"] != "delayed":
        words.append(f"--recipe {values['recipe']}")
    for name in ("only", "skip", "include", "roots"):
        words += [f'--{name} "{pattern}"' for pattern in options.get(name, ())]
    if options.get("tokens"):
        words.append(f"--tokens {options['tokens']}")
    flags = [name for name in ("compat", "compile", "cuda_graphs") if options.get(name) is True]
    words += ["--" + name.replace("_", "-") for name in flags]
    if values["world_size"] > 1:
        words.append(f"--nproc {values['world_size']}")
    return " ".join([*words, "SCRIPT …"])


def _value(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict) else str(value)
