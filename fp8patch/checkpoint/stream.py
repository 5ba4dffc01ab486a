"""Patch a model directory on disk, and undo it: files in, files out, a piece of a tensor at a time.

The model is planned on the meta device and never built with its weights. What is written are the
stock files, byte for byte, and a sidecar: plan, recipe, and the scale of every weight.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch.nn import Module

from fp8patch import messages
from fp8patch.checkpoint.files import Progress, check_target, copy_tree, staging
from fp8patch.checkpoint.sidecar import (
    SIDECAR,
    BankMeta,
    all_names,
    file_names,
    has_sidecar,
    write_sidecar,
)
from fp8patch.checkpoint.skeleton import model_from_config, read_config
from fp8patch.checkpoint.tensors import open_tensors
from fp8patch.checkpoint.weights import WeightScan, scan_weights
from fp8patch.convert import nothing_to_convert
from fp8patch.errors import CheckpointError, ConversionError
from fp8patch.plan.model import Decision, Plan, plan_model
from fp8patch.plan.types import NORM_KINDS
from fp8patch.recipe import Recipe
from fp8patch.slots import WEIGHT

__all__ = ["ConvertedDirectory", "check_paths", "convert_directory", "revert_directory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedDirectory:
    """What `convert_directory` wrote.

    Attributes:
        out: The patched directory.
        plan: The plan in it.
        scaled: Paths whose weight scale was computed from the stored weights.
        unset: Paths whose weight scale is set on first use: not found, all zero, or not finite.
    """

    out: Path
    plan: Plan
    scaled: tuple[str, ...]
    unset: tuple[str, ...]


def convert_directory(
    source: str | Path,
    out: str | Path,
    recipe: Recipe | str | Path | None = None,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    include: Iterable[str] = (),
    tokens: int = 4096,
    gpu: str | None = None,
    min_gain: float | None = None,
    allow_empty: bool = False,
    force: bool = False,
    calibrate: Callable[[Path], None] | None = None,
    progress: Progress | None = None,
) -> ConvertedDirectory:
    """Write `out`: the files of the model directory `source` unchanged, plus a sidecar.

    `out` appears when it is complete, or not at all, however the process ends. Peak memory is far
    below the size of a shard; `calibrate` loads the whole model.

    Args:
        source: A model directory. One that is patched already is planned anew, from its weights.
        out: A directory that does not exist yet.
        recipe, only, skip, include, tokens, gpu, min_gain: As for `plan_model`.
        allow_empty: A plan that converts nothing is fine.
        force: Replace `out`, if it is a model directory, once the new one is complete.
        calibrate: Called with the complete directory, to add to the state in its sidecar.
        progress: Called as (stage, done, total): bytes for "copy", then tensors for "weights".

    Raises:
        CheckpointError: `source` is no model directory, or `out` may not or cannot be written.
        ConversionError: The weights are quantised, or there is nothing to convert.
        PlanError: A pattern matches nothing, or transformers does not know the architecture.
        RecipeError: The recipe can't be loaded.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    recipe = Recipe.load(recipe)
    check_paths(source, out, force=force, purpose="FP8 training")
    _say_patched(source)
    model = model_from_config(source)
    plan = plan_model(
        model,
        recipe,
        only=only,
        skip=skip,
        include=include,
        tokens=tokens,
        gpu=gpu,
        min_gain=min_gain,
        meta=True,
    )
    if not allow_empty and not _gemms(plan):
        raise ConversionError(f"{source}: {nothing_to_convert(plan)}")
    open_tensors(source)  # a missing or corrupt shard is found before anything is copied
    with staging(out, force=force) as work:
        copy_tree(source, work, leave_out=all_names(source), progress=progress)
        result = _add_sidecar(work, out, model, plan, progress)
        if calibrate is not None:
            calibrate(work)
    return result


def _gemms(plan: Plan) -> list[Decision]:
    return [decision for decision in plan.converted() if decision.kind not in NORM_KINDS]


def _add_sidecar(
    work: Path, out: Path, model: Module, plan: Plan, progress: Progress | None
) -> ConvertedDirectory:
    """Write the sidecar of the plain checkpoint in `work`, with the scales of its weights."""
    gemms = _gemms(plan)
    scan = scan_weights(model, gemms, plan.recipe_of, open_tensors(work), progress)
    _report(scan, len(gemms))
    write_sidecar(work, plan.to_dict(), BankMeta(), scan.states, scan.fingerprints)
    scaled = tuple(path for path, _ in scan.states)
    unset = tuple(d.path for d in gemms if (d.path, WEIGHT) not in scan.states)
    return ConvertedDirectory(out=out, plan=plan, scaled=scaled, unset=unset)


def revert_directory(
    source: str | Path,
    out: str | Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write `out`: the files of the patched directory `source` without the sidecar.

    Every other file is copied byte for byte; what trained weights became, they stay.

    Raises:
        CheckpointError: `source` is not patched, or `out` may not or cannot be written.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    _require_directory(source)
    present = [name for name in file_names() if (source / name).exists()]
    if not present:
        raise CheckpointError(
            f"{source}: nothing to revert: it holds no {SIDECAR}, so it is a plain checkpoint "
            "already, or none at all."
        )
    check_target(source, out, force=force)
    with staging(out, force=force) as work:
        copy_tree(source, work, leave_out=all_names(source), progress=progress)
    return out


def _require_directory(source: Path) -> None:
    if source.is_dir():
        return
    if source.exists():
        raise CheckpointError(f"{source}: is a file. Give the model directory that it is in.")
    raise CheckpointError(
        f"{source}: no such directory. Give a local model directory; `hf download NAME --local-dir "
        "DIR` makes one from a hub name."
    )


def check_paths(source: Path, out: Path, *, force: bool, purpose: str) -> None:
    """Raise unless `source` holds a model that is not quantised, and `out` may be written from it.

    Raises:
        CheckpointError: No directory, or a target that `check_target` refuses.
        ConversionError: The weights are quantised; `purpose` needs others, it says.
    """
    _require_directory(source)
    config = source / "config.json"
    if config.is_file() and "quantization_config" in read_config(config):
        raise ConversionError(
            f"{source}: config.json has a quantization_config, so the weights are quantised "
            f"already. {purpose} needs the high-precision checkpoint."
        )
    check_target(source, out, force=force)


def _say_patched(source: Path) -> None:
    if has_sidecar(source):
        messages.note(
            f"{source} is patched already: planned anew from its weights. Its own scales and plan "
            "stay where they are, and are not copied."
        )


def _report(scan: WeightScan, converted: int) -> None:
    if scan.not_found:
        messages.note(
            f"{len(scan.not_found)} of {converted} weights have no stored tensor of their own: "
            f"absent, or merged or split while loading ({_some(scan.not_found)}). Their scales are "
            "set on first use."
        )
    if scan.not_finite:
        messages.warn(
            f"{len(scan.not_finite)} of {converted} weights hold inf or nan "
            f"({_some(scan.not_finite)}), so they have no scale: the checkpoint is damaged, or "
            "training diverged before it was saved."
        )


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")
