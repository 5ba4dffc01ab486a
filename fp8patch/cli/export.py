"""`fp8patch export`: a model directory in an FP8 format that servers load."""

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8patch.cli.options import Only, Skip

if TYPE_CHECKING:
    from fp8patch.export.directory import ExportedDirectory

__all__ = ["export"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def export(
    model: Annotated[Path, typer.Argument(help="Model directory, plain or patched.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")],
    format: Annotated[
        str, typer.Option("--format", help="compressed-tensors, hf-fp8 or torchao.")
    ] = "compressed-tensors",
    only: Only = None,
    skip: Skip = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT, once the new one is complete.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Write an FP8 checkpoint that vLLM, SGLang and transformers load.

    compressed-tensors has one scale a row of a weight, hf-fp8 one a block of 128 x 128, torchao is
    torchao's own. Activations are quantised as they come. Heads, embeddings and routers stay as
    they are, and so does what the format cannot hold: listed with the reason.
    """
    from transformers.utils import logging

    from fp8patch.cli.convert import killed_cleanly
    from fp8patch.cli.progress import progress_bar
    from fp8patch.export.directory import export_directory

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with killed_cleanly(), progress_bar() as progress:
        done = export_directory(
            model,
            out,
            format,
            only=only or (),
            skip=skip or (),
            force=force,
            progress=progress,
        )
    _show(done, as_json=as_json)


def _show(done: "ExportedDirectory", *, as_json: bool) -> None:
    from fp8patch.cli import output

    share = sum(done.plan[path].param_share for path in done.exported)
    if as_json:
        values: dict[str, Any] = {
            "out": str(done.out),
            "format": done.format,
            "model": done.plan.model,
            "exported": list(done.exported),
            "param_share": share,
            "kept": [
                {"path": kept.path, "code": kept.code, "reason": kept.reason} for kept in done.kept
            ],
            "left_out": list(done.left_out),
            "bytes_before": done.bytes_before,
            "bytes_after": done.bytes_after,
        }
        output.print_json(values)
        return
    screen = output.console()
    screen.print(
        f"[bold]{done.plan.model}[/]: {len(done.exported)} of {done.plan.summary()['gemms']} GEMM "
        f"modules in FP8 ({done.format}), "
        f"{output.percent(share)} of the parameters; {output.count(done.bytes_before)}B of weights "
        f"became {output.count(done.bytes_after)}B"
    )
    screen.print("In high precision:")
    screen.print(_table(done))
    if done.left_out:
        screen.print(f"Not copied: {', '.join(done.left_out)}", markup=False)
    screen.print(f"Wrote {done.out}", markup=False)


def _table(done: "ExportedDirectory") -> Any:
    """A row for modules that differ in the numbers of their path alone, with their reason."""
    from rich.markup import escape
    from rich.table import Table

    rows = Counter((_NUMBER.sub("*", k.path), k.code, _generic(k.reason)) for k in done.kept)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 1))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for (path, code, reason), times in rows.items():
        table.add_row(
            escape(path or "(root)"), f"x{times}" if times > 1 else "", code, escape(reason)
        )
    return table


def _generic(reason: str) -> str:
    """With the numbers taken out of the paths in it."""
    return " ".join(_NUMBER.sub("*", word) if "." in word else word for word in reason.split(" "))
