"""`fp8patch recipes`: list the built-in recipes, show one, check a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fp8patch.plan.types import Plan
    from fp8patch.recipe import Recipe
    from fp8patch.recipe_facts import Facts
    from fp8patch.roofline import Gpu

__all__ = ["GROUP", "check", "recipes", "show"]

# How `fp8patch.cli` makes a command of this module: one with commands of its own.
GROUP = typer.Typer(add_completion=False, rich_markup_mode=None, invoke_without_command=True)

# What is assumed where nobody names a GPU: asking PyTorch for this machine's takes a second.
_GPU = "h100"
_GpuName = Annotated[
    str, typer.Option("--gpu", help="For the predicted gain: h100, h200, l4, rtx4090, b200, auto.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="The same as JSON.")]


@GROUP.callback()
def recipes(ctx: typer.Context, gpu: _GpuName = _GPU, as_json: _AsJson = False) -> None:
    """List the built-in recipes, with what each needs and costs; show one; check a file."""
    if ctx.invoked_subcommand is not None:
        if as_json or gpu != _GPU:
            raise typer.BadParameter(f"give options after {ctx.invoked_subcommand!r}, not before.")
        return
    from fp8patch.cli import output
    from fp8patch.cli.columns import fitting, left_out
    from fp8patch.recipe import Recipe, builtin_names, describe
    from fp8patch.recipe_facts import SIZE, facts_of
    from fp8patch.roofline import resolve_gpu

    figures = resolve_gpu(gpu)
    found = [(Recipe.load(name), describe(name)) for name in builtin_names()]
    facts = {recipe.name: facts_of(recipe, figures) for recipe, _ in found}
    if as_json:
        listed = [_entry(recipe, text, facts[recipe.name]) for recipe, text in found]
        output.print_json({"gpu": None if figures is None else figures.label, "recipes": listed})
        return
    screen = output.console()
    names = ["recipe", "needs", "reads a cast", "FP8 GEMMs", "predicted", ""]
    rows = []
    for recipe, text in found:
        mark = " (default)" if recipe == Recipe() else ""
        rows.append([f"{recipe.name}{mark}", *_cells(facts[recipe.name]), text])
    # Of the gaps between columns, which are wider here, the room for the rest of each.
    room = screen.width - len(names)
    shown = fitting(names, rows, ["", "reads a cast", "FP8 GEMMs", "predicted"], room)
    table = _table(*(names[at] for at in shown))
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    screen.print(table)
    if len(shown) < len(names):
        screen.print()
        for recipe, text in found:
            screen.print(f"{recipe.name}: {text}")
        if said := left_out(names[:-1], rows, shown):
            screen.print(said)
    screen.print(
        f"\nneeds: compute capability. reads a cast: how often an activation is read for it. "
        f"predicted: over BF16, {_predicted_for(figures)}, one layer of {SIZE}x{SIZE} at M={SIZE}."
    )
    screen.print("`fp8patch recipes show NAME > mine.yaml` starts a recipe of your own.")


@GROUP.command()
def show(
    name: Annotated[str, typer.Argument(help="Built-in recipe, or a YAML file.")],
    as_json: _AsJson = False,
) -> None:
    """Print a recipe as a file that says every field, with what differs from the default."""
    from fp8patch.cli import output
    from fp8patch.recipe import Recipe, builtin_names, describe
    from fp8patch.recipe_facts import facts_of, to_yaml

    recipe = Recipe.load(name)
    text = describe(name) if name in builtin_names() else ""
    if as_json:
        output.print_json(_entry(recipe, text, facts_of(recipe, None)))
        return
    head = f"description: {text}\n" if text else ""
    typer.echo(f"{head}{to_yaml(recipe)}", nl=False)


@GROUP.command()
def check(
    file: Annotated[Path, typer.Argument(help="Recipe file.")],
    model: Annotated[
        str | None,
        typer.Option(help="Also plan this model with it: are its patterns those of a layer?"),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Check a recipe file: every field, every value, and with --model every pattern."""
    from fp8patch.cli import output
    from fp8patch.recipe import Recipe
    from fp8patch.recipe_facts import differences, facts_of, layers_of

    recipe = Recipe.load(file)
    plan = None
    if model is not None:
        from fp8patch.cli.plan import make_plan

        plan = make_plan(model, recipe)
    layers = {pattern: facts_of(layer, None) for pattern, layer in layers_of(recipe).items()}
    needs = max((facts.needs for facts in layers.values() if facts.needs), default=None)
    changed = differences(recipe, Recipe())
    if as_json:
        output.print_json(
            {
                "file": str(file),
                **_entry(recipe, "", layers[""]),
                "needs": _needs(needs),
                "differs": {field: mine for field, (mine, _) in changed.items()},
                "overrides": _layers(recipe, layers, plan),
                "plan": None if plan is None else plan.summary(),
            }
        )
        return
    screen = output.console()
    screen.print(f"{file}: valid, needs compute capability {_needs(needs)}.", markup=False)
    for field, (mine, usual) in changed.items():
        if field != "overrides":
            screen.print(f"  {field}: {mine}  (delayed: {usual})", markup=False)
    for override in recipe.overrides:
        hit = "" if plan is None else f"  ({_hits(plan, override.pattern)})"
        screen.print(f'  override "{override.pattern}": {override}{hit}', markup=False)
    if not changed:
        screen.print("  The same as the default, delayed.")
    if plan is not None:
        from fp8patch.cli.plan import foot, reasons

        screen.print(foot(plan)[0].strip())
        if not plan.summary()["converted_gemms"]:
            for line in reasons(plan):
                screen.print(line)


def _entry(recipe: "Recipe", text: str, facts: "Facts") -> dict[str, Any]:
    return {
        "description": text,
        "needs": _needs(facts.needs),
        "fp8_gemms": list(facts.gemms),
        "reads_a_cast": facts.reads,
        "history_bytes_a_tensor": facts.history_bytes,
        "predicted_gain": facts.gain,
        "recipe": recipe.to_dict(),
    }


def _layers(recipe: "Recipe", layers: dict[str, "Facts"], plan: "Plan | None") -> list[Any]:
    return [
        {
            "pattern": override.pattern,
            "changes": dict(override.changes),
            "needs": _needs(layers[override.pattern].needs),
            "modules": None if plan is None else _matched(plan, override.pattern),
        }
        for override in recipe.overrides
    ]


def _matched(plan: "Plan", pattern: str) -> list[str]:
    return [decision.path for decision in plan.decisions if pattern in decision.overrides]


def _hits(plan: "Plan", pattern: str) -> str:
    number = len(_matched(plan, pattern))
    return f"{number} {'module' if number == 1 else 'modules'}"


def _needs(capability: tuple[int, int] | None) -> str | None:
    return None if capability is None else f"{capability[0]}.{capability[1]}"


def _cells(facts: "Facts") -> tuple[str, str, str, str]:
    gain = "" if facts.gain is None else f"{facts.gain:.2f}x"
    return _needs(facts.needs) or "-", str(facts.reads), " ".join(facts.gemms), gain


def _predicted_for(gpu: "Gpu | None") -> str:
    return "for no GPU of the table" if gpu is None else f"for {gpu.label}"


def _table(*names: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=name != "", justify="left")
    return table
