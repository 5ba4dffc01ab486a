"""FP8 state inside `state_dict()`: one plain tensor a module, for `torch.save(model.state_dict())`.

Opt-in. Never a pickle: what is loaded with `weights_only=True` stays loadable.
"""

from typing import Any

import torch
from torch import Tensor

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
    """Undo `pack_state`."""
    bank: Bank = module._fp8_bank
    values = packed.cpu()
    bank.stepped = bool(values[0])
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
