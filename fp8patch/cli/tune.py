"""`fp8patch tune`: the recipe that a run's report advises, as a file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fp8patch.inspect.tune import Tuned

__all__ = ["tune"]

# Reasons that a screen is shown; the file has all.
_MOST_SHOWN = 8


def tune(
    report: Annotated[Path, typer.Argument(help="File of `train --report`.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The recipe to write.")] = Path(
        "recipe.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="What would be written, as JSON; writes nothing.")
    ] = False,
) -> None:
    """Write the recipe that helps a run: its own, with overrides for layers that lose too much.

    Each new override has a comment that says why. Nothing is written where nothing helps.
    """
    from fp8patch.cli import output
    from fp8patch.inspect.source import read_source
    from fp8patch.inspect.tune import recipe_file
    from fp8patch.inspect.tune import tune as tuned_by

    tuned = tuned_by(read_source(report))
    out = out.expanduser()
    text = recipe_file(tuned, out.stem) if tuned.reasons else None
    if as_json:
        output.print_json(
            {
                "report": str(report),
                "out": str(out),
                "changed": text is not None,
                "recipe": tuned.recipe.to_dict(),
                "reasons": dict(tuned.reasons),
                "helpless": list(tuned.helpless),
                "text": text,
            }
        )
        return
    for said in tuned.helpless:
        typer.echo(f"{said}; no recipe helps that.")
    if text is None:
        why = "" if tuned.helpless else ": no layer loses more than runs do that train well"
        typer.echo(f"{report}: nothing to change{why}.")
        return
    _write(out, text, report, force=force)
    _show(tuned, out)


def _show(tuned: "Tuned", out: Path) -> None:
    from fp8patch.recipe_overrides import PRECISIONS

    for pattern, why in list(tuned.reasons.items())[:_MOST_SHOWN]:
        (override,) = [each for each in tuned.recipe.overrides if each.pattern == pattern]
        precise = dict.fromkeys(PRECISIONS, "bf16").items() <= dict(override.changes).items()
        typer.echo(f"{pattern}: {'BF16' if precise else 'scaling: rowwise'}, as {why}.")
    if len(tuned.reasons) > _MOST_SHOWN:
        typer.echo(f"... and {len(tuned.reasons) - _MOST_SHOWN} more.")
    if any(dict(each.changes).get("scaling") == "rowwise" for each in tuned.recipe.overrides):
        typer.echo("rowwise needs compute capability 9.0; on 8.9, write scaling: current instead.")
    typer.echo(f"Wrote {out}")


def _write(path: Path, text: str, report: Path, *, force: bool) -> None:
    """In one piece, under its name at the end.

    Raises:
        Fp8PatchError: It can't be written there, or something is there.
    """
    from fp8patch.errors import RecipeError
    from fp8patch.output_files import publish

    try:
        if path.is_dir():
            raise RecipeError(f"{path}: is a folder. Name a file.")
        if path.exists() and path.samefile(report.expanduser()):
            raise RecipeError(f"{path}: is the report itself. Name another file.")
        if os.path.lexists(path) and not force:
            raise RecipeError(f"{path}: exists already. Name another, or replace it with --force.")
    except OSError as error:
        raise RecipeError(f"{path}: cannot be written: {error.strerror}.") from None
    # A name that is no text is shown with a "?", in a comment alone.
    publish(path, lambda partial: partial.write_text(text, encoding="utf-8", errors="replace"))
