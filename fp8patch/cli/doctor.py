"""`fp8patch doctor`: what this machine runs in FP8, tested, and what stands in the way."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8patch.cli.options import RecipeName

if TYPE_CHECKING:
    from rich.console import Console

    from fp8patch.doctor.examine import Examination
    from fp8patch.doctor.types import GemmTest, Outcome
    from fp8patch.plan.types import Plan

__all__ = ["doctor", "show"]

_LAYER = "one layer of 4096x4096 at M=4096"
_OK, _BAD = "[green]ok[/]", "[red]FAILED[/]"


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="Model directory, config.json, or hub name: also plan it."),
    ] = None,
    recipe: RecipeName = "delayed",
    as_json: Annotated[bool, typer.Option("--json", help="All findings as JSON.")] = False,
) -> None:
    """Test what this machine runs in FP8, and say what would be used and what stands in the way.

    Exits with 1 only when nothing can run, not even emulated.
    """
    from fp8patch.recipe import Recipe

    loaded = Recipe.load(recipe)
    # A mistake in MODEL is found before anything is tested.
    plan = None if model is None else _plan(model, loaded)

    from fp8patch.cli import output
    from fp8patch.doctor.examine import examine

    with _status() as stage:
        found = examine(loaded, stage=stage)
    if as_json:
        summary = None if plan is None else {"source": model, **_facts(plan)}
        output.print_json({**found.to_dict(), "model": summary})
    else:
        show(found, output.console(), plan=plan, model=model)
    if not found.usable:
        raise typer.Exit(1)


def _plan(model: str, recipe: Any) -> "Plan | None":
    """The plan of `model`; None where torch or transformers can't be imported, as the rest says."""
    try:
        import torch  # noqa: F401
        from transformers.utils import logging  # noqa: F401
    except Exception:
        return None
    from fp8patch.cli.plan import make_plan

    return make_plan(model, recipe)


def _facts(plan: "Plan") -> dict[str, Any]:
    return {"model": plan.model, "params": plan.params, "gpu": plan.gpu, **plan.summary()}


def show(
    found: "Examination",
    screen: "Console",
    *,
    plan: "Plan | None" = None,
    model: str | None = None,
) -> None:
    """Print the findings, the verdict last."""
    from rich.markup import escape

    _machine(found, screen)
    if found.gemms:
        screen.print(
            "\n[bold]FP8 GEMMs[/], against the FP64 product of the same FP8 values; last, that "
            "product against the one without rounding"
        )
        screen.print(_gemms(found))
        screen.print(f"\n[bold]Kernels[/]  {_casts(found)}")
    if found.advice is not None:
        where = found.advice.gpu or "an unknown GPU: no gain predicted"
        screen.print(f"\n[bold]Recipes[/], gain over BF16 predicted for {escape(where)}, {_LAYER}")
        screen.print(_recipes(found))
    _warnings(found, screen)
    if plan is not None:
        _headline(plan, screen, str(model))
    screen.print()
    for line in _verdict(found):
        screen.print(line, markup=False)


def _machine(found: "Examination", screen: "Console") -> None:
    from rich.markup import escape

    from fp8patch import __version__

    rows = [("fp8patch", f"{__version__}, Python {found.python}")]
    for gpu in found.gpus:
        major, minor = gpu.capability
        size = f"{gpu.memory / 2**30:.0f} GiB"
        rows.append((f"GPU {gpu.index}", f"{gpu.name}, compute capability {major}.{minor}, {size}"))
    if not found.gpus and found.hardware is not None:
        rows.append(("GPU", f"none that PyTorch can use. {found.hardware.reason}"))
    rows.append(("driver", found.driver or "no NVIDIA driver found"))
    if not found.torch_problem:
        rows.append(("CUDA", found.cuda or "none: this PyTorch is built without it"))
    for package in found.packages:
        # What is missing says so itself.
        said = [text for text in (package.version, package.problem) if text]
        rows.append((package.name, "  ".join(said)))
    screen.print(_pairs((f"[bold]{name}[/]", escape(text)) for name, text in rows))


def _gemms(found: "Examination") -> Any:
    table = _table("kind", "operands", "needs", "here", "emulated", "FP8 itself", right=(4, 5))
    capability = None if found.hardware is None else found.hardware.capability
    for test in found.gemms:
        major, minor = test.needs
        table.add_row(
            test.kind,
            test.operands,
            f"{major}.{minor}",
            _here(test, capability),
            _db(test.emulated),
            f"{test.rounding_db:.1f} dB",
        )
    return table


def _here(test: "GemmTest", capability: tuple[int, int] | None) -> str:
    """What came of it on the GPU; what no GPU of its kind runs is no failure."""
    if test.hardware is None:
        return "[dim]no GPU[/]"
    if not test.hardware.ok and not test.expected(capability):
        return "[yellow]not on this GPU[/]"
    return _db(test.hardware)


def _db(outcome: "Outcome") -> str:
    from rich.markup import escape

    if not outcome.ok:
        return f"{_BAD} {escape(outcome.detail)}"
    return f"{_OK} {outcome.db:.1f} dB"


def _casts(found: "Examination") -> str:
    from rich.markup import escape

    here = found.hardware is not None and found.hardware.fp8
    triton = any(package.name == "triton" and package.version for package in found.packages)
    how = "as Triton kernels" if here and triton else "as plain PyTorch"
    if not here:
        how += ", for the Triton kernels need a GPU with FP8"
    if all(test.outcome.ok for test in found.casts):
        names = ", ".join(test.name for test in found.casts)
        return f"{_OK}: {names}: equal to the oracle, {how}"
    wrong = [test for test in found.casts if not test.outcome.ok]
    listed = "; ".join(f"{test.name}: {escape(test.outcome.detail)}" for test in wrong)
    return f"{_BAD} {how}: {listed}"


def _recipes(found: "Examination") -> Any:
    from rich.markup import escape

    assert found.advice is not None
    table = _table("recipe", "runs", "predicted", "", right=(2,))
    used = found.advice.backend == "fp8"
    for row in found.advice.rows:
        runs = {"fp8": "[green]FP8[/]", "emulated": "emulated", "no": "[red]no[/]"}[row.runs]
        gain = "" if row.gain is None else f"{row.gain:.2f}x"
        mark = "used" if row.recipe == found.advice.recipe and used else ""
        table.add_row(escape(row.recipe), runs, gain, mark)
    return table


def _warnings(found: "Examination", screen: "Console") -> None:
    from rich.markup import escape

    if found.interference:
        screen.print("\n[bold]Settings that interfere[/]")
    for item in found.interference:
        screen.print(f"[yellow]{escape(item.name)}={escape(item.value)}[/]")
        screen.print(_sentences(("", item.effect), ("fix", item.fix)))
    if found.faults:
        screen.print("\n[bold]Faults of installed libraries[/], reproduced just now")
    for fault in found.faults:
        screen.print(f"[yellow]{escape(fault.libraries)}[/]")
        screen.print(
            _sentences(("", fault.fault), ("seen", fault.seen), ("instead", fault.way_around))
        )


def _headline(plan: "Plan", screen: "Console", model: str) -> None:
    from rich.markup import escape

    from fp8patch.cli.output import count
    from fp8patch.cli.plan import foot

    recipe = escape(plan.recipe.name)
    screen.print(f"\n[bold]{plan.model}[/]  {count(plan.params)} parameters, recipe {recipe}")
    for line in foot(plan)[:2]:
        screen.print(line.strip())
    screen.print(f"[dim]fp8patch plan {escape(model)}[/] lists every module with its reason.")


def _verdict(found: "Examination") -> list[str]:
    if found.torch_problem:
        return [
            f"Nothing can run: PyTorch can't be used ({found.torch_problem}). Install torch 2.11 "
            "or newer."
        ]
    assert found.advice is not None
    lines = list(found.advice.sentences)
    if found.driver and not found.cuda:
        lines.append("There is an NVIDIA driver: a PyTorch that is built for CUDA can use the GPU.")
    return lines


def _pairs(rows: Iterable[tuple[str, str]]) -> Any:
    """Names, and texts that wrap beside them."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column()
    for name, text in rows:
        grid.add_row(name, text)
    return grid


def _sentences(*rows: tuple[str, str]) -> Any:
    from rich.markup import escape

    return _pairs((name, f"{escape(text)}.") for name, text in rows)


def _table(*names: str, right: tuple[int, ...]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number in right else "left", overflow="fold")
    return table


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr, where somebody looks at it."""
    from fp8patch.cli.output import progress_console

    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with progress_console().status("starting") as line:
        yield lambda text: line.update(f"{text} …")
