"""What a converted model's slots say: `metrics`, and `invalidate` for weights changed unseen."""

from torch import nn

from fp8patch.modules.base import Float8Module
from fp8patch.numerics import FLUSHED, NON_FINITE, SATURATED, SEEN
from fp8patch.scaling import Bank
from fp8patch.slots import ROLES

__all__ = ["invalidate", "metrics"]


def metrics(model: nn.Module) -> dict[str, float]:
    """Scales, amax and ratios of every slot that saw something, ready for a logger.

    Keys are `fp8/<path>/<role>/<what>`, with roles `input`, `weight` and `grad_output`, and
    `amax` (the last one observed), `scale` (0: not set yet, or not used by the recipe), and
    `saturated`, `flushed` and `non_finite` as parts of all elements cast so far. Modules that read
    one tensor share a slot and report the same. Empty for a model that is not converted.

    Reads each device once, however many slots there are.
    """
    found: dict[str, float] = {}
    for bank in _banks(model):
        for path, role, values in bank.numbers():
            amax, scale, *counts = values
            seen = counts[SEEN]
            if not seen and not scale:
                continue
            prefix = f"fp8/{path}/{ROLES[role]}"
            found[f"{prefix}/amax"] = amax
            found[f"{prefix}/scale"] = scale
            for name, column in _RATIOS.items():
                found[f"{prefix}/{name}"] = counts[column] / seen if seen else 0.0
    return found


_RATIOS = {"saturated": SATURATED, "flushed": FLUSHED, "non_finite": NON_FINITE}


def invalidate(model: nn.Module) -> None:
    """Quantise every weight of `model` anew at its next use.

    For weights that were changed in a way that PyTorch does not show: written through `.data` or
    another view of their memory, while an optimizer that owns them is known.
    """
    for module in model.modules():
        if isinstance(module, Float8Module):
            module.outdate_weight(replaced=True)


def _banks(model: nn.Module) -> list[Bank]:
    banks: dict[int, Bank] = {}
    for module in model.modules():
        if isinstance(module, Float8Module):
            banks[id(module._fp8_bank)] = module._fp8_bank
    return list(banks.values())
