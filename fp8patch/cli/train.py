"""`fp8patch train`: run any script, or any launcher, with FP8 in every process."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fp8patch.cli.options import Include, Only, RecipeName, Skip

__all__ = ["SETTINGS", "train"]

_AFTER_DASHES = "fp8patch.after_dashes"


class _Train(TyperCommand):
    """Keeps what the parser forgets: whether the first word came after a `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("words") or ()
        # Parsing stops at the first word, so the words are the end of what was given.
        before = len(given) - len(words) - 1
        ctx.meta[_AFTER_DASHES] = bool(words) and before >= 0 and given[before] == "--"
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "{SCRIPT | -- COMMAND}", "[ARGS]..."]


# How `fp8patch.cli` makes a command of the function below: options end at the first word, and what
# follows is the script's own.
SETTINGS: dict[str, Any] = {
    "cls": _Train,
    "context_settings": {"allow_interspersed_args": False},
}


def train(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT",
            help="The script, and its arguments; or, after --, a command such as torchrun.",
            show_default=False,
        ),
    ],
    fp8: Annotated[
        bool, typer.Option("--fp8", help="FP8, or a failure.  [default: where the GPU has it]")
    ] = False,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="The same rounding on any device, slowly.")
    ] = False,
    no_fp8: Annotated[bool, typer.Option("--no-fp8", help="BF16 autocast and no FP8.")] = False,
    off: Annotated[bool, typer.Option("--off", help="Change nothing at all.")] = False,
    recipe: RecipeName = "delayed",
    only: Only = None,
    skip: Skip = None,
    include: Include = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a step (M), for the gain.  [default: first batch]"),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine, through torchrun.")
    ] = None,
    roots: Annotated[
        list[str] | None,
        typer.Option(help="Also convert models of a matching class that do not train. Repeatable."),
    ] = None,
    compile_: Annotated[
        bool,
        typer.Option("--compile", help="Compile repeated blocks, each once, for training."),
    ] = False,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Compile them, and replay them as CUDA graphs.")
    ] = False,
    compat: Annotated[
        bool, typer.Option("--compat", help="Supply names that scripts of other versions expect.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write the summary as JSON, refreshed as the run goes on.")
    ] = None,
    log_every: Annotated[
        int,
        typer.Option(min=0, help="Say a line, and read every slot, each N steps; 0 says none."),
    ] = 0,
    track: Annotated[
        bool,
        typer.Option(
            "--track", help="Log what slots see to the script's Accelerate or Trainer trackers."
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Stop after the third step, and say what it would do.")
    ] = False,
) -> None:
    """Run a script as it is, with its model in FP8; or any launcher, after --.

    Everything from SCRIPT on is the script's own. Exit code and signals are the script's too, but
    for an exit code 0 under --fp8 or --emulate when nothing ran in FP8: that becomes 1.
    """
    flags = {"--fp8": fp8, "--emulate": emulate, "--no-fp8": no_fp8, "--off": off}
    chosen = [flag for flag, given in flags.items() if given]
    if len(chosen) > 1:
        raise typer.BadParameter(f"{' and '.join(chosen)} exclude each other: choose one.")
    if off and check:
        raise typer.BadParameter("--off changes nothing, so --check could not stop the script.")
    if off and (compile_ or cuda_graphs):
        raise typer.BadParameter("--off changes nothing, so nothing could be compiled.")
    after_dashes: bool = ctx.meta[_AFTER_DASHES]
    if after_dashes and nproc is not None:
        raise typer.BadParameter(
            f"--nproc {nproc} starts torchrun for a script; after -- the launcher has its own "
            f"option, such as torchrun --nproc-per-node {nproc}."
        )

    from fp8patch import launch
    from fp8patch.launch_signals import exit_as
    from fp8patch.messages import warn
    from fp8patch.train_options import TrainOptions

    if off and report is not None:
        warn(f"--off changes nothing at all, so nothing is measured for {report}.")
    if off and track:
        warn("--off changes nothing at all, so --track has nothing to log.")
    if off and compat:
        warn("--off changes nothing at all, so --compat supplies no names.")
    backends: dict[str, Any] = {"--fp8": "fp8", "--emulate": "emulate", "--no-fp8": "bf16"}
    options = TrainOptions(
        backend="off" if off else backends[chosen[0]] if chosen else "auto",
        recipe=_recipe(recipe),
        only=tuple(only or ()),
        skip=tuple(skip or ()),
        include=tuple(include or ()),
        tokens=tokens,
        roots=tuple(roots or ()),
        compile=compile_,
        cuda_graphs=cuda_graphs,
        compat=compat,
        report=None if report is None or off else _report(report),
        log_every=log_every,
        track=track,
        check=check,
    )
    command = (
        launch.launcher_command(words)
        if after_dashes
        else launch.script_command(words[0], words[1:], nproc=nproc)
    )
    exit_as(launch.run(command, options))


def _recipe(given: str) -> str:
    """`given`, read once so that a mistake in it is found now, as other processes will find it."""
    from fp8patch.recipe import Recipe, builtin_names

    Recipe.load(given)
    return given if given in builtin_names() else str(Path(given).expanduser().absolute())


def _report(given: Path) -> str:
    from fp8patch.errors import Fp8PatchError
    from fp8patch.output_files import holds, publish

    path = given.expanduser().absolute()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        wrong = "is a folder" if path.is_dir() else "is in no folder that can be written to"
        raise Fp8PatchError(f"--report: {given} {wrong}. Give the path of a file to write.")
    publish(path, Path.touch, keep=False)
    if path.exists() and path.stat().st_size and not holds(path, b'"format_version": '):
        raise Fp8PatchError(f"--report: {given} exists, and is no report. Name another file.")
    return str(path)
