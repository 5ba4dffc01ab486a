"""What a converted model's numbers say: `metrics` and `measure_sqnr`; and `invalidate`."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch import numerics, regions
from fp8patch.errors import PlanError
from fp8patch.modules.base import Float8Module
from fp8patch.numerics import FLUSHED, NON_FINITE, SATURATED, SEEN
from fp8patch.plan.patterns import matches
from fp8patch.scaling import Bank
from fp8patch.slots import GRAD_OUTPUT, INPUT, ROLES, WEIGHT, grad_is_e5m2, limit

__all__ = ["invalidate", "measure_sqnr", "metrics"]


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


# -- signal to noise ------------------------------------------------------------------------------


@contextmanager
def measure_sqnr(
    model: nn.Module, layers: str | list[str] = "*", *, rows: int = 1024
) -> Iterator[dict[str, float]]:
    """Measure how much of each tensor survives its cast to FP8, in the steps inside the block.

    Yields a dict that is filled when the block ends, and reads the device once, there:
    `fp8/<path>/<role>/sqnr` in dB, with roles `input`, `weight` and `grad_output`; what was never
    cast, or cast without any error, is left out. Costs more than the step itself, and runs compiled
    models in eager: for a step now and then.

        with fp8patch.measure_sqnr(model) as found:
            with fp8patch.autocast():
                loss = model(**batch).loss
            loss.backward()
        tracker.log({**fp8patch.metrics(model), **found})

    Args:
        layers: Globs over module paths: what to measure.
        rows: Rows of a tensor to look at, evenly spaced.

    Raises:
        PlanError: A pattern matches no converted module.
    """
    patterns = [layers] if isinstance(layers, str) else layers
    gemms = [m for m in model.modules() if isinstance(m, Float8Module)]
    chosen = [m for m in gemms if any(matches(p, [m._fp8_path]) for p in patterns)]
    for pattern in patterns:
        if not any(matches(pattern, [module._fp8_path]) for module in gemms):
            raise PlanError(
                f"measure_sqnr: {pattern!r} matches none of the {len(gemms)} converted modules."
            )
    found: dict[str, float] = {}
    sums: dict[tuple[str, int], Tensor] = {}
    looks = _Looks(sums, rows)
    handles = [module.register_forward_hook(looks.hook, with_kwargs=True) for module in chosen]
    compiles = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
            yield found
    finally:
        for handle in handles:
            handle.remove()
    for (path, role), (signal, noise) in zip(sums, _read(list(sums.values())), strict=True):
        if signal > 0 and noise > 0:
            found[f"fp8/{path}/{ROLES[role]}/sqnr"] = 10 * math.log10(signal / noise)


def _read(sums: list[Tensor]) -> list[list[float]]:
    home = sums[0].device if sums else None
    values: list[list[float]] = torch.stack([s.to(home) for s in sums]).tolist() if sums else []
    return values


class _Looks:
    """Adds up signal and noise of what passes."""

    def __init__(self, sums: dict[tuple[str, int], Tensor], rows: int) -> None:
        self._sums, self._rows = sums, rows

    def hook(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        region = regions.active()
        slot = module._fp8_input_slot
        if region is None or region.reopened or region.execution == "observe" or slot is None:
            return
        input = args[0] if args else kwargs["input"]
        self._add(module, INPUT, input, slot.scale)
        weight = module.weight.t() if module._fp8_in_out else module.weight
        if (module._fp8_path, WEIGHT) not in self._sums and type(module.weight) is nn.Parameter:
            self._add(module, WEIGHT, weight, module._fp8_weight_slot.scale)
        if output.requires_grad:
            scale = module._fp8_grad_slot.scale
            output.register_hook(lambda grad: self._add(module, GRAD_OUTPUT, grad, scale))

    @torch.no_grad()
    def _add(self, module: Any, role: int, tensor: Tensor, scale: Tensor) -> None:
        recipe = module._fp8_recipe
        whole = tensor.detach().reshape(-1, tensor.shape[-1])
        x = whole[:: max(1, whole.shape[0] // self._rows)]
        dtype = numerics.E5M2 if role == GRAD_OUTPUT and grad_is_e5m2(recipe) else numerics.E4M3
        if recipe.scaling == "rowwise":
            x_fp8, used = numerics.quantize_rowwise(x, dtype, limit(recipe, role))
        else:
            used = numerics.scale_from_amax(numerics.amax(whole), limit(recipe, role))
            if recipe.scaling == "delayed":
                used = torch.where(scale > 0, scale, used)
            x_fp8 = numerics.quantize(x, used, dtype)
        noise = numerics.dequantize(x_fp8, used.reciprocal()).double() - x.double()
        sums = torch.stack([x.double().square().sum(), noise.square().sum()])
        key = module._fp8_path, role
        self._sums[key] = self._sums[key] + sums if key in self._sums else sums
