"""Export a model directory for serving in FP8: files in, files out, a piece of a tensor at a time.

What is written is the format's own, and nothing of ours: the library that owns it loads it.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8patch import messages
from fp8patch.checkpoint.files import Progress, copy_tree, files_below, staging
from fp8patch.checkpoint.sidecar import file_names, has_sidecar, read_sidecar
from fp8patch.checkpoint.skeleton import model_from_config
from fp8patch.checkpoint.stream import check_paths
from fp8patch.checkpoint.tensors import open_tensors
from fp8patch.errors import ConversionError
from fp8patch.export.formats import BlockFp8, CompressedTensors, Format
from fp8patch.export.layers import Kept, Selected, select
from fp8patch.export.weights import write_weights
from fp8patch.plan.model import Plan, plan_model
from fp8patch.recipe_fields import nearest

__all__ = ["FORMATS", "ExportedDirectory", "export_directory"]

FORMATS = ("compressed-tensors", "hf-fp8", "torchao")

# Weights of other formats and frameworks, their indices, and what only training needs.
_NOT_SERVED = re.compile(
    r"[^/]*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|index\.json)|trainer_state\.json"
    r"|(checkpoint-\d+|original|onnx|openvino)/.*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedDirectory:
    """What `export_directory` wrote.

    Attributes:
        out: The directory.
        format: One of `FORMATS`.
        plan: The plan it was chosen from.
        exported: Paths of the layers in FP8.
        kept: What stays in high precision, and why.
        left_out: Files of the source that are not in `out`: other weights, training state.
        bytes_before: Size of the weights that were read.
        bytes_after: Size of the weights that were written.
    """

    out: Path
    format: str
    plan: Plan
    exported: tuple[str, ...]
    kept: tuple[Kept, ...]
    left_out: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def export_directory(
    source: str | Path,
    out: str | Path,
    format: str = "compressed-tensors",
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> ExportedDirectory:
    """Write `out`: the model of `source`, its Linears in FP8 as `format` stores them.

    `out` appears when it is complete, or not at all, however the process ends. Memory does not grow
    with the model: it holds a piece of a tensor at a time.

    Args:
        source: A model directory, plain or patched. Of a patched one, what a pattern kept out of
            FP8 in training stays out.
        out: A directory that does not exist yet.
        format: One of `FORMATS`.
        only, skip: As for `plan_model`.
        force: Replace `out`, if it is a model directory, once the new one is complete.
        progress: Called as (stage, done, total): bytes for "copy", and for "export".

    Raises:
        CheckpointError: `source` is no model directory, or `out` may not or cannot be written.
        ConversionError: An unknown format, weights that are quantised or not finite, or no layer
            that can be exported.
        PlanError: A pattern matches nothing, or transformers does not know the architecture.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    form = _format(format)
    check_paths(source, out, force=force, purpose="export")
    model = model_from_config(source)
    plan = plan_model(model, only=only, skip=skip, gpu=None, meta=True)
    stored = open_tensors(source)
    selected = select(model, plan, stored, form, _skipped_in_training(source))
    replaced = {"config.json", *file_names(), *(file.name for file in stored.files)}
    left_out = _left_out(source) - replaced
    with staging(out, force=force) as work:
        copy_tree(source, work, leave_out=replaced | left_out, progress=progress)
        written = write_weights(work, stored, form, selected.layers, progress)
        _write_config(source, work, form, selected)
    if remark := form.remark(selected.layers):
        messages.note(remark)
    return ExportedDirectory(
        out=out,
        format=form.name,
        plan=plan,
        exported=tuple(layer.path for layer in selected.layers),
        kept=selected.kept,
        # An index that was written anew is there under its old name.
        left_out=tuple(sorted(name for name in left_out if not (out / name).exists())),
        bytes_before=sum(file.stat().st_size for file in stored.files),
        bytes_after=written,
    )


def _format(name: str) -> Format:
    forms: dict[str, type[Format]] = {f.name: f for f in (CompressedTensors, BlockFp8)}
    if name == "torchao":
        from fp8patch.export.torchao import TorchAo

        forms[name] = TorchAo
    if name not in forms:
        raise ConversionError(
            f"export: there is no format {name!r}.{nearest(name, FORMATS)} Formats: "
            f"{', '.join(FORMATS)}."
        )
    return forms[name]()


def _skipped_in_training(source: Path) -> dict[str, str]:
    """{path: why} of what a pattern kept out of FP8 in the plan beside the weights, if any."""
    if not has_sidecar(source):
        return {}
    sidecar = read_sidecar(source)
    found = {}
    for decision in Plan.from_dict(sidecar.plan).decisions:
        if decision.code in ("pattern", "not_selected"):
            path = ".".join(filter(None, (sidecar.root, decision.path)))
            found[path] = f"kept out of FP8 in training too ({decision.reason})"
    return found


def _left_out(source: Path) -> set[str]:
    """Files that a server does not want, or would take for the weights: relative, with "/".

    In a folder, weights may belong to a part of the model that is loaded on its own (the Dense
    layers of sentence-transformers).
    """
    names = {file.as_posix() for file in files_below(source)}
    return {name for name in names if _NOT_SERVED.fullmatch(name)}


def _write_config(source: Path, work: Path, form: Format, selected: Selected) -> None:
    # Not `read_config`, which turns what JSON cannot say into numbers.
    values: dict[str, Any] = json.loads((source / "config.json").read_text("utf-8"))
    values["quantization_config"] = form.config(selected.names)
    (work / "config.json").write_text(json.dumps(values, indent=2) + "\n", "utf-8")
