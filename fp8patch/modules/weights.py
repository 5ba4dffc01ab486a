"""The quantised weight of a module: when it is out of date, and how it is replaced.

It holds both layouts, [N, K] for fprop and [K, N] for dgrad, and is made once an optimizer step
where an optimizer is known to own the weight. Any other weight may be changed through `.data`,
which moves no version counter: what was made of it is good for one outermost entry (regions.py).
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.modules.gemms import Quantized, cast
from fp8patch.ops.quantize import ALIGNMENT, preserved_version
from fp8patch.recipe import Recipe
from fp8patch.scaling import Bank
from fp8patch.slots import WEIGHT, limit


def prepare(module: Any, observe: bool, calibrating: bool = False) -> None:
    """Bind the slots and quantise the weight, where either is out of date.

    What `module` keeps about its weight, besides the quantised form itself:
        _fp8_weight_key: Which tensor was quantised, and at which outermost entry.
        _fp8_weight_owned: An optimizer that is known steps it, and says so.
        _fp8_weight_outdated: It has changed since it was quantised.
        _fp8_weight_unseen: The slot has not observed it as it is now.
        _fp8_weight_replaced: It is another weight altogether.
    """
    bank: Bank = module._fp8_bank
    weight = module.weight
    if module._fp8_device != weight.device:
        bank.bind(module)
    key, outdated = module._fp8_weight_key, module._fp8_weight_outdated
    # By identity: two weak references are compared by comparing what they refer to.
    moved = key is not None and (key[0]() is not weight or key[1] != weight.data_ptr())
    written = key is not None and key[2] != weight._version
    if moved or module._fp8_weight_replaced or (written and not outdated):
        _widen_scale(module, weight)
        module._fp8_weight_replaced = False
    unseen = module._fp8_weight_unseen
    trusted = _is_watched(module) and not unseen
    if (
        key is None
        or outdated
        or moved
        or written
        or (unseen and observe)
        or not (trusted or key[3] == bank.entry)
    ):
        # Observed once between two updates, so that what is counted does not depend on how often
        # the cast had to be repeated (more often before the optimizer is known: after a resume).
        first = observe and module._fp8_path not in bank.weights_seen
        _quantize_weight(module, weight, first, calibrating)
        if first:
            bank.weights_seen.add(module._fp8_path)
        module._fp8_weight_key = (
            weakref.ref(weight),
            weight.data_ptr(),
            weight._version,
            bank.entry,
        )
        module._fp8_weight_outdated = False
        # An evaluation between two steps observes nothing and uses the scales of the last one: the
        # next training forward has yet to see this weight.
        module._fp8_weight_unseen = not observe


@torch.no_grad()
def _widen_scale(module: Any, weight: Tensor) -> None:
    """Give a weight that was replaced by a far larger one a scale that fits it. No sync.

    An optimizer moves a weight a little, and the history follows. After `load_state_dict` the old
    scale may clip most of it for steps on end. Not for one that merely outgrew the history: a
    resumed run has to clip as the original did.
    """
    bank: Bank = module._fp8_bank
    largest, scale = limit(bank.recipe, WEIGHT), module._fp8_weight_slot.scale
    amax = numerics.amax(weight)
    fitting = numerics.scale_from_amax(amax, largest)
    with preserved_version(scale):
        scale.copy_(torch.where(amax * scale > 2 * largest, fitting, scale))
    bank.weights_seen.discard(module._fp8_path)


def _is_watched(module: Any) -> bool:
    """Does whatever changes the weight announce it? A frozen one is changed by no optimizer, but
    by an adapter that is merged into it.
    """
    return bool(module._fp8_weight_owned and module.weight.requires_grad)


# Tensors born under inference_mode could not be saved for a later backward.
@torch.inference_mode(False)
@torch.no_grad()
def _quantize_weight(module: Any, weight: Tensor, observe: bool, calibrating: bool) -> None:
    recipe: Recipe = module._fp8_bank.recipe
    rows = weight.detach().t() if module._fp8_in_out else weight.detach()
    missing = -rows.shape[0] % ALIGNMENT
    if missing:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    new = cast(
        rows,
        module._fp8_weight_slot,
        limit(recipe, WEIGHT),
        e5m2=False,
        rowwise=recipe.scaling == "rowwise",
        live=recipe.scaling == "current" or calibrating,
        observe=observe,
        transpose=True,
    )
    old: Quantized | None = module._fp8_weight_q
    if old is None or not _is_watched(module) or old.rows.shape != new.rows.shape:
        # Fresh tensors: a graph that is still to run backward may hold the old ones, and what it
        # holds is right (the weight may not even have changed).
        module._fp8_weight_q = new
        return
    # In place: as in stock PyTorch, a backward through a weight that has since been stepped raises.
    for target, source in zip(old, new, strict=True):
        target.copy_(source)
