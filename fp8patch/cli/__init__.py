"""The `fp8patch` command: parse, call one function, print.

A command is a row of `COMMANDS` and a module of the same name in this folder, with a function of
the same name that has `typer.Option` and `typer.Argument` annotations as usual:

    # fp8patch/cli/convert.py
    def convert(model: Annotated[Path, typer.Argument(help="…")], ...) -> None: ...

A command with commands of its own is a module with a `typer.Typer` named `GROUP` instead.

The module is imported when its command runs. `fp8patch --help` reads only the table, so that it
answers at once; a command's module imports torch inside its function for the same reason.

Exit codes: 0 done, 1 something that the user can put right (one line on stderr), 2 wrong usage,
130 interrupted, 141 the reader of the output has left (`| head`), as a shell says it of SIGPIPE.
"""

import difflib
import errno
import importlib
import io
import logging
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fp8patch import __version__
from fp8patch.errors import Fp8PatchError

__all__ = ["COMMANDS", "app", "main"]

COMMANDS: dict[str, str] = {
    "demo": "The whole story on a tiny model, on any machine, in under a minute.",
    "doctor": "What this machine runs in FP8, tested; what would be used, and why not more.",
    "plan": "What of a model would run in FP8, and why not more; reads no weights.",
    "train": "Run any training script, unmodified, in FP8.",
    "bench": "BF16 against FP8: step time, memory and kernels, side by side on your GPU.",
    "inspect": "Where FP8 loses too much in a run or a checkpoint, and what helps.",
    "tune": "Write the recipe that helps a run: its own, with overrides where FP8 loses too much.",
    "report": "One page of a run: loss, step time, every layer over time.",
    "convert": "Write a patched checkpoint: the same weights, plus FP8 scales beside them.",
    "revert": "Write the plain checkpoint again.",
    "export": "Write an FP8 checkpoint that vLLM, SGLang and transformers load.",
    "recipes": "The built-in recipes, with what each needs and costs; shown, and files checked.",
}

_READER_LEFT = 141
# What a path, a disk and permissions do, and no fault of ours. FileNotFoundError may be one.
_NOT_OURS = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.EIO}
    | {errno.ENOSPC, errno.EDQUOT}
)


class _Commands(TyperGroup):
    """The table above as a command group."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{cmd_name}")
        if hasattr(module, "GROUP"):  # a command that has commands of its own
            return typer.main.get_command(module.GROUP)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        # SETTINGS: what the decorator takes, where a command is parsed in its own way.
        single.command(cmd_name, **getattr(module, "SETTINGS", {}))(getattr(module, cmd_name))
        return typer.main.get_command(single)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # typer suggests too, of commands that it has been told of in advance.
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, n=1, cutoff=0.5)
            hint = f"Did you mean {close[0]!r}?" if close else f"Commands: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(self, *args: Any, **options: Any) -> Any:
        try:
            return super().make_context(*args, **options)
        except BrokenPipeError:  # of --help and --version
            _drop_output()
            raise typer.Exit(_READER_LEFT) from None

    def invoke(self, ctx: Any) -> Any:
        given = [*ctx._protected_args, *ctx.args]
        # Not `except Exception`: a fault of ours keeps its traceback, and typer.Exit its way out.
        try:
            result = super().invoke(ctx)
            _flush()
            return result
        except typer.BadParameter as error:
            error.message = _with_value(error, given)
            raise
        except BrokenPipeError:
            _drop_output()
            raise typer.Exit(_READER_LEFT) from None
        except OSError as error:
            if error.errno not in _NOT_OURS or (error.errno != errno.ENOSPC and not error.filename):
                raise
            if not error.filename:
                _drop_output()
            typer.echo(f"fp8patch: error: {_reason(error)}", err=True)
            raise typer.Exit(1) from None
        except typer.Exit:  # whose code says more than that nobody reads the rest
            try:
                _flush()
            except BrokenPipeError:
                _drop_output()
            raise
        except Fp8PatchError as error:
            typer.echo(f"fp8patch: error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("fp8patch: interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    # Plain help: rich alone takes longer to import than everything else that --help needs.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fp8patch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """FP8 training for the Hugging Face model you already have."""


def _quiet_others() -> None:
    # What transformers imports on the way has remarks about its own installation (torchao: a
    # library that does not load, an interface that will go). They say nothing about this command.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _with_value(error: typer.BadParameter, given: list[str]) -> str:
    """What a wrong option is told, with the value that it was given: typer leaves it out."""
    for option in getattr(error.param, "opts", ()):
        for at, word in enumerate(given):
            name, equals, value = word.partition("=")
            if name == option and (equals or at + 1 < len(given)):
                value = value if equals else given[at + 1]
                return error.message if value in error.message else f"{value!r}: {error.message}"
    return error.message


def _reason(error: OSError) -> str:
    if not error.filename:
        return "the output cannot be written: the disk is full."
    return (
        f"{os.fsdecode(error.filename)}: cannot be used: {error.strerror}. Check the path, its "
        "permissions and the disk."
    )


def _say_what_the_terminal_cannot() -> None:
    """A name that is no text, or a sign that the terminal's encoding lacks, is no reason to end."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """What is still in the buffer would fail as Python exits, with a code of its own."""
    if sys.stdout is not None:  # closed by whoever started us
        sys.stdout.flush()


def _drop_output() -> None:
    """Nobody reads stdout any more: what is left of it goes nowhere, also as Python exits."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):  # no file of its own, as under a test
        return


def main() -> None:
    """Run the command line of this process and exit."""
    _quiet_others()
    _say_what_the_terminal_cannot()
    app(prog_name="fp8patch")
