"""All weights that an optimizer has stepped, quantised in one launch.

So are those whose changes nobody announces, in another one (weight_afresh.py). What is out of the
ordinary (never quantised before, replaced, written, gathered by FSDP, not on a GPU) is left to
`prepare`, one weight at a time.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch.modules import weight_afresh
from fp8patch.modules.weight_afresh import Group
from fp8patch.modules.weight_again import Batch
from fp8patch.modules.weights import is_fresh, note_quantized, settled_owner
from fp8patch.ops.fused import many_casts
from fp8patch.ops.quantize import ALIGNMENT, is_cold

# Where a bank's `casts` keep the last batch.
_AGAIN = "again"


@torch.inference_mode(False)
@torch.no_grad()
def refresh_together(members: list[Any], observe: bool) -> list[Any]:
    """Quantise what can be in one launch, and return the modules that are left.

    `members` are of one bank.
    """
    bank = members[0]._fp8_bank
    batch: Batch | None = bank.casts.get(_AGAIN)
    if batch is None or not observe or not batch.fits(members, bank.weights_seen):
        return _find_out(members, members, observe)
    modules = [each.module() for each in batch.noted]
    _launch(bank, batch.group, modules, batch.casts)
    batch.note_quantized(bank)
    others = [members[at] for at in batch.others]
    return _find_out(members, others, observe) if others else []


def _find_out(members: list[Any], asked: list[Any], observe: bool) -> list[Any]:
    """What can be cast together, of those that are `asked` about, and do it."""
    groups: dict[Group, list[Any]] = {}
    unsettled: dict[Group, list[Any]] = {}
    left = []
    for module in asked:
        weight = module.weight
        if is_fresh(module, weight) and not module._fp8_weight_state.gathered:
            continue  # As at most entries: what follows takes longer to find that out.
        settled = settled_owner(module)
        due = _is_due if settled else weight_afresh.is_due
        if not (_is_ordinary(module, weight, settled) and due(module, observe)):
            left.append(module)
            continue
        alike = weight_afresh.group_of(module, weight, observe, settled)
        (groups if settled else unsettled).setdefault(alike, []).append(module)
    if not groups:
        _let_go(members)
    for alike, modules in unsettled.items():
        if not weight_afresh.cast_together(alike, modules, observe):
            left.extend(modules)
    largest = max(groups.values(), key=len, default=[])
    for group, modules in groups.items():
        casts = _casts(group, modules) if len(modules) > 1 else None
        if casts is None:
            left.extend(modules)
            continue
        bank = modules[0]._fp8_bank
        _launch(bank, group, modules, casts)
        for module in modules:
            note_quantized(module, module.weight, observe)
        if group.observed and modules is largest and asked is members:
            bank.casts[_AGAIN] = Batch.of(members, modules, group, casts)
    return left


def _let_go(members: list[Any]) -> None:
    """Forget the tables of what optimizers step, where they are gone, and whoever would use them.

    (They keep quantised weights alive.)
    """
    casts = members[0]._fp8_bank.casts
    theirs = casts.keys() - {weight_afresh.TABLES}
    if theirs and not any(map(settled_owner, members)):
        for key in theirs:
            del casts[key]


def _is_ordinary(module: Any, weight: Tensor, settled: bool) -> bool:
    """Is all that may have happened to `weight` that its values have moved?"""
    known, quantized = module._fp8_weight_state, module._fp8_weight_q
    if type(weight) is not nn.Parameter or quantized is None or not _has_kernel(weight):
        return False
    if known.replaced or known.moved(weight) or known.written(weight) or weight.dim() != 2:
        return False
    if known.gathered and not settled:
        return False
    if weight.shape[0] % ALIGNMENT or weight.shape[1] % ALIGNMENT or not weight.is_contiguous():
        return False
    if weight.data_ptr() % 16:  # A part of a flat buffer: the kernel loads 16 bytes at a time.
        return False
    scaling = module._fp8_recipe.scaling
    warm = scaling == "current" or not is_cold(module._fp8_weight_slot.scale)
    return scaling != "rowwise" and warm and module._fp8_device == weight.device


def _is_due(module: Any, observe: bool) -> bool:
    known = module._fp8_weight_state
    return bool(known.outdated or (known.unseen and observe))


def _has_kernel(weight: Tensor) -> bool:
    return weight.is_cuda


def _casts(group: Group, modules: list[Any]) -> Any:
    """The launch for these modules; None where there is no Triton."""
    bank = modules[0]._fp8_bank
    jobs = [_job(module) for module in modules]
    addresses = [(job[0].data_ptr(), job[1].data_ptr(), job[4].data_ptr()) for job in jobs]
    # One table for observed and other casts: it keeps what it writes to alive, replaced or not.
    key = group.device, group.dtype, group.live
    known, casts = bank.casts.get(key, (None, None))
    if known != addresses:
        casts = many_casts(jobs)
        bank.casts[key] = addresses, casts
    return casts


def _launch(bank: Any, group: Group, modules: list[Any], casts: Any) -> None:
    bank.late.defer(
        partial(casts.run, group.largest, live=group.live, observe=group.observed),
        partial(_undo, modules, observed=group.observed),
    )


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
