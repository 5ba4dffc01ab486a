"""All weights that an optimizer has stepped, quantised in one launch.

What is out of the ordinary (never quantised before, replaced, frozen, gathered by FSDP, not on a
GPU) is left to `prepare`, one weight at a time.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch.modules.weights import is_fresh, note_quantized, settled_owner
from fp8patch.ops.fused import many_casts
from fp8patch.ops.quantize import ALIGNMENT, is_cold
from fp8patch.slots import WEIGHT, limit

# (device, dtype of the weights, they are observed, they are scaled by their live amax)
_Group = tuple[torch.device, torch.dtype, bool, bool]


@torch.inference_mode(False)
@torch.no_grad()
def refresh_together(members: Iterable[Any], observe: bool) -> list[Any]:
    """Quantise what can be in one launch, and return the modules that are left."""
    groups: dict[_Group, list[Any]] = {}
    left = []
    for module in members:
        weight = module.weight
        if is_fresh(module, weight) and not module._fp8_weight_state.gathered:
            continue  # As at most entries: what follows takes longer to find that out.
        if _can_join(module, weight, observe):
            first = observe and module._fp8_path not in module._fp8_bank.weights_seen
            live = module._fp8_recipe.scaling == "current"
            groups.setdefault((weight.device, weight.dtype, first, live), []).append(module)
        else:
            left.append(module)
    if not groups and left and not any(map(settled_owner, left)):
        # Their optimizer is gone, and with it whoever would use the tables again.
        left[0]._fp8_bank.casts.clear()
    for group, modules in groups.items():
        if len(modules) < 2 or not _cast(group, modules):
            left.extend(modules)
            continue
        for module in modules:
            note_quantized(module, module.weight, observe)
    return left


def _can_join(module: Any, weight: Tensor, observe: bool) -> bool:
    known, quantized = module._fp8_weight_state, module._fp8_weight_q
    if type(weight) is not nn.Parameter or not weight.is_cuda or quantized is None:
        return False
    if not (known.outdated or (known.unseen and observe)) or known.replaced:
        return False
    if not settled_owner(module) or known.moved(weight) or known.written(weight):
        return False
    if weight.shape[0] % ALIGNMENT or weight.shape[1] % ALIGNMENT or not weight.is_contiguous():
        return False
    if weight.data_ptr() % 16:  # A part of a flat buffer: the kernel loads 16 bytes at a time.
        return False
    scaling = module._fp8_recipe.scaling
    warm = scaling == "current" or not is_cold(module._fp8_weight_slot.scale)
    return scaling != "rowwise" and warm and module._fp8_device == weight.device


def _cast(group: _Group, modules: list[Any]) -> bool:
    bank = modules[0]._fp8_bank
    jobs = [_job(module) for module in modules]
    addresses = [(job[0].data_ptr(), job[1].data_ptr(), job[4].data_ptr()) for job in jobs]
    # One table for observed and other casts: it keeps what it writes to alive, replaced or not.
    key = group[0], group[1], group[3]
    known, casts = bank.casts.get(key, (None, None))
    if known != addresses:
        casts = many_casts(jobs)
        bank.casts[key] = addresses, casts
    if casts is None:
        return False
    # What live amax are brought to; without a history there is no margin, so it is one for all.
    largest = limit(modules[0]._fp8_recipe, WEIGHT)
    bank.late.defer(
        partial(casts.run, largest, live=group[3], observe=group[2]),
        partial(_undo, modules, observed=group[2]),
    )
    return True


def _undo(modules: list[Any], observed: bool) -> None:
    for module in modules:
        module.outdate_weight()
        if observed:
            module._fp8_bank.weights_seen.discard(module._fp8_path)


def _job(module: Any) -> tuple[Tensor, ...]:
    quantized, slot = module._fp8_weight_q, module._fp8_weight_slot
    rows, rows_t = quantized.rows, quantized.rows_t
    if module._fp8_in_out:  # Stored [K, N]: what is one's transpose is the other's rows.
        rows, rows_t = rows_t, rows
    return module.weight.detach(), rows, rows_t, quantized.scale_inv, *slot
