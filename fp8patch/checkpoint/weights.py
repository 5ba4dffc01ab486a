"""Scales of weights that are on disk: what the module would find out on its first use."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch import messages, numerics
from fp8patch.checkpoint.files import Progress
from fp8patch.checkpoint.tensors import StoredTensors
from fp8patch.errors import CheckpointError, ConversionError
from fp8patch.plan.model import Decision
from fp8patch.recipe import Recipe
from fp8patch.slots import WEIGHT, SlotState, limit

__all__ = ["WeightScan", "check_shape", "scan_weights", "stored_names", "weight_state"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(slots=True)
class WeightScan:
    """What reading the weights of converted modules gave, by module path.

    Attributes:
        states: {(path, WEIGHT): SlotState}.
        fingerprints: {path: fingerprint of the stored weight}.
        not_found: Paths of whose weight there is no stored tensor.
        not_finite: Paths whose weight holds inf or nan, so that it has no scale.
    """

    states: dict[tuple[str, int], SlotState] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    not_found: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)


def scan_weights(
    model: nn.Module,
    decisions: Sequence[Decision],
    recipe_of: Callable[[Decision], Recipe],
    stored: StoredTensors,
    progress: Progress | None = None,
) -> WeightScan:
    """Read the weight of every module in `decisions` once, a piece at a time.

    `model` may be on the meta device: only names and shapes are taken from it. `recipe_of` is that
    of the plan.

    Raises:
        CheckpointError: A file cannot be read, or a tensor has another shape than in `model`.
        ConversionError: A weight is stored as integers or in FP8.
    """
    scan = WeightScan()
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shapes = stored.shapes()
    keys = stored_names(model, shapes)
    for done, decision in enumerate(decisions, start=1):
        path = decision.path
        weight = model.get_parameter(f"{path}.weight" if path else "weight")
        key = next((keys[name] for name in names[id(weight)] if name in keys), None)
        if key is None:
            scan.not_found.append(path)
        else:
            check_shape(key, shapes[key], weight)
            amax = _amax(key, stored)
            state = weight_state(amax, recipe_of(decision))
            scan.fingerprints[path] = stored.fingerprint(key)
            if state is not None:
                scan.states[(path, WEIGHT)] = state
            elif not torch.isfinite(amax):
                scan.not_finite.append(path)
        if progress is not None:
            progress("weights", done, len(decisions))
    return scan


def weight_state(amax: Tensor, recipe: Recipe) -> SlotState | None:
    """The slot of a weight whose largest magnitude is `amax` (FP32 scalar), after its first use.

    None where `amax` gives no scale: it is zero, inf or nan.
    """
    if not torch.isfinite(amax) or amax == 0:
        return None
    return SlotState(
        history=amax.reshape(1),
        scale=numerics.scale_from_amax(amax, limit(recipe, WEIGHT)),
        amax=torch.zeros(()),
        counts=torch.zeros(4, dtype=torch.int64),
    )


def stored_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """{name in `model`: key under which exactly this tensor is stored}.

    Old checkpoints go by old names, and `save_pretrained` writes the old ones: transformers has a
    table for each architecture. What it merges, splits or turns while loading is left out.
    """
    keys = sorted(stored)
    base = getattr(model, "base_model_prefix", "")
    try:
        from transformers import conversion_mapping, core_model_loading

        mapping: Any = conversion_mapping
        loading: Any = core_model_loading
        table = mapping.get_model_conversion_mapping(model)
        renamings = [step for step in table if isinstance(step, loading.WeightRenaming)]
        converters = [step for step in table if isinstance(step, loading.WeightConverter)]
        skeleton = model.state_dict()
        renamed = [
            (*loading.rename_source_key(key, renamings, converters, base, skeleton), key)
            for key in keys
        ]
        return {name: key for name, changed_by, key in renamed if changed_by is None}
    except (ImportError, AttributeError, TypeError) as error:
        # No public interface, so it may be absent or look otherwise in another version.
        messages.note(
            "this version of transformers does not say how it renames stored weights "
            f"({messages.one_line(error)}): they are looked up under the names they have on disk."
        )
        return {
            name: key
            for key in keys
            for name in (f"{base}.{key}", key.removeprefix(f"{base}."), key)
        }


def check_shape(key: str, shape: tuple[int, ...], weight: Tensor) -> None:
    """Raise CheckpointError unless `weight`, of the model in config.json, is stored as `shape`."""
    if shape != tuple(weight.shape):
        raise CheckpointError(
            f"{key} is stored as {list(shape)}, and config.json makes it {list(weight.shape)}: the "
            "two are not of one model."
        )


def _amax(key: str, stored: StoredTensors) -> Tensor:
    amax = torch.zeros(())
    for piece in stored.pieces(key):
        if piece.dtype not in _FLOATS:
            raise ConversionError(
                f"{key} is stored as {str(piece.dtype).removeprefix('torch.')}: the weights are "
                "quantised already. FP8 training needs the high-precision checkpoint."
            )
        # As numerics.amax, which takes as much memory again for |x|: pieces of it, freed and made
        # anew, fragment the heap without end. All three propagate nan.
        if piece.numel():
            least, most = torch.aminmax(piece)
            amax = torch.maximum(amax, torch.maximum(least.abs(), most.abs()).float())
        del piece
    return amax
