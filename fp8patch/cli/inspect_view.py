"""What `fp8patch inspect` prints: tables of layers and slots, and what to do about the worst."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from fp8patch.cli.columns import fitting, left_out
from fp8patch.inspect.advice import advise, overrides, percent, recipe_lines
from fp8patch.inspect.run import last_loss
from fp8patch.inspect.slots import Layer, SlotPoints

if TYPE_CHECKING:
    from rich.console import Console

    from fp8patch.inspect.source import Source

__all__ = ["show", "show_both", "show_slots"]

_MOST_ROWS = 20
_MOST_NAMED = 8
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*%#"
_ROLES = {"input": "input", "weight": "weight", "grad_output": "gradient"}


def show(source: "Source", layers: list[Layer], screen: "Console", *, every: bool) -> None:
    """A row a layer, with its worst slot; then what to do."""
    screen.print(_headline(source))
    if not layers:
        screen.print(_nothing(source))
        return
    rows = layers if every else layers[:_MOST_ROWS]
    names = ["layer", "worst", *_FIGURES, "amax", "over time"]
    cells = [
        [
            _marked(layer.path, layer.severity),
            _ROLES[layer.worst.role],
            *_figures(layer.worst),
            _last(layer.worst.amax),
            sparkline(layer.worst.amax, _plain(screen)),
        ]
        for layer in rows
    ]
    _print(screen, names, cells, _FIRST_TO_GO)
    if len(rows) < len(layers):
        screen.print(f"… and {len(layers) - len(rows)} layers of less risk; --all shows them.")
    screen.print()
    _show_advice(source, layers, screen)


def show_slots(source: "Source", layers: list[Layer], screen: "Console") -> None:
    """All slots of each layer."""
    screen.print(_headline(source))
    for layer in layers:
        screen.print(f"\n{_marked(layer.path, layer.severity)}")
        names = ["", "scaling", "format", *_FIGURES, "amax first", "last", "largest", "over time"]
        cells = [
            [
                _ROLES[slot.role],
                slot.scaling,
                slot.format.upper(),
                *_figures(slot),
                _amax(slot.amax[0]) if slot.amax else "",
                _last(slot.amax),
                _amax(max((v for v in slot.amax if v is not None), default=None)),
                sparkline(slot.amax, _plain(screen), width=40),
            ]
            for slot in sorted(layer.slots, key=lambda slot: list(_ROLES).index(slot.role))
        ]
        _print(screen, names, cells, _FIRST_OF_SLOTS)
        shared = sorted({path for slot in layer.slots for path in slot.shared_by})
        if shared:
            screen.print(f"[dim]its input is also that of {escape(', '.join(shared))}[/]")
    screen.print()
    _show_advice(source, layers, screen)


def show_both(
    sources: "list[Source]", found: list[list[Layer]], screen: "Console", *, every: bool
) -> None:
    """Two runs beside each other: their figures, then the layers that differ most."""
    head = _table(["", "A", "B"], fold=True)
    for name, values in _facts(sources):
        head.add_row(name, *map(escape, values), style="" if name else "bold")
    screen.print(head)
    screen.print()
    first, second = ({layer.path: layer for layer in layers} for layers in found)
    union = dict.fromkeys([*first, *second])
    paths = sorted(union, key=lambda path: -_distance(first.get(path), second.get(path)))
    rows = paths if every else paths[:_MOST_ROWS]
    figures = ["A risk", "B risk", "A clipped", "B clipped", "A flushed", "B flushed"]
    cells = []
    for path in rows:
        pair = [first.get(path), second.get(path)]
        worst = max((layer for layer in pair if layer), key=lambda layer: layer.severity)
        role = worst.worst.role
        slots = [_slot(layer, role) for layer in pair]
        cells.append(
            [
                _name(path),
                _ROLES[role],
                *("" if layer is None else f"{layer.severity:.2f}" for layer in pair),
                *("" if s is None else _ratio(s, "saturated") for s in slots),
                *("" if s is None else _ratio(s, "flushed") for s in slots),
                *("" if s is None else sparkline(s.amax, _plain(screen), 12) for s in slots),
            ]
        )
    _print(screen, ["layer", "worst", *figures, "A", "B"], cells, ["A", "B", *figures[:1:-1]])
    if len(rows) < len(paths):
        screen.print(f"… and {len(paths) - len(rows)} that differ less; --all shows them.")


_FIGURES = ("risk", "clipped", "flushed", "of range", "SQNR")
# Where a terminal is narrow: of all layers, and of the slots of one.
_FIRST_TO_GO = ("over time", "amax", "of range", "SQNR", "flushed", "clipped")
_FIRST_OF_SLOTS = ("over time", "amax first", "last", "format", "scaling", "largest", "of range",
                   "SQNR", "flushed", "clipped")  # fmt: skip


def _print(screen: "Console", names: list[str], rows: list[list[str]], drop: Sequence[str]) -> None:
    """A table of the columns that there is room for, and which there is none for."""
    shown = fitting(names, rows, [name for name in drop if name in names], screen.width)
    table = _table([names[at] for at in shown])
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    screen.print(table)
    if said := left_out(names, rows, shown):
        screen.print(f"[dim]{escape(said)}[/]")


def _figures(slot: SlotPoints) -> tuple[str, ...]:
    fill = slot.fill
    return (
        f"{slot.severity:.2f}",
        _ratio(slot, "saturated"),
        _ratio(slot, "flushed"),
        "" if fill is None else f"2^{fill:.0f}" if abs(fill) >= 0.5 else "all",
        "" if slot.sqnr is None else f"{slot.sqnr:.1f}",
    )


def _ratio(slot: SlotPoints, name: str) -> str:
    if not any(slot.seen):
        return ""
    bad = slot.ratios["non_finite"].value
    if bad and name == "saturated":
        return f"{percent(bad)} inf/nan"
    return percent(slot.ratios[name].value)


def _headline(source: "Source") -> str:
    what = escape(f"{', '.join(source.models)}, recipe {source.recipe}")
    name = f"[bold]{escape(str(source.path))}[/]  "
    if source.kind == "checkpoint":
        return f"{name}{what}, a patched model\n"
    values = source.values
    where = f"{values['execution'] or values['backend']} on {values['device'] or 'no device'}"
    steps = f"{values['steps']} step" + ("" if values["steps"] == 1 else "s")
    return f"{name}{what}, {steps}, {escape(values['state'] + ', ' + where)}\n"


def _nothing(source: "Source") -> str:
    if source.kind == "checkpoint":
        return "No slot has seen anything yet: scales are set in training, or by --calibrate."
    if source.values["format_version"] < 2:
        return "This report was written before slots had a history; run it again with this version."
    if not any(model.get("plan") for model in source.values["models"]):
        return "Nothing ran in FP8 in this run, so there is nothing to see of it."
    if source.values["state"] == "running":
        return "No point was taken yet: look again when the run has finished more steps."
    return "The run ended before a point was taken."


def _facts(sources: "list[Source]") -> list[tuple[str, list[str]]]:
    def of(source: "Source", key: str) -> Any:
        return source.values.get(key)

    def step(source: "Source") -> str:
        seconds = of(source, "median_step_seconds")
        return "" if seconds is None else f"{1000 * seconds:.1f} ms"

    def memory(source: "Source") -> str:
        size = of(source, "peak_memory_bytes")
        return f"{size / 2**30:.2f} GiB" if size else ""

    rows = [
        ("", [str(source.path) for source in sources]),
        ("model", [", ".join(source.models) for source in sources]),
        ("recipe", [source.recipe for source in sources]),
        ("ran in", [str(of(s, "execution") or "") for s in sources]),
        ("steps", [str(of(s, "steps") or "") for s in sources]),
        ("last loss", [last_loss(source.values) for source in sources]),
        ("median step", [step(s) for s in sources]),
        ("peak memory", [memory(s) for s in sources]),
    ]
    return [(name, values) for name, values in rows if any(values)]


def _show_advice(source: "Source", layers: list[Layer], screen: "Console") -> None:
    advice = advise(layers)
    if not advice:
        screen.print("No layer loses more to FP8 than runs do that train as well as BF16.")
        return
    for item in advice[:_MOST_NAMED]:
        screen.print(f"[bold]{_name(item.path)}[/]: {item.why}.", highlight=False)
    if len(advice) > _MOST_NAMED:
        screen.print(f"… and {len(advice) - _MOST_NAMED} more.")
    lines = recipe_lines(overrides(advice, [slot.path for slot in source.slots]))
    if lines:
        screen.print("\nA recipe that helps (base: the one you use now):\n")
        for line in lines:
            screen.print(f"  {line}", markup=False, highlight=False)
        if any("rowwise" in line for line in lines):
            screen.print("\nrowwise needs compute capability 9.0; on 8.9, scaling: current.")


def _table(columns: Sequence[str], *, fold: bool = False) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        left = name in ("layer", "", "worst", "over time", "scaling", "format", "A", "B")
        table.add_column(
            name,
            overflow="fold" if fold or name == "layer" else "ellipsis",
            no_wrap=not fold and name != "layer",
            justify="left" if left else "right",
        )
    return table


def _marked(path: str, severity: float) -> str:
    return f"[bold red]{_name(path)}[/]" if severity >= 1 else _name(path)


def _name(path: str) -> str:
    """As markup. A module may be called "[0]", a recipe's file "mine[1].yaml"."""
    return escape(path or "(root)")


def _slot(layer: Layer | None, role: str) -> SlotPoints | None:
    return next((s for s in layer.slots if s.role == role), None) if layer else None


def _distance(first: Layer | None, second: Layer | None) -> float:
    """How far two layers are apart; what is in one run alone comes first."""
    if first is None or second is None:
        return math.inf
    return abs(math.log((first.severity + 1e-3) / (second.severity + 1e-3)))


def _amax(value: float | None) -> str:
    return "inf/nan" if value is None else f"{value:.3g}"


def _last(amax: Sequence[float | None]) -> str:
    return _amax(amax[-1]) if amax else ""


def _plain(screen: "Console") -> bool:
    return not screen.encoding.lower().startswith("utf")


def sparkline(amax: Sequence[float | None], plain: bool = False, width: int = 24) -> str:
    """amax over time, on a logarithmic scale of one binade or more; `!` where it was not finite."""
    bars = _PLAIN_BARS if plain else _BARS
    size = min(width, len(amax))
    groups = [amax[i * len(amax) // size : (i + 1) * len(amax) // size] for i in range(size)]
    logs = [
        None if None in group else math.log2(max(v for v in group if v is not None) or 2.0**-149)
        for group in groups
    ]
    known = [value for value in logs if value is not None]
    if not known:
        return "!" * size
    low, high = min(known), max(max(known), min(known) + 1)
    return "".join(
        "!" if v is None else bars[round((v - low) / (high - low) * (len(bars) - 1))] for v in logs
    )
