"""The quantised weight of a module: when it is out of date, and how it is replaced.

It holds both layouts, [N, K] for fprop and [K, N] for dgrad, and is made once an optimizer step
where an optimizer is known to own the weight. Any other weight may be changed through `.data`,
which moves no version counter: what was made of it is good for one outermost entry (see amp.py).
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from fp8patch.modules.gemms import Quantized, cast
from fp8patch.ops.quantize import ALIGNMENT
from fp8patch.recipe import Recipe
from fp8patch.scaling import Bank
from fp8patch.slots import WEIGHT, limit


def prepare(module: Any, observe: bool, calibrating: bool = False) -> None:
    """Bind the slots and quantise the weight, where either is out of date."""
    bank: Bank = module._fp8_bank
    weight = module.weight
    if module._fp8_device != weight.device:
        bank.bind(module)
    key = module._fp8_weight_key
    # An optimizer that is known marks the weight stale when it steps. Any other weight may have
    # been changed through `.data`, which moves no version counter: it is good for one outermost
    # entry.
    current = (weight.data_ptr(), weight._version)
    stale = module._fp8_weight_stale
    trusted = _is_watched(module) and not stale
    if (
        key is None
        # By identity: two weak references are compared by comparing what they refer to.
        or key[0]() is not weight
        or key[1:3] != current
        or (stale and observe)
        or not (trusted or key[3] == bank.entry)
    ):
        # Observed once between two updates, so that what is counted does not depend on how often
        # the cast had to be repeated (more often before the optimizer is known: after a resume).
        first = observe and module._fp8_path not in bank.weights_seen
        _quantize_weight(module, weight, first, calibrating)
        if first:
            bank.weights_seen.add(module._fp8_path)
        module._fp8_weight_key = (weakref.ref(weight), *current, bank.entry)
        # An evaluation between two steps observes nothing and uses the scales of the last one: the
        # next training forward has yet to see this weight.
        module._fp8_weight_stale = not observe


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
