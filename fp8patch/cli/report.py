"""`fp8patch report`: a page of one or several runs."""

import os
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]

# Colours that can be told apart.
_MOST_RUNS = 6


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Files of `train --report`: the run, then others beside it, such as BF16's.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page of a run: loss, step time, every layer over time, what is not in FP8.

    The page is a single file that loads nothing from anywhere.
    """
    from fp8patch.inspect_source import read_source
    from fp8patch.report_data import check_runs
    from fp8patch.report_page import page

    sources = [read_source(path) for path in runs]
    check_runs(sources, _MOST_RUNS)
    _write(out.expanduser(), page(sources))
    typer.echo(f"Wrote {out}")


def _write(path: Path, text: str) -> None:
    """Replace a page of ours, or make a new one; in one piece.

    Raises:
        Fp8PatchError: It can't be written there, or what is there is something else.
    """
    from fp8patch.errors import Fp8PatchError
    from fp8patch.report_page import MARK

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists():
            with path.open("rb") as file:
                if file.read(len(MARK)) != MARK.encode():
                    raise Fp8PatchError(
                        f"{path}: exists, and is no page of ours. Name another, or remove it."
                    )
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise Fp8PatchError(f"{path}: cannot be written: {error.strerror}.") from None
    finally:
        temporary.unlink(missing_ok=True)
