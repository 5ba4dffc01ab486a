"""A progress bar on stderr, where somebody looks at it."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fp8patch.checkpoint.files import Progress as Callback
from fp8patch.cli.output import progress_console

__all__ = ["progress_bar"]

_TITLES = {
    "copy": "copying files",
    "weights": "weight scales",
    "calibrate": "calibrating",
    "export": "quantising",
}


@contextmanager
def progress_bar() -> Iterator[Callback]:
    """A callback for `convert_directory`: a bar a stage. It draws nothing unless on a terminal."""
    console = progress_console()
    bar = Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    tasks = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(_TITLES.get(stage, stage), total=total)
        bar.update(tasks[stage], completed=done)

    with bar:
        yield show
