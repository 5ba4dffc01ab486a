"""Weights whose changes nobody announces, quantised in one launch at each outermost entry.

As `prepare` does it one by one: into new tensors, because a graph that is still to run backward may
hold the old ones; and with the live scale where a weight has outgrown that of its slot.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.modules.gemms import Quantized
from fp8patch.modules.weights import WeightState, note_quantized
from fp8patch.ops.fused import many_casts
from fp8patch.slots import WEIGHT, limit

__all__ = ["TABLES", "Group", "cast_together", "group_of", "is_due"]

# Where a bank's `casts` keep these launches. They hold addresses, no quantised weights.
TABLES = "afresh"


class Group(NamedTuple):
    """What the weights of one launch have in common; of those that an optimizer steps, too.

    Attributes:
        observed: Their slots have yet to observe them.
        live: They are scaled by their live amax in any case.
        largest: What a live amax is brought to.
    """

    device: torch.device
    dtype: torch.dtype
    observed: bool
    live: bool
    largest: float


def is_due(module: Any, observe: bool) -> bool:
    """Does `prepare` cast this weight: at each new outermost entry, as its changes go unseen?"""
    known: WeightState = module._fp8_weight_state
    seen = known.entry == module._fp8_bank.entry and not (known.unseen and observe)
    return known.outdated or not seen


def group_of(module: Any, weight: Tensor, observe: bool, settled: bool) -> Group:
    """What `weight` can be cast together with."""
    bank, recipe = module._fp8_bank, module._fp8_recipe
    first = observe and module._fp8_path not in bank.weights_seen
    live = recipe.scaling == "current" or not (settled or weight.requires_grad)
    # Live ones have no history and so no margin, and a stepped one has a scale: one for all.
    largest = limit(bank.recipe if settled else recipe, WEIGHT)
    return Group(weight.device, weight.dtype, first, live, largest)


def cast_together(group: Group, modules: list[Any], observe: bool) -> bool:
    """Quantise these weights, if that can be done in one launch."""
    # A graph of somebody else's would repeat the copy of a table that is long gone.
    if len(modules) < 2 or _captured(group.device):
        return False
    casts = _casts(group, modules)
    if casts is None:
        return False
    # The old ones go before the new ones come: two sets at once may not fit into memory.
    for module in modules:
        module.outdate_weight()  # (What follows may fail.)
        module._fp8_weight_q = None
    outputs = [_new_outputs(module.weight) for module in modules]
    casts.run_into(outputs, group.largest, live=group.live, observe=group.observed)
    for module, (rows, rows_t, scale_inv) in zip(modules, outputs, strict=True):
        if module._fp8_in_out:  # Stored [K, N]: what is one's transpose is the other's rows.
            rows, rows_t = rows_t, rows
        module._fp8_weight_q = Quantized(rows, rows_t, scale_inv, scale_inv)
        note_quantized(module, module.weight, observe)
    return True


def _casts(group: Group, modules: list[Any]) -> Any:
    """The launch for these modules; None where there is no Triton."""
    tables = modules[0]._fp8_bank.casts.setdefault(TABLES, {})
    read = [(module.weight.detach(), *module._fp8_weight_slot) for module in modules]
    # Of a weight its shape too: `.data` may be a view of what it was.
    places = [(each[0].shape, *(tensor.data_ptr() for tensor in each)) for each in read]
    known, casts = tables.get(group, (None, None))
    if known != places:
        later = torch.empty(0, device=group.device)
        casts = many_casts([(weight, later, later, later, *slot) for weight, *slot in read])
        tables[group] = places, casts
    return casts


def _new_outputs(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, their transpose, scale_inv), uninitialised."""
    height, width = weight.shape
    device = weight.device
    return (
        torch.empty(height, width, dtype=numerics.E4M3, device=device),
        torch.empty(width, height, dtype=numerics.E4M3, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )


def _captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
