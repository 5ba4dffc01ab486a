"""`fp8patch convert`: a patched copy of a model directory."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fp8patch.cli.options import GpuName, Include, Only, RecipeName, Skip, Tokens, finite
from fp8patch.errors import HardwareError

if TYPE_CHECKING:
    from fp8patch.checkpoint.files import Progress
    from fp8patch.checkpoint.stream import ConvertedDirectory
    from fp8patch.hardware import Backend
    from fp8patch.recipe import Recipe

__all__ = ["convert", "killed_cleanly"]

Execution = Literal["fp8", "emulate", "bf16"]


def convert(
    model: Annotated[Path, typer.Argument(help="Model directory, as save_pretrained writes it.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")],
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
            help="Skip layers predicted below it.  [default: recipe's, else 0]",
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Text file, one text a line: run them, and set activation scales too."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts in a batch.")] = 8,
    max_length: Annotated[int, typer.Option(min=1, help="Tokens at which a text is cut.")] = 512,
    device: Annotated[
        str | None, typer.Option(help="Where to calibrate.  [default: cuda if there is one]")
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="Calibrate in FP8, or fail.")] = False,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Calibrate with FP8 rounding on any device, slowly.")
    ] = False,
    no_fp8: Annotated[
        bool, typer.Option("--no-fp8", help="Calibrate on a BF16 forward, without FP8 rounding.")
    ] = False,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Go on where nothing can run in FP8.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT, once the new one is complete.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Write a patched checkpoint: the same weights, plus FP8 scales beside them.

    OUT holds the files of the model directory, unchanged, and two more: fp8patch.json and
    fp8patch_state.safetensors. Anything loads it as the plain model; fp8patch.load loads it in FP8.
    A directory that is patched already is planned anew, from its weights.
    """
    from fp8patch.recipe import Recipe
    from fp8patch.roofline import resolve_gpu

    # What can fail at once does so before torch is loaded, and before anything is written.
    loaded = Recipe.load(recipe)
    figures = resolve_gpu(gpu)
    backend = _backend(fp8, emulate, no_fp8)
    if backend != "auto" and calibrate is None:
        raise typer.BadParameter("--fp8, --emulate and --no-fp8 say how to --calibrate.")

    from transformers.utils import logging

    from fp8patch.checkpoint.stream import convert_directory
    from fp8patch.cli.progress import progress_bar

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with killed_cleanly(), progress_bar() as progress:
        calibration = None
        if calibrate is not None:
            calibration = _calibration(
                model, calibrate, loaded, backend, device, batch, max_length, progress
            )
        done = convert_directory(
            model,
            out,
            loaded,
            only=only or (),
            skip=skip or (),
            include=include or (),
            tokens=tokens,
            gpu=None if figures is None else figures.name,
            min_gain=min_gain,
            allow_empty=allow_empty,
            force=force,
            calibrate=calibration,
            progress=progress,
        )
    _show(done, calibrated=calibrate is not None, as_json=as_json)


@contextmanager
def killed_cleanly() -> Iterator[None]:
    """SIGTERM leaves the block as Ctrl-C does, so that what is half written is removed."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _backend(fp8: bool, emulate: bool, no_fp8: bool) -> "Backend":
    asked: list[tuple[bool, Backend]] = [(fp8, "fp8"), (emulate, "emulate"), (no_fp8, "bf16")]
    chosen = [name for wanted, name in asked if wanted]
    if len(chosen) > 1:
        raise typer.BadParameter("choose one of --fp8, --emulate and --no-fp8.")
    return chosen[0] if chosen else "auto"


def _calibration(
    source: Path,
    file: Path,
    recipe: "Recipe",
    backend: "Backend",
    device: str | None,
    batch: int,
    max_length: int,
    progress: "Progress",
) -> Callable[[Path], None]:
    """What `convert_directory` is to call; what that needs is checked here, before any copying."""
    from fp8patch import messages
    from fp8patch.checkpoint.calibrate import calibrate, load_tokenizer, read_texts
    from fp8patch.checkpoint.save_load import load
    from fp8patch.checkpoint.state import save_beside

    texts = read_texts(file.expanduser())
    where, execution, reason = _where(device, recipe, backend)
    tokenizer = load_tokenizer(source) if source.is_dir() else None
    if backend == "auto" and execution == "emulate":
        messages.note(f"calibrating on {where} with emulated FP8 rounding: {reason}")

    def run(directory: Path) -> None:
        # The backend here says only whether to convert; `calibrate` says what runs.
        model = load(directory, device=where, backend="emulate")
        calibrate(
            model,
            tokenizer,
            texts,
            execution=execution,
            batch=batch,
            max_length=max_length,
            progress=progress,
        )
        save_beside(model, directory)

    return run


def _where(device: str | None, recipe: "Recipe", backend: "Backend") -> tuple[str, Execution, str]:
    """(device, what runs there, why not more)."""
    import torch

    from fp8patch.hardware import detect, resolve_backend

    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        text = str(error).splitlines()[0][:200].rstrip(".")
        raise HardwareError(
            f"--device {name}: cannot be used here ({text}). {_other_device(name)}"
        ) from None
    hardware = detect(name)
    execution = resolve_backend(backend, hardware, "emulate", rowwise=recipe.scaling == "rowwise")
    assert execution != "off"
    return name, execution, hardware.reason


def _other_device(name: str) -> str:
    """What to do instead of `--device name`."""
    import torch

    if torch.cuda.is_available():
        return "Leave --device out to calibrate on this machine's GPU."
    fix = "Leave --device out to calibrate on the CPU"
    if name.startswith("cuda"):
        built = torch.version.cuda is not None
        missing = "a driver and a visible GPU" if built else "a PyTorch that is built for CUDA"
        fix += f"; cuda needs {missing}"
    return f"{fix}."


def _show(done: "ConvertedDirectory", *, calibrated: bool, as_json: bool) -> None:
    from rich.markup import escape

    from fp8patch.cli import output

    total = done.plan.summary()
    if as_json:
        values = {
            "out": str(done.out),
            "recipe": done.plan.recipe.to_dict(),
            "weights_scaled": len(done.scaled),
            "weights_unset": list(done.unset),
            "calibrated": calibrated,
            "summary": total,
        }
        output.print_json(values)
        return
    screen = output.console()
    screen.print(
        f"[bold]{done.plan.model}[/]: {total['converted_gemms']} of {total['gemms']} GEMM modules "
        f"in FP8, {output.percent(total['param_share'])} of the parameters, recipe "
        f"{escape(done.plan.recipe.name)}"
    )
    scales = f"{len(done.scaled)} weights" + (" and the activations" if calibrated else "")
    screen.print(f"Scales set for {scales}.")
    slow = [d for d in done.plan.converted() if d.gain is not None and d.gain < 1]
    if slow:
        screen.print(
            f"{len(slow)} modules are predicted to be slower in FP8 (`fp8patch plan`); "
            "--min-gain 1 leaves them out."
        )
    screen.print(f"Wrote {done.out}", markup=False)
