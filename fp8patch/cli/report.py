"""`fp8patch report`: a page of one or several runs, and a picture of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

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
    png: Annotated[
        Path | None, typer.Option("--png", help="A picture of it too, drawn with matplotlib.")
    ] = None,
) -> None:
    """Write one HTML page of a run: loss, step time, every layer over time, what is not in FP8.

    The page is a single file that loads nothing from anywhere.
    """
    if out.suffix.lower() == ".png":
        raise typer.BadParameter(
            f"{out}: is to be a page, in HTML. --png {out} writes a picture beside it.",
            param_hint="'--out' / '-o'",
        )
    if png is not None and png.suffix.lower() != ".png":
        raise typer.BadParameter(f"{png}: a picture's name ends in .png.", param_hint="'--png'")
    from fp8patch.inspect.source import read_source
    from fp8patch.report_data import check_runs, drawing
    from fp8patch.report_page import MARK, page

    sources = [read_source(path) for path in runs]
    check_runs(sources, _MOST_RUNS)
    drawn = drawing(sources)
    text = page(sources, drawn)
    # A name that is no text is shown with a "?", in the page alone.
    _write(
        out.expanduser(),
        lambda file: file.write_text(text, encoding="utf-8", errors="replace"),
        MARK.encode(),
        "page",
    )
    typer.echo(f"Wrote {out}")
    if png is not None:
        from fp8patch import report_picture

        _write(
            png.expanduser(),
            lambda file: report_picture.save_picture(sources, drawn, file),
            report_picture.MARK,
            "picture",
        )
        typer.echo(f"Wrote {png}")


def _write(path: Path, write: Callable[[Path], Any], mark: bytes, what: str) -> None:
    """Replace a file of ours, which `mark` tells, or make a new one; in one piece.

    Raises:
        Fp8PatchError: It can't be written there, or what is there is something else.
    """
    from fp8patch.errors import Fp8PatchError
    from fp8patch.output_files import holds, publish

    def write_ours(partial: Path) -> None:
        if path.exists() and not (path.is_file() and holds(path, mark)):
            raise Fp8PatchError(
                f"{path}: exists, and is no {what} of ours. Name another, or remove it."
            )
        write(partial)

    publish(path, write_ours)
