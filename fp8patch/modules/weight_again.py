"""The same weights, cast together once more: found out by comparing what was true the last time.

What can join the one launch of a step, and where everything of it lies, takes ten microseconds a
module to find out. From step to step it is the same, so it is noted, and what follows compares.
"""

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from fp8patch.modules.weight_afresh import Group
from fp8patch.modules.weights import WeightState
from fp8patch.ops.quantize import is_cold
from fp8patch.slots import Slot

__all__ = ["Batch"]


class _Noted(NamedTuple):
    """One module and what was true of it: by identity, but for the address."""

    module: weakref.ref[Any]
    known: WeightState
    weight: weakref.ref[Tensor] | None
    address: int
    owner: weakref.ref[Any] | None
    quantized: Any
    slot: Slot


@dataclass(slots=True)
class Batch:
    """Modules whose weights were cast in one launch, in a training forward after a step.

    It holds modules and weights weakly, as the bank does that it is kept by.

    Attributes:
        asked: The ids of all modules that were asked about: those of the batch, and others.
        others: Where the others are among them.
        group: What they have in common.
        casts: The launch.
    """

    asked: list[int]
    others: list[int]
    group: Group
    casts: Any
    noted: list[_Noted]
    paths: frozenset[str]

    @staticmethod
    def of(members: list[Any], modules: list[Any], group: Group, casts: Any) -> "Batch | None":
        """Note what is true of `modules`, which were just cast; None where that can't be."""
        if not all(map(_is_plain, modules)):
            return None
        batched = set(map(id, modules))
        asked = list(map(id, members))
        others = [at for at, number in enumerate(asked) if number not in batched]
        paths = frozenset(module._fp8_path for module in modules)
        return Batch(asked, others, group, casts, list(map(_note, modules)), paths)

    def fits(self, members: list[Any], seen: set[str]) -> bool:
        """Has every weight been stepped by its optimizer, and nothing else happened to any?

        `seen` are the paths whose weights were observed since the scales moved last: none of these
        may be among them.
        """
        if self.asked != list(map(id, members)) or not self.paths.isdisjoint(seen):
            return False
        # (By id: a reference whose object is gone has no hash.)
        owners = {id(each.owner): each.owner for each in self.noted}.values()
        if any(owner is None or owner() is None for owner in owners):
            return False
        return all(map(_as_noted, self.noted)) and (
            # (No scale is read then.)
            self.group.live or not any(is_cold(each.slot.scale) for each in self.noted)
        )

    def note_quantized(self, bank: Any) -> None:
        """As weights.note_quantized for each: nothing else of what that notes has changed."""
        entry = bank.entry
        bank.weights_seen.update(self.paths)
        for each in self.noted:
            known = each.known
            known.outdated = known.unseen = False
            known.entry = entry


def _is_plain(module: Any) -> bool:
    weight = module._parameters.get("weight")
    return type(weight) is nn.Parameter and not weight.is_inference()


def _note(module: Any) -> _Noted:
    known: WeightState = module._fp8_weight_state
    quantized, slot = module._fp8_weight_q, module._fp8_weight_slot
    return _Noted(
        weakref.ref(module), known, known.tensor, known.address, known.owner, quantized, slot
    )


def _as_noted(noted: _Noted) -> bool:
    reference, known, weak_weight, address, owner, quantized, slot = noted
    module = reference()
    if module is None or weak_weight is None:
        return False
    attributes, weight = module.__dict__, weak_weight()
    return (
        weight is not None
        and known.outdated
        and not known.replaced
        and not known.gathered
        and known.owner is owner
        and known.tensor is weak_weight
        and known.address == address
        # As nn.Module finds it.
        and attributes["_parameters"].get("weight") is weight
        and "weight" not in attributes
        and weight.data_ptr() == address
        and weight._version == known.version
        and weight.requires_grad
        and weight.is_contiguous()
        and attributes["_fp8_weight_state"] is known
        and attributes["_fp8_weight_q"] is quantized
        and attributes["_fp8_weight_slot"] is slot
    )
