"""`fp8patch demo`: the whole story on a tiny model, on any machine, in under a minute."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from fp8patch.demo import DemoResult
    from fp8patch.demo_model import Progress, Training

__all__ = ["demo", "show"]

# Enough for either precision to learn the task.
_STEPS = 200


def demo(
    steps: Annotated[
        int, typer.Option(min=1, help="Training steps, in BF16 and then in FP8.")
    ] = _STEPS,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, batches and held-out prompts.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Leave the checkpoint in this new directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON.")] = False,
) -> None:
    """Train a tiny language model in BF16 and in FP8, save it, reload it, let it generate.

    Exits with 1, and names the check, unless everything holds. Writes to a temporary directory.
    """
    from fp8patch.cli import output

    with _progress() as report:
        from transformers.utils import logging

        from fp8patch.demo import run

        # The demo has bars of its own, and checks what transformers would warn of.
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        result = run(steps=steps, seed=seed, keep=keep, progress=report)
    if as_json:
        output.print_json(result.to_dict())
    else:
        show(result, output.console(), keep=keep)
    if result.failed:
        failed = "; ".join(f"{check.name}: {check.detail}" for check in result.failed)
        hint = f" It takes about {_STEPS} steps to learn." if steps < _STEPS else ""
        typer.echo(f"fp8patch: demo failed: {failed}.{hint}", err=True)
        raise typer.Exit(1)


def show(result: "DemoResult", screen: "Console", *, keep: Path | None = None) -> None:
    """Print what the demo found."""
    from rich.markup import escape

    emulated = result.execution == "emulate"
    screen.print(f"[bold]Hardware[/]  {escape(_hardware(result))}")
    if emulated:
        screen.print("FP8 is emulated here: the same rounding as on a GPU, and no speed.")
    screen.print(
        f"[bold]Task[/]  next token = previous + constant step, modulo {result.vocabulary}; "
        f"{result.steps} steps from seed {result.seed}\n"
    )
    screen.print(_figures(result))
    if result.bf16.peak_bytes is None and result.process_peak_bytes is not None:
        screen.print(
            f"Peak memory: {_bytes(result.process_peak_bytes)} resident, the whole process with "
            "PyTorch and both runs; a run's own can be told on CUDA only."
        )
    screen.print("\n[bold]FP8 scales after training[/], of some modules; amax is the last step's")
    screen.print(_slots(result))
    prompt, continuation = (" ".join(map(str, tokens)) for tokens in result.example)
    screen.print(f"\n[bold]Generated in FP8[/]  {prompt} [dim]->[/] [green]{continuation}[/]")
    where = escape(str(keep)) if keep else "a temporary directory, removed (--keep DIR leaves it)"
    screen.print(f"[bold]Checkpoint[/]  {', '.join(result.checkpoint_files)} in {where}\n")
    for check in result.checks:
        mark = "[green]ok[/]    " if check.passed else "[red]FAILED[/]"
        screen.print(f"{mark}  {check.name}: {escape(check.detail)}")
    verdict = "[red]failed[/]" if result.failed else "[green]All checks passed[/]"
    screen.print(f"\n{verdict} in {result.seconds:.0f} s.")


def _hardware(result: "DemoResult") -> str:
    hardware = result.hardware
    if hardware.device_type == "cpu":
        return f"CPU, one thread. {hardware.reason}"
    return hardware.reason


def _figures(result: "DemoResult") -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(f"{result.model}, {result.parameters:,} parameters")
    table.add_column("BF16", justify="right")
    table.add_column("FP8" if result.execution == "fp8" else "FP8 (emulated)", justify="right")

    def row(name: str, value: Any) -> None:
        table.add_row(name, value(result.bf16), value(result.fp8))

    def generated(training: "Training") -> str:
        return f"{training.generated_right} of {result.held_out}"

    row(f"final loss (chance: {result.chance_loss:.3f})", lambda t: f"{t.final_loss:.4f}")
    row("held-out prompts continued right", generated)
    row("step time", lambda t: f"{t.step_ms:.1f} ms")
    if result.fp8.peak_bytes is not None:
        row("peak memory (CUDA, reserved)", lambda t: _bytes(t.peak_bytes))
    table.add_row("modules run in FP8", "0", f"{result.in_fp8} of {result.converted} converted")
    table.add_row("calls in FP8", "0", f"{result.fp8_calls:,}")
    return table


def _slots(result: "DemoResult") -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("module", "tensor"):
        table.add_column(name)
    for name in ("amax", "scale"):
        table.add_column(name, justify="right", no_wrap=True)
    above = ""
    for slot in result.slots:
        path = "" if slot.path == above else slot.path
        table.add_row(path, slot.role, f"{slot.amax:.3g}", f"{slot.scale:.4g}")
        above = slot.path
    return table


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


@contextmanager
def _progress() -> Iterator["Progress"]:
    """Bars on stderr, one a stage; nothing where stderr is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from fp8patch.cli.output import progress_console

    screen = progress_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen, disable=not sys.stderr.isatty()) as bars:
        loading = bars.add_task("Loading PyTorch and transformers", total=None, said="")
        known = {}

        def report(what: str, done: int, total: int, said: str) -> None:
            if what not in known:
                bars.update(loading, total=1, completed=1)
                known[what] = bars.add_task(what, total=total, said=said)
            bars.update(known[what], completed=done, said=said)

        yield report
