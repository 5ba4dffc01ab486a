"""How commands print: tables that fit a terminal, and whole lines where there is none."""

import json
import math
import os
from typing import IO, Any

import typer
from rich.console import Console

__all__ = ["console", "count", "percent", "print_json", "progress_console"]

# Nothing is cut or wrapped where nobody looks at a screen: a pipe, a file, a CI log.
_PIPE_WIDTH = 10_000


class _Console(Console):
    """One whose reader may leave: rich would exit with 1, and the command line says 141."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(file: IO[str] | None = None, *, width: int | None = None) -> Console:
    """A console for results: stdout, in the terminal's width and colours if it is one."""
    screen = _make(file=file, width=width)
    if width is None and not screen.is_terminal:
        screen = _make(file=file, width=_PIPE_WIDTH)
    return screen


def progress_console() -> Console:
    """A console for progress: stderr."""
    return _make(stderr=True)


def _make(**options: Any) -> Console:
    # rich drops colours for NO_COLOR, and keeps bold and dim. Who asks for none means plain text.
    system = None if os.environ.get("NO_COLOR") else "auto"
    return _Console(color_system=system, highlight=False, soft_wrap=False, **options)  # type: ignore[arg-type]


def print_json(values: dict[str, Any]) -> None:
    """`values` on stdout, and nothing else; null for inf and nan, which JSON does not have."""
    typer.echo(json.dumps(_finite(values), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def percent(share: float) -> str:
    """0.9652 as "96.5%"; what is not nothing does not look like nothing."""
    return "<0.1%" if 0 < share < 0.0005 else f"{100 * share:.1f}%"


def count(number: int) -> str:
    """70553706496 as "70.6B"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
