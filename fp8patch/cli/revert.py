"""`fp8patch revert`: the plain checkpoint again."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["revert"]


def revert(
    model: Annotated[Path, typer.Argument(help="Patched model directory.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT, once the new one is complete.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Write the plain checkpoint again: every file but the two that fp8patch added, unchanged."""
    from fp8patch.checkpoint.stream import revert_directory
    from fp8patch.cli import output
    from fp8patch.cli.convert import killed_cleanly
    from fp8patch.cli.progress import progress_bar

    with killed_cleanly(), progress_bar() as progress:
        done = revert_directory(model, out, force=force, progress=progress)
    if as_json:
        output.print_json({"out": str(done)})
    else:
        output.console().print(f"Wrote {done}", markup=False)
