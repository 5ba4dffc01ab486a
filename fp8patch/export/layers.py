"""Which weights an export stores in FP8, and why the others stay in high precision.

The plan decides first, as for training. Then what only matters on disk: how the weight is stored,
what the format can have, and what its loaders do with their list of modules to leave alone. What a
server fuses into one GEMM is exported together or not at all.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fp8patch.checkpoint.tensors import DTYPES, StoredTensors
from fp8patch.checkpoint.weights import check_shape, stored_names
from fp8patch.errors import ConversionError
from fp8patch.export.formats import Format, Layer
from fp8patch.plan.model import Decision, Plan
from fp8patch.plan.types import GEMM_KINDS

__all__ = ["Kept", "Selected", "select"]

_FLOATS = ("F32", "BF16", "F16")
# Siblings that vLLM and SGLang put into one GEMM, and refuse if only some of them are quantised.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)
# Finding the source of a class parses its file, which takes longer than everything else here.
_sources: dict[type[nn.Module], str] = {}


@dataclass(frozen=True, slots=True)
class Kept:
    """A module that stays in high precision: its path, a short code, and a sentence on why."""

    path: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What goes into FP8 (`layers`), what stays (`kept`), and the names to leave alone (`names`).

    `names` are those of every module with a matrix in high precision, as the model and the files
    name it, so that a loader quantises none of them.
    """

    layers: tuple[Layer, ...]
    kept: tuple[Kept, ...]
    names: tuple[str, ...]


def select(
    model: nn.Module,
    plan: Plan,
    stored: StoredTensors,
    form: Format,
    skipped_before: Mapping[str, str],
) -> Selected:
    """Choose from the model (on the meta device) that `stored` belongs to.

    Args:
        skipped_before: {path: why} of modules that an earlier plan kept out of FP8 on request.

    Raises:
        CheckpointError: A tensor has another shape than in the model.
        ConversionError: A weight is stored as integers or in FP8, or nothing can be exported.
    """
    keys = stored_names(model, stored.shapes())
    names = _names_by_parameter(model)
    gemms = [decision for decision in plan.decisions if decision.kind in GEMM_KINDS]
    owners = [d.path.rpartition(".")[0] for d in gemms if d.kind == "experts"]
    experts = list(dict.fromkeys(entry for owner in owners for entry in form.experts(owner)))
    layers: dict[str, Layer] = {}
    refused: dict[str, tuple[str, str]] = {}
    for decision in gemms:
        path, found = decision.path, _layer(model, decision, names, keys, stored)
        if isinstance(found, Layer):
            layers[path] = found
            why = form.obstacle(found, decision.class_name)
            if path in skipped_before:
                why = "pattern", skipped_before[path]
        else:
            why = found
        if why is not None:
            refused[path] = why
            layers.pop(path, None)
    entries: list[str] = []
    drawn: dict[str, tuple[str, str]] = {"": ("", "")}
    while drawn:
        entries = [*experts, *_matrices(model, layers, keys)]
        drawn = dict(_drawn_along(model, form, layers, entries))
        refused.update(drawn)
        layers = {path: layer for path, layer in layers.items() if path not in drawn}
    kept = [Kept(d.path, *refused[d.path]) for d in gemms if d.path in refused]
    if not layers:
        raise ConversionError(_nothing(form, kept))
    return Selected(
        layers=tuple(layers.values()),
        kept=(*kept, *_embeddings(model)),
        names=tuple(entries),
    )


def _names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _layer(
    model: nn.Module,
    decision: Decision,
    names: Mapping[int, list[str]],
    keys: Mapping[str, str],
    stored: StoredTensors,
) -> Layer | tuple[str, str]:
    """The layer that `decision` is about, or (code, reason) why it cannot be exported."""
    n, k = decision.out_features, decision.in_features
    if decision.code == "misaligned":
        return "misaligned", f"N={n}, K={k}: FP8 GEMMs take multiples of 16"
    if decision.action == "skip":
        return decision.code, decision.reason
    if decision.kind == "conv1d":
        return "conv1d", "Conv1D holds its weight as [in, out], and no format of FP8 has that"
    path = decision.path
    name = f"{path}.weight" if path else "weight"
    weight = model.get_parameter(name)
    others = [other for other in names[id(weight)] if other != name]
    if others:
        return "tied", f"shares its weight with {others[0].removesuffix('.weight')}"
    above, _, leaf = path.rpartition(".")
    if _reads(type(model.get_submodule(above)), leaf):
        return "bypassed", "the code around it reads its weight, which is no plain matrix in FP8"
    key = keys.get(name)
    if key is None or not key.endswith("weight"):
        return "stored", "has no stored tensor of its own: it is merged or split while loading"
    check_shape(key, stored.shapes()[key], weight)
    dtype = stored.dtype(key)
    if dtype not in _FLOATS:
        raise ConversionError(
            f"{key} is stored as {dtype}: the weights are quantised already, or of a dtype that "
            f"FP8 is not made from. export takes {', '.join(_FLOATS)}."
        )
    return Layer(path=path, key=key, shape=(n, k), dtype=DTYPES[dtype])


def _reads(cls: type[nn.Module], child: str) -> bool:
    """Whether the source of a module's class has `self.child.weight` for more than its dtype."""
    if cls not in _sources:
        try:
            _sources[cls] = inspect.getsource(cls)
        except (OSError, TypeError):  # compiled, or made at run time
            _sources[cls] = ""
    read = rf"self\.{re.escape(child)}\.weight\b(?!\.(d?type|device|shape)\b)"
    return re.search(read, _sources[cls]) is not None


def _drawn_along(
    model: nn.Module, form: Format, layers: Mapping[str, Layer], entries: Sequence[str]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """(path, why) of layers that cannot be in FP8 because of what is not (`entries`)."""
    modules = dict(model.named_modules())
    left_alone = (*entries, *form.left_alone(model))
    for path in layers:
        above, _, leaf = path.rpartition(".")
        fused = next((group for group in _FUSED if leaf in group), ())
        siblings = [f"{above}.{name}" if above else name for name in fused]
        out = [name for name in siblings if name in modules and name not in layers]
        if out:
            yield path, ("fused", f"servers fuse it with {out[0]}, which is in high precision")
            continue
        entry = next((entry for entry in left_alone if form.swallows(entry, path)), None)
        if entry is not None:
            yield path, ("name", f"loaders told to leave {entry} alone leave this alone too")


def _matrices(
    model: nn.Module, layers: Mapping[str, Layer], keys: Mapping[str, str]
) -> Iterator[str]:
    """Names of all modules with a matrix called "weight" that is not exported, but for embeddings.

    More than the plan lists: routers that are no Linear to transformers, and one to servers.
    """
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        matrix = weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)
        if not path or not matrix or path in layers:
            continue
        yield path
        key = keys.get(f"{path}.weight", "")
        if key.endswith(".weight") and key != f"{path}.weight":
            yield key.removesuffix(".weight")


def _embeddings(model: nn.Module) -> Iterator[Kept]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            yield Kept(path, "embedding", "its rows are looked up, not multiplied")


def _nothing(form: Format, kept: list[Kept]) -> str:
    codes: dict[str, list[Kept]] = {}
    for row in kept:
        codes.setdefault(row.code, []).append(row)
    most = sorted(codes.values(), key=len, reverse=True)[:3]
    why = "; ".join(
        f"{len(rows)} {rows[0].code} ({rows[0].path or '(root)'}: {rows[0].reason})"
        for rows in most
    )
    return f"no layer can be exported as {form.name}: {why or 'the model has no Linear'}."
