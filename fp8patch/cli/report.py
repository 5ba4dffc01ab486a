"""`fp8patch report`: a page of one or several runs."""

import errno
import os
from contextlib import suppress
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
    from fp8patch.inspect.source import read_source
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

    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not (path.is_file() and _starts_with(path, MARK)):
            raise Fp8PatchError(
                f"{path}: exists, and is no page of ours. Name another, or remove it."
            )
        # A name that is no text is shown with a "?", in the page alone.
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError as error:
        raise Fp8PatchError(f"{path}: cannot be written: {error.strerror}.") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _starts_with(path: Path, mark: str) -> bool:
    with path.open("rb") as file:
        return file.read(len(mark)) == mark.encode()
