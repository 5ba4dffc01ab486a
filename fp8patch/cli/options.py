"""Options that several commands share: one spelling and one help text for each."""

import math
from typing import Annotated

import typer


def finite(value: float | None) -> float | None:
    """A callback: what typer calls a float may be nan, which is no less than any minimum."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a number to compare with.")
    return value


RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="Built-in recipe, or a YAML file.")]
Only = Annotated[list[str] | None, typer.Option(help="Convert only what matches. Repeatable.")]
Skip = Annotated[list[str] | None, typer.Option(help="Never convert what matches. Repeatable.")]
Include = Annotated[
    list[str] | None,
    typer.Option(help="Convert heads, routers and slow layers that match. Repeatable."),
]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens in a step (M), for the predicted gain.")]
GpuName = Annotated[
    str, typer.Option(help="h100, h200, l4, rtx4090, b200; auto is this machine's.")
]
