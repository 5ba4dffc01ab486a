"""`fp8patch bench`: BF16 against FP8 on a model of yours, or on a named workload."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fp8patch.bench.workloads import Workload

__all__ = ["bench"]

_EMULATED = ("bf16", "fp8")
_TRY = (
    "--emulate runs the command on the CPU, with FP8 emulated: its times say nothing about a GPU."
)


def bench(
    model: Annotated[
        str | None, typer.Argument(help="Model directory, config.json, hub name, or workload.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences, or images.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens in a sequence.")] = None,
    contenders: Annotated[
        str | None, typer.Option(help="Comma-separated: bf16, fp8-compile, torchao, te, …")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps in a turn.")] = 5,
    warmup: Annotated[int, typer.Option(min=1, help="Untimed steps before.")] = 6,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Contenders that compile at once.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no new work begins.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Rows to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="A chart to this file.")] = None,
    from_json: Annotated[
        Path | None, typer.Option(help="Measure nothing: show, and draw, an earlier --json file.")
    ] = None,
    profile: Annotated[bool, typer.Option(help="Keep and show the slowest kernels.")] = False,
    gemm: Annotated[
        bool, typer.Option("--gemm", help="Casts and GEMMs by shape instead of training steps.")
    ] = False,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="On the CPU, to try the command: no real figures.")
    ] = False,
    commit: Annotated[
        str | None, typer.Option(help="To note in the rows, instead of git's.")
    ] = None,
) -> None:
    """Time BF16 and FP8 training steps side by side; ratios are to BF16 in eager mode.

    A model is built from its config, with random weights. Named workloads: bert-large,
    llama-8b-4l, gpt-4096, bert-4096-4l, vit-huge, bert-base.
    """
    from fp8patch.bench.report import check_targets

    check_targets(json_file, plot_file)
    if from_json is not None:
        from fp8patch.bench.report import read_rows

        _show(read_rows(from_json), plot_file, profile)
        return
    if gemm:
        if emulate:
            raise typer.BadParameter(
                "--gemm times the kernels of a GPU, and --emulate has none: choose one."
            )
        _gemm(json_file)
        return
    if model is None:
        raise typer.BadParameter("what to train: a model, or a named workload.", param_hint="MODEL")
    device, capacity = _device(emulate)
    from fp8patch.bench.contenders import DEFAULT, expand
    from fp8patch.bench.report import write_rows
    from fp8patch.bench.run import Settings, run
    from fp8patch.bench.workloads import resolve
    from fp8patch.errors import Fp8PatchError

    workload = resolve(model, batch=batch, seq=seq)
    names = contenders.split(",") if contenders else _EMULATED if emulate else DEFAULT
    chosen = expand([name.strip() for name in names], workload)
    if emulate and any(contender.mode == "graphs" for contender in chosen):
        raise Fp8PatchError(
            "a CPU has no CUDA graphs. Leave the contenders under graphs out with --emulate: "
            f"--contenders {','.join(_EMULATED)}"
        )
    _build_once(workload)
    settings = Settings(
        warmup=warmup,
        rounds=rounds,
        steps=steps,
        deadline=None if deadline is None else time.monotonic() + deadline,
        device=device,
        capacity=capacity,
        profile=profile,
        commit=commit,
        parallel=parallel,
    )

    def done(rows: list[dict[str, Any]]) -> None:
        if json_file is not None:
            write_rows(rows, json_file)

    rows = run(workload, chosen, settings, done=done, say=_say)
    _show(rows, plot_file, profile)
    if all(row["step_ms"] is None for row in rows):
        typer.echo("fp8patch: error: no contender ran; each line above says why.", err=True)
        raise typer.Exit(1)


def _gemm(json_file: Path | None) -> None:
    _device(emulate=False, hint="--gemm has no other way to run.")
    from fp8patch.bench.gemm import measure, text
    from fp8patch.bench.report import write_json

    found = measure(say=_say)
    if json_file is not None:
        write_json(found, json_file)
    typer.echo(text(found))


def _device(emulate: bool, hint: str = _TRY) -> tuple[str, float]:
    """Where to run, and GiB of memory there; HardwareError where there is no GPU with FP8."""
    from fp8patch.errors import HardwareError
    from fp8patch.hardware import detect

    if emulate:
        return "cpu", 0.0
    found = detect()
    if not found.fp8:
        raise HardwareError(f"bench times FP8 on a GPU. {found.reason} {hint}")
    import torch

    # Without what the driver and this process keep.
    return found.device_type, 0.94 * torch.cuda.get_device_properties(0).total_memory / 2**30


def _build_once(workload: "Workload") -> None:
    """The user's model on the meta device: what is wrong with it is said here, in one line."""
    if workload.source is None:
        return
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    workload.training(workload.model("meta"), "meta")


def _say(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(text, err=True)


def _show(rows: list[dict[str, Any]], plot_file: Path | None, profile: bool) -> None:
    from fp8patch.bench.report import kernels_text, plot, table

    typer.echo(table(rows))
    if profile and (kernels := kernels_text(rows)):
        typer.echo(f"\n{kernels}")
    if plot_file is not None:
        plot(rows, plot_file)
