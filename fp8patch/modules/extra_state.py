"""FP8 state inside `state_dict()`: one plain tensor a module, for `torch.save(model.state_dict())`.

Opt-in. Never a pickle: what is loaded with `weights_only=True` stays loadable.
"""

from typing import Any

import torch
from torch import Tensor

from fp8patch.errors import CheckpointError
from fp8patch.scaling import Bank
from fp8patch.slots import GRAD_OUTPUT, INPUT, WEIGHT, SlotState


def pack_state(module: Any) -> Tensor:
    """FP64 1-D: `due` of the bank, then each slot's [scale, pending, n, counts x 4, history x n].

    FP64 holds every FP32 and every count up to 2^53 exactly.
    """
    bank: Bank = module._fp8_bank
    values = [float(bank.due)]
    for role in (INPUT, WEIGHT, GRAD_OUTPUT):
        path = module._fp8_path
        state = bank.read(bank.siblings.get(path, path) if role == INPUT else path, role)
        values += [float(state.scale), float(state.amax), len(state.history)]
        values += [float(count) for count in state.counts] + state.history.double().tolist()
    return torch.tensor(values, dtype=torch.float64)


def unpack_state(module: Any, packed: Tensor) -> None:
    """Undo `pack_state`.

    Raises:
        CheckpointError: `packed` is not what `pack_state` makes.
    """
    bank: Bank = module._fp8_bank
    values = _checked(packed, module._fp8_path)
    bank.clock.stepped = bool(values[0])
    # The scales that follow are those of the weight that was loaded with them.
    module._fp8_weight_state.replaced = False
    at = 1
    for role in (INPUT, WEIGHT, GRAD_OUTPUT):
        scale, pending, length = (values[at + i] for i in range(3))
        stop = at + 7 + int(length)
        state = SlotState(
            values[at + 7 : stop].float(),
            scale.float(),
            pending.float(),
            values[at + 3 : at + 7].long(),
        )
        bank.write(module._fp8_path, role, state)
        at = stop


def _checked(packed: Any, path: str) -> Tensor:
    """As FP64 on the CPU, with three slots of a believable length in it."""
    if isinstance(packed, Tensor) and packed.dim() == 1 and packed.dtype == torch.float64:
        values = packed.detach().cpu()
        at = 1
        for _ in range(3):
            length = float(values[at + 2]) if at + 7 <= len(values) else -1.0
            at = at + 7 + int(length) if length >= 0 and length.is_integer() else len(values) + 1
        if at == len(values) and bool((values >= 0).all()):
            return values
    raise CheckpointError(
        f"{path}._extra_state is not FP8 state that this version has written. Load the state_dict "
        "without it: the scales are then measured anew."
    )
