"""`fp8patch plan`: what of a model would run in FP8, on the meta device."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp8patch.cli.options import GpuName, Include, Only, RecipeName, Skip, Tokens, finite

if TYPE_CHECKING:
    from rich.console import Console

    from fp8patch.plan.types import Decision, Group, Plan
    from fp8patch.recipe import Recipe

__all__ = ["foot", "make_plan", "plan", "reasons", "show"]

# What a plan asks for when neither the flag nor the recipe says: nothing that gets slower.
_MIN_GAIN = 1.0
# Room for the columns beside the path, with a shape such as 128256 x 8192; and where a terminal is
# so narrow that some of them go, the first ones first, for a path itself.
_OTHER_COLUMNS = 53
_PATH = 24
_FIRST_TO_GO = ("params", "N x K", "FLOPs", "gain")


def plan(
    model: Annotated[str, typer.Argument(help="Model directory, config.json, or hub name.")],
    recipe: RecipeName = "delayed",
    only: Only = None,
    skip: Skip = None,
    include: Include = None,
    tokens: Tokens = 4096,
    gpu: GpuName = "auto",
    min_gain: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=finite,
            help="Skip layers predicted below it.  [default: recipe's, else 1]",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="One row a module, not a block.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole plan as JSON.")] = False,
) -> None:
    """What of a model would run in FP8, and why not more; reads no weights.

    Patterns are globs over module paths, such as "*.mlp.*"; "model.layers.0" is all of block 0.
    A layer's gain is its own; a whole step's is told in eager, as train runs, and compiled.
    """
    from fp8patch.recipe import Recipe
    from fp8patch.roofline import resolve_gpu

    # Both can fail, and in no time: before torch and transformers are loaded.
    loaded = Recipe.load(recipe)
    figures = resolve_gpu(gpu)
    made = make_plan(
        model,
        loaded,
        only=only or (),
        skip=skip or (),
        include=include or (),
        tokens=tokens,
        gpu=None if figures is None else figures.name,
        min_gain=min_gain,
    )
    label = "an unknown GPU: no gain predicted" if figures is None else figures.label

    from fp8patch.cli import output
    from fp8patch.plan.step import step_gains

    if as_json:
        summary = {**made.summary(), "step_gain": step_gains(made)}
        output.print_json(
            {"source": model, "gpu_label": label, **made.to_dict(), "summary": summary}
        )
    else:
        show(made, output.console(), gpu=label, every=every)


def make_plan(
    model: str, recipe: "Recipe", *, min_gain: float | None = None, **options: Any
) -> "Plan":
    """The plan of what `model` names, without its weights; `options` are those of `plan_model`.

    Raises:
        CheckpointError: There is no such model.
        PlanError: It can't be planned, or has nothing to plan.
    """
    from transformers.utils import logging

    from fp8patch.checkpoint.skeleton import model_from_config
    from fp8patch.errors import PlanError
    from fp8patch.plan.model import plan_model

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if min_gain is None:
        min_gain = _MIN_GAIN if recipe.min_gain is None else recipe.min_gain
    skeleton = model_from_config(model)
    made = plan_model(skeleton, recipe, min_gain=min_gain, meta=True, **options)
    if not made.decisions:
        raise PlanError(
            f"{model}: nothing to plan: the {made.model} that this config builds has "
            f"{made.params} parameters, and no Linear, Conv1D, norm or expert. Check its sizes."
        )
    return made


def show(plan: "Plan", screen: "Console", *, gpu: str, every: bool = False) -> None:
    """Print `plan` as a table: a row for each group of repeated modules, or for each module."""
    from rich.markup import escape

    from fp8patch.cli.output import count

    recipe = escape(plan.recipe.name)
    screen.print(
        f"[bold]{plan.model}[/]  {count(plan.params)} parameters, recipe {recipe}\n"
        f"Gain predicted for {gpu}, M={plan.tokens} tokens\n"
    )
    screen.print(_table(_rows(plan, every), screen.width))
    screen.print()
    for line in reasons(plan):
        screen.print(line)
    for line in _overrides(plan):
        screen.print(line, markup=False)
    for line in foot(plan):
        screen.print(line)


def _overrides(plan: "Plan") -> list[str]:
    """What each override changes, and for how many modules."""
    lines = []
    for override in plan.recipe.overrides:
        chosen = [d for d in plan.decisions if override.pattern in d.overrides]
        used = sum(d.action == "convert" for d in chosen)
        number = f"{len(chosen)}, {used} in FP8"
        lines.append(f'override "{override.pattern}" ({number}): {override}')
    return lines


def _rows(plan: "Plan", every: bool) -> list["Group"]:
    from fp8patch.plan.types import Group

    if not every:
        return plan.groups()
    return [Group(d.path, 1, d, d.params, d.param_share, d.flops_share) for d in plan.decisions]


def _table(groups: list["Group"], width: int) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from fp8patch.cli.columns import fitting, left_out

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    names = ["module", "", "N x K", "params", "FLOPs", "gain", "decision"]
    cells = [["-" * _PATH, *_cells(group)] for group in groups]
    shown = list(range(len(names)))
    others = _OTHER_COLUMNS
    if others + _PATH > width:
        shown = fitting(names, cells, _FIRST_TO_GO, width)
        others = width - _PATH
        table.caption = escape(left_out(names, cells, shown)) or None
        table.caption_justify, table.caption_style = "left", "dim"
    # Paths fold when the terminal is too narrow; every other column is short, and stays whole.
    for at in shown:
        left = at in (0, len(names) - 1)
        table.add_column(
            names[at], justify="left" if left else "right", overflow="fold", no_wrap=at > 0
        )
    # Whole paths where they fit (and in a pipe, for grep); else each block's name on a line above.
    nested = max((len(group.path) for group in groups), default=0) + others > width
    block = ""
    for group, row in zip(groups, cells, strict=True):
        above, name = _split(group.path, width - others) if nested else ("", group.path)
        if above != block and above:
            table.add_row(f"[dim]{escape(above)}[/]")
        block = above
        row[0] = escape(f"  {name}" if above else name or "(root)")
        table.add_row(*(row[at] for at in shown))
    return table


def _cells(group: "Group") -> list[str]:
    """All columns of a row but its first."""
    from fp8patch.cli.output import percent

    first = group.first
    return [
        f"x{group.count}" if group.count > 1 else "",
        _shape(first),
        percent(group.param_share),
        percent(group.flops_share) if group.flops_share else "",
        "" if first.gain is None else f"{first.gain:.2f}x",
        _decision(first),
    ]


def _split(path: str, room: int) -> tuple[str, str]:
    """A path as the block it is in and the rest: ("model.layers.*", "mlp.up_proj").

    What is in no repeated block is split at its last dot, if it would not fit.
    """
    parts = path.split(".")
    for at in range(len(parts) - 1, 0, -1):
        if parts[at - 1][0] in "*{" or parts[at - 1].isdigit():
            return ".".join(parts[:at]), ".".join(parts[at:])
    above, _, name = path.rpartition(".")
    return (above, name) if len(path) > room else ("", path)


def _shape(decision: "Decision") -> str:
    from fp8patch.plan.types import NORM_KINDS

    if decision.kind in NORM_KINDS:
        return str(decision.out_features)
    return f"{decision.out_features} x {decision.in_features}"


def _decision(decision: "Decision") -> str:
    if decision.action == "skip":
        return f"[yellow]{decision.code}[/]"
    from fp8patch.plan.types import NORM_KINDS

    # A norm keeps its arithmetic; it is converted for the output that it makes.
    what = "norm" if decision.kind in NORM_KINDS else "FP8"
    if decision.overrides:
        return f"[green]{what}[/] override"
    return f"[green]{what}[/]" if decision.code == "ok" else f"[green]{what}[/] {decision.code}"


def reasons(plan: "Plan") -> list[str]:
    """Each sentence on a skip once, with the number of modules that it is said of, with markup.

    What a row of the table shows (its sizes, its gain) is not said again below it.
    """
    from rich.markup import escape

    times = Counter((d.code, _below(d, plan)) for d in plan.decisions if d.action == "skip")
    return [f"[yellow]{code}[/] ({n}): {escape(text)}" for (code, text), n in times.items()]


def _below(decision: "Decision", plan: "Plan") -> str:
    from fp8patch.plan.types import CODES

    if decision.code == "slower":
        return f"predicted below --min-gain {plan.min_gain:g}; --min-gain 0 converts them"
    if decision.code == "misaligned":
        return f'{CODES["misaligned"]}: N and K in multiples of 16; "misaligned: pad" pads them'
    return decision.reason


def foot(plan: "Plan") -> list[str]:
    """What a plan comes to, in sentences with markup; the first two are its headline."""
    from fp8patch.cli.output import percent
    from fp8patch.plan.step import step_gains

    total = plan.summary()
    if not total["converted_gemms"]:
        lines = ["\n[bold]No GEMM would run in FP8.[/]"]
        if "slower" in total["codes"] and plan.recipe.min_gain is None:
            lines.append(
                "`fp8patch convert` and the Python API convert what is predicted to be slower "
                "all the same: there min_gain is 0, unless --min-gain (min_gain=) says otherwise."
            )
        return lines
    lines = [
        f"\n[bold]In FP8: {total['converted_gemms']} of {total['gemms']} GEMM modules, "
        f"{percent(total['param_share'])} of the parameters, "
        f"{percent(total['flops_share'])} of the GEMM FLOPs.[/]"
    ]
    if total["gemm_gain"] is not None:
        lines.append(
            f"[bold]Predicted: {total['gemm_gain']:.2f}x[/] over BF16 on all GEMMs of a step "
            f"together, those that stay in BF16 included."
        )
    if (whole := step_gains(plan)) is not None:
        lines.append(
            f"A whole step with AdamW: {whole['eager']:.2f}x in eager, as `train` runs by default, "
            f"{whole['compiled']:.2f}x with --compile or --cuda-graphs; each over BF16 run that "
            "way too, GPU time alone."
        )
    lines.append(
        "FLOPs are static: each module called once a step, 2MNK; the products inside attention "
        "are not counted."
    )
    return lines
