"""The short way of a call that is like the one before.

What a call has to find out first (is the region another one, does the input fit, has the weight
moved, what are the constants of the three GEMMs) takes as long as launching its kernels. It is all
the same from step to step, so it is noted once, and what follows checks the note.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8patch import regions
from fp8patch.modules.gemms import GemmSpec
from fp8patch.modules.weights import is_fresh


class Ready(NamedTuple):
    """What was true in the call that found out, and what it found.

    Attributes:
        region: The open region, the same object as long as nothing changes (`canonical`).
        dtype, device, features: Of the input.
        autocast: The dtype that autocast casts to, or None where it is off.
        grads: Gradients are enabled.
        spec: The constants of such a call.
    """

    region: regions.Region
    dtype: torch.dtype
    device: torch.device
    features: int
    autocast: torch.dtype | None
    grads: bool
    spec: Any


def note(module: Any, input: Tensor, region: regions.Region, spec: Any) -> None:
    """Let later calls like this one be short. Only for observed calls inside a root."""
    device = input.device
    module._fp8_ready = Ready(
        region,
        input.dtype,
        device,
        input.shape[-1],
        autocast_dtype(device.type),
        torch.is_grad_enabled(),
        spec,
    )


def autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast casts to on a device of this type, or None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def recall(module: Any, weight: Tensor, input: Tensor, region: regions.Region) -> GemmSpec | None:
    """The constants of this call, if it is like the one that was noted; None: find out."""
    ready = recall_any(module, input, region)
    if ready is None or not is_fresh(module, weight):
        return None
    spec: GemmSpec = ready.spec
    return spec


def recall_any(module: Any, input: Tensor, region: regions.Region) -> Ready | None:
    """What was noted, if region, input and modes are as they were; the weight is not looked at."""
    ready: Ready | None = module._fp8_ready
    if ready is None or ready.region is not region or not regions.state.roots:
        return None
    if ready.dtype is not input.dtype or ready.features != input.shape[-1]:
        return None
    if ready.device != input.device or ready.grads is not torch.is_grad_enabled():
        return None
    if ready.autocast is not autocast_dtype(ready.device.type):
        return None
    bank = module._fp8_bank
    if bank.entry != regions.state.entry or bank.observation is not None or bank.late.waits:
        return None
    return ready
