"""Copies of biases in the dtype that the GEMM adds, all made in one launch.

The kernel adds a bias in the dtype of its output, and most biases are FP32: cast where each is
used, they cost a launch a layer. So they are copied where an outermost training forward begins. A
copy is good for that forward alone, and only for the same Parameter, at the same address, in the
same version: a bias may change by any means (`.data`, a fused optimizer) without announcing it.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch.modules.gemms import GemmSpec
from fp8patch.modules.weights import version
from fp8patch.ops.gemm import fused_bias_dtype


@dataclass(slots=True)
class BiasCopy:
    """What was copied at the outermost entry `entry` (-1: nothing yet), and where to.

    `asked`: a call has asked for it since then. (A compiled one never does: it fuses the cast.)
    """

    copy: Tensor
    tensor: weakref.ref[Tensor]
    address: int
    version: int = 0
    entry: int = -1
    asked: bool = True

    @staticmethod
    def of(bias: Tensor, dtype: torch.dtype) -> "BiasCopy":
        """Room for a copy."""
        with torch.inference_mode(False):
            room = torch.empty(bias.shape, dtype=dtype, device=bias.device)
        return BiasCopy(room, weakref.ref(bias), bias.data_ptr())


def want(module: Any, spec: GemmSpec) -> None:
    """Keep a copy for calls like this one, from the next entry on; drop one that they don't use."""
    bias = module.bias
    dtype = None if spec.emulate else fused_bias_dtype(spec.out_dtype, spec.rowwise)
    if not spec.fprop or dtype is None or not _is_whole(module, bias) or bias.dtype == dtype:
        module._fp8_bias = None
    else:
        module._fp8_bias = BiasCopy.of(bias, dtype)


def current(module: Any, bias: Tensor | None) -> Tensor | None:
    """The copy of `bias`, if it was made in this entry and nothing has changed since."""
    known: BiasCopy | None = module._fp8_bias
    if known is None or bias is None:
        return None
    known.asked = True
    if known.tensor() is not bias:
        return None
    if known.address != bias.data_ptr() or known.version != version(bias):
        return None
    return known.copy if known.entry == module._fp8_bank.entry else None


@torch.inference_mode(False)
@torch.no_grad()
def refresh(members: Iterable[Any]) -> None:
    """Make the copies of this entry."""
    copies: list[Tensor] = []
    biases: list[Tensor] = []
    for module in members:
        known: BiasCopy | None = module._fp8_bias
        if known is None or not known.asked:
            continue
        bias: Tensor = module.bias
        if not _is_whole(module, bias):
            module._fp8_bias = None
            continue
        if known.tensor() is not bias or known.address != bias.data_ptr():
            known = module._fp8_bias = BiasCopy.of(bias, known.copy.dtype)
        known.entry, known.version, known.asked = module._fp8_bank.entry, version(bias), False
        copies.append(known.copy)
        biases.append(bias)
    if copies:
        # One launch for those of one dtype and device, as they are.
        torch._foreach_copy_(copies, biases)


def _is_whole(module: Any, bias: Any) -> bool:
    """A plain Parameter: no shard (FSDP), and not offloaded by a hook."""
    plain = type(bias) is nn.Parameter and not bias.is_meta
    return plain and not module._fp8_weight_state.gathered
