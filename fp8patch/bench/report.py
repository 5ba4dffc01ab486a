"""What a benchmark found: its rows in a file, a table, a bar chart."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8patch.errors import Fp8PatchError
from fp8patch.output_files import figure, holds, publish

__all__ = [
    "REQUIRED",
    "check_targets",
    "kernels_text",
    "plot",
    "read_rows",
    "table",
    "write_json",
    "write_rows",
]

Rows = Sequence[dict[str, Any]]

# What every row has; None where it was not measured.
REQUIRED = (
    "workload", "contender", "step_ms", "spread_ms", "kernel_ms", "cpu_ms", "reserved_gib",
    "ratio_bf16", "gpu", "torch", "commit", "error",
)  # fmt: skip

_FIGURES = (
    "step_ms", "spread_ms", "kernel_ms", "cpu_ms", "reserved_gib", "ratio_bf16", "tokens_per_s",
    "images_per_s",
)  # fmt: skip
_MOST = 1e15

_HEAD = (
    "workload", "contender", "step ms", "±", "kernels ms", "CPU ms", "reserved GiB", "per s",
    "vs bf16",
)  # fmt: skip
_COLOURS = {"bf16": "#9aa0a6", "fp8": "#1a73e8", "ours": "#1a73e8", "te": "#34a853"}
_OTHER_COLOUR = "#f29900"


def write_rows(rows: Rows, path: Path) -> None:
    """All rows as a JSON list; for the errors, see `write_json`."""
    write_json(list(rows), path)


def write_json(values: Any, path: Path) -> None:
    """`values` as JSON, complete or not there at all: to a temporary name, then renamed.

    Raises:
        Fp8PatchError: The file cannot be written.
    """
    text = json.dumps(values, indent=1) + "\n"
    publish(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def check_targets(json_file: Path | None, plot_file: Path | None) -> None:
    """Raise what writing these would raise: before anything is measured.

    Raises:
        Fp8PatchError: A file cannot be written, or not as a chart.
    """
    for path in (json_file, plot_file):
        if path is not None:
            publish(path, Path.touch, keep=False)
    if json_file is not None and json_file.exists() and json_file.stat().st_size:
        # Rows of workloads; or what --gemm writes.
        if not any(holds(json_file, mark) for mark in (b'"workload": ', b'"gpu": ')):
            raise Fp8PatchError(f"{json_file}: exists, and holds no rows of ours. Name another.")
    if plot_file is not None:
        known = _figure().canvas.get_supported_filetypes()
        if plot_file.suffix[1:].lower() not in known:
            raise Fp8PatchError(
                f"{plot_file}: a chart's name ends in what it is to be: .png, .svg or .pdf."
            )


def _figure(**options: Any) -> Any:
    instead = "--json keeps the figures, and --from-json draws them later."
    return figure("a chart", instead, **options)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that `write_rows` wrote.

    Raises:
        Fp8PatchError: No such file, or something else is in it.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Fp8PatchError(f"{path}: cannot be read: {error.strerror}.") from None
    except ValueError:
        raise Fp8PatchError(f"{path}: not valid JSON. `fp8patch bench --json` writes it.") from None
    if not isinstance(rows, list) or not rows:
        raise Fp8PatchError(f"{path}: no list of rows. `fp8patch bench --json` writes one.")
    for number, row in enumerate(rows):
        missing = [key for key in REQUIRED if not isinstance(row, dict) or key not in row]
        if missing:
            raise Fp8PatchError(f"{path}: row {number} has no {missing[0]!r}: no row of a bench.")
        wrong = next((key for key in row if not _is_right(key, row[key])), None)
        if wrong is not None:
            raise Fp8PatchError(
                f"{path}: row {number}: {wrong} is {row[wrong]!r:.40}, which no bench measures."
            )
    return rows


def _is_right(key: str, value: Any) -> bool:
    if key in ("workload", "contender"):
        return isinstance(value, str)
    if key not in _FIGURES or value is None:
        return True
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < _MOST  # not nan either


def table(rows: Rows) -> str:
    """A Markdown table, errors below it.

    The step is a median over all timed steps, ± half the distance between their quartiles.
    """
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|---|" + "---:|" * (len(_HEAD) - 2)]
    for row in rows:
        lines.append("| " + " | ".join(_cells(row)) + " |")
    said = {(r["workload"], r["contender"]): r["error"] for r in rows if r["error"]}
    if said:
        lines.append("")
    lines += [
        f"- {workload}, {contender}: {error}" for (workload, contender), error in said.items()
    ]
    lines += ["", *dict.fromkeys(_measured_with(row) for row in rows)]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    per_s = row.get("tokens_per_s") or row.get("images_per_s")
    spread = row["spread_ms"]
    name = row["contender"]
    if row.get("best_of"):
        name += f" ({row['best_of'].removeprefix(name + '-')})"
    return [
        row["workload"],
        name,
        _number(row["step_ms"], 2),
        _number(None if spread is None else spread / 2, 2),
        _number(row["kernel_ms"], 1),
        _number(row["cpu_ms"], 1),
        _number(row["reserved_gib"], 1),
        _number(per_s, 0),
        f"{row['ratio_bf16']:.2f}x" if row["ratio_bf16"] is not None else "-",
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _measured_with(row: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {row[name]}"
        for name in ("torch", "cuda", "triton", "transformers", "torchao", "transformer_engine")
        if row.get(name)
    )
    return f"{row.get('gpu') or 'unknown device'}; {versions}; commit {row['commit'] or 'unknown'}"


def kernels_text(rows: Rows) -> str:
    """The kernels with most time of each contender that was run with `profile`."""
    lines = []
    for row in rows:
        if not row.get("top_kernels") or row.get("best_of"):
            continue
        total = _number(row["kernel_ms"], 2)
        lines.append(f"{row['workload']}, {row['contender']}: {total} ms of kernels a step")
        lines += [
            f"  {kernel['ms']:9.3f} ms  x{kernel['calls']:<5d} {kernel['name'][:110]}"
            for kernel in row["top_kernels"]
        ]
    return "\n".join(lines)


def plot(rows: Rows, path: Path) -> None:
    """A bar chart of step times, a panel a workload.

    Raises:
        Fp8PatchError: Nothing was measured, no matplotlib, or the file cannot be written.
    """
    measured = [row for row in rows if row["step_ms"] is not None and not row.get("best_of")]
    workloads = list(dict.fromkeys(row["workload"] for row in measured))
    if not workloads:
        raise Fp8PatchError(f"{path}: nothing to draw: no contender has a step time.")
    chart = _figure(figsize=(7.5, 0.9 + 2.6 * len(workloads)), layout="constrained")
    panels = chart.subplots(len(workloads), 1, squeeze=False)[:, 0]
    for panel, workload in zip(panels, workloads, strict=True):
        _panel(panel, workload, [row for row in measured if row["workload"] == workload])
    chart.suptitle("; ".join(dict.fromkeys(str(row["gpu"]) for row in measured)), fontsize=9)
    publish(path, lambda partial: chart.savefig(partial, dpi=150))


def _panel(panel: Any, workload: str, rows: Rows) -> None:
    # The base is in every group; its first will do.
    shown = list({row["contender"]: row for row in reversed(rows)}.values())[::-1]
    names = [row["contender"] for row in shown]
    times = [row["step_ms"] for row in shown]
    halves = [(row["spread_ms"] or 0.0) / 2 for row in shown]
    colours = [_COLOURS.get(name.split("-")[0], _OTHER_COLOUR) for name in names]
    bars = panel.barh(names, times, xerr=halves, color=colours)
    labels = [f"{row['step_ms']:.1f} ms, {row['ratio_bf16'] or 0:.2f}x" for row in shown]
    panel.bar_label(bars, labels=labels, padding=4, fontsize=7)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.25 * max(times))
    panel.set_title(f"{workload}: a training step (shorter is faster)", fontsize=9)
    panel.tick_params(labelsize=7)
