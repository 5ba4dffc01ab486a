"""How commands print: tables that fit a terminal, and whole lines where there is none."""

import json
from typing import IO, Any

import typer
from rich.console import Console

__all__ = ["console", "count", "percent", "print_json"]

# Nothing is cut or wrapped where nobody looks at a screen: a pipe, a file, a CI log.
_PIPE_WIDTH = 10_000


def console(file: IO[str] | None = None, *, width: int | None = None) -> Console:
    """A console for results: stdout, in the terminal's width and colours if it is one."""
    screen = Console(file=file, highlight=False, soft_wrap=False, width=width)
    if width is None and not screen.is_terminal:
        screen = Console(file=file, highlight=False, soft_wrap=False, width=_PIPE_WIDTH)
    return screen


def print_json(values: dict[str, Any]) -> None:
    """`values` on stdout, and nothing else."""
    typer.echo(json.dumps(values, indent=2))


def percent(share: float) -> str:
    """0.9652 as "96.5%"; what is not nothing does not look like nothing."""
    return "<0.1%" if 0 < share < 0.0005 else f"{100 * share:.1f}%"


def count(number: int) -> str:
    """70553706496 as "70.6B"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
