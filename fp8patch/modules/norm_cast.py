"""The cast that the reader of a norm will ask for, so that the norm can make it on its way.

The first step has shown which GEMM module is handed what the norm returns (or which siblings, who
share one slot). A norm leaves the cast where that module looks for it (input_cache.py). Should the
module ask for something else after all, or never be called, it makes its own: what is left there is
only ever served for that very tensor, unchanged, under the same terms.
"""

from typing import Any

import torch
from torch import Tensor

from fp8patch import regions
from fp8patch.modules.base import make_spec
from fp8patch.modules.gemms import input_key, needs_transpose
from fp8patch.modules.norm_function import Cast
from fp8patch.modules.obstacles import find_obstacle, precision_of
from fp8patch.modules.weights import is_whole
from fp8patch.scaling import Bank


def cast_for_reader(
    norm: Any, input: Tensor, dtype: torch.dtype, region: regions.Region, observe: bool
) -> Cast | None:
    """What the reader of `norm` will ask for when the norm of `input` is written in `dtype`.

    None where there is no reader, where it will run as its stock class, or where its scale can only
    be found in a second look at the tensor.
    """
    reader = _reader(norm)
    if reader is None:
        return None
    precision = precision_of(reader, region)
    wide = not torch.is_autocast_enabled(input.device.type) and dtype != reader.weight.dtype
    if wide or find_obstacle(reader, input, region, precision) is not None:
        return None
    spec = make_spec(reader, input, region, precision, observe)
    transpose = needs_transpose(spec, reader.weight)
    if spec.live or spec.rowwise or not (spec.fprop or transpose):
        return None
    slot = reader._fp8_input_slot
    key = input_key(slot, spec, transpose)
    return Cast(slot, spec.input_limit, observe, transpose, key)


def _reader(norm: Any) -> Any:
    """The module, bound to its slots; None if there is none, or none to be found."""
    bank: Bank = norm._fp8_bank
    path: str | None = norm._fp8_reader
    if path is None:
        return None
    module = bank.member(path) or _unbound(bank, path)
    if getattr(module, "_fp8_bank", None) is not bank:
        return None
    weight: Any = module.weight
    if not is_whole(weight):
        return None  # Sharded or offloaded until its own forward begins.
    if module._fp8_device != weight.device:
        bank.bind(module)
    return module


def _unbound(bank: Bank, path: str) -> Any:
    """The module of a resumed run, or of a copy, whose turn has not come yet."""
    for call in regions.state.roots[:1]:
        for module in call.root.modules():
            if vars(module).get("_fp8_bank") is bank and vars(module).get("_fp8_path") == path:
                return module
    return None
