"""The quantised weight of a module: when it is out of date, and how it is replaced.

It holds both layouts, [N, K] for fprop and [K, N] for dgrad, and is made once an optimizer step
where an optimizer is known to own the weight. Any other weight may be changed through `.data`,
which moves no version counter: what was made of it is good for one outermost entry (regions.py).
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch import numerics
from fp8patch.modules.gemms import Quantized, cast
from fp8patch.ops.quantize import ALIGNMENT
from fp8patch.recipe import Recipe
from fp8patch.scaling import Bank
from fp8patch.slots import WEIGHT, Slot, limit


@dataclass(slots=True)
class WeightState:
    """What a module knows about its weight, besides the quantised form.

    Attributes:
        tensor, address: What was quantised last, and where it lay.
        version: Its version counter then, or after the optimizer's last step.
        entry: The outermost entry at which that was.
        owner: The optimizer that steps it, and says so.
        outdated: It has changed since it was quantised.
        unseen: The slot has not observed it as it is now.
        replaced: It is another weight altogether, and the slot's scale says nothing about it.
        gathered: Between forwards there is no whole weight (FSDP, offloading): a new tensor each
            time is the same weight.
        shard: The version of what there is instead, when it was last seen.
        ahead: Who compiled the forward quantises the gathered weight ahead of each call.
    """

    tensor: weakref.ref[Tensor] | None = None
    address: int = 0
    version: int = 0
    entry: int = -1
    owner: weakref.ref[torch.optim.Optimizer] | None = None
    outdated: bool = True
    unseen: bool = True
    replaced: bool = False
    gathered: bool = False
    shard: int | None = None
    ahead: bool = False

    def moved(self, weight: Tensor) -> bool:
        """Is `weight` another tensor than the one that was quantised?"""
        if self.tensor is None:
            return False
        # By identity: comparing weak references compares what they refer to.
        return self.tensor() is not weight or self.address != weight.data_ptr()

    def written(self, weight: Tensor) -> bool:
        """Was it written in place, by something else than the optimizer?"""
        return self.tensor is not None and self.version != version(weight)

    def settled(self, weight: Tensor) -> bool:
        """Does whatever changes `weight` announce it? A frozen one is changed by no optimizer, but
        by an adapter that is merged into it.
        """
        return self.owner is not None and self.owner() is not None and bool(weight.requires_grad)

    def took_step(self, weight: Tensor, owner: weakref.ref[torch.optim.Optimizer]) -> None:
        """The optimizer that owns `weight` has just stepped."""
        self.owner = owner
        self.outdated = self.unseen = True
        self.version = self.shard = version(weight)

    def saw_shard(self, weight: Tensor) -> None:
        """Between forwards there is only `weight`, a part of the whole one or a stand-in."""
        known, self.shard = self.shard, version(weight)
        if known is not None and known != self.shard:
            self.change()

    def change(self, replaced: bool = False) -> None:
        """The weight is not what was quantised any more."""
        self.outdated = self.unseen = True
        self.replaced = self.replaced or replaced


def version(weight: Tensor) -> int:
    """Its version counter; a tensor made under inference_mode has none."""
    return 0 if weight.is_inference() else weight._version


def is_whole(weight: Tensor) -> bool:
    """No shard of FSDP's (a DTensor, or a flat piece), and not offloaded to meta by a hook."""
    plain = type(weight) in (nn.Parameter, Tensor)
    return plain and weight.dim() == 2 and not weight.is_meta


def is_fresh(module: Any, weight: Tensor) -> bool:
    """Is there nothing for `prepare` to do, in a call that observes?"""
    known: WeightState = module._fp8_weight_state
    if known.outdated or known.unseen or known.tensor is None or known.tensor() is not weight:
        return False
    if known.address != weight.data_ptr() or known.version != version(weight):
        return False
    return known.entry == module._fp8_bank.entry or known.settled(weight)


def prepare(module: Any, observe: bool, calibrating: bool = False) -> None:
    """Bind the slots and quantise the weight, where either is out of date."""
    bank: Bank = module._fp8_bank
    weight, known = module.weight, module._fp8_weight_state
    if module._fp8_device != weight.device:
        bank.bind(module)
    moved, written = known.moved(weight), known.written(weight)
    # (What was gathered has a version and an address that say nothing of the shard's.)
    if known.replaced or ((written or moved) and not known.gathered):
        _forget_if_clipping(module, weight)
        known.replaced = False
    trusted = settled_owner(module) and not known.unseen
    if (
        known.tensor is None
        or known.outdated
        or moved
        or written
        or (known.unseen and observe)
        or not (trusted or known.entry == bank.entry)
    ):
        # Observed once between two updates, so that what is counted does not depend on how often
        # the cast had to be repeated (more often before the optimizer is known: after a resume).
        first = observe and module._fp8_path not in bank.weights_seen
        _quantize_weight(module, weight, first, calibrating)
        note_quantized(module, weight, observe)


def note_quantized(module: Any, weight: Tensor, observe: bool) -> None:
    """`weight` was quantised as it is now."""
    bank: Bank = module._fp8_bank
    known: WeightState = module._fp8_weight_state
    if observe:
        bank.weights_seen.add(module._fp8_path)
    if known.moved(weight):
        module._fp8_ready = None  # It may have another shape or dtype: ask again whether it fits.
    known.tensor, known.address = weakref.ref(weight), weight.data_ptr()
    known.version, known.entry = version(weight), bank.entry
    known.outdated = False
    # An evaluation between two steps observes nothing and uses the scales of the last one: the next
    # training forward has yet to see this weight.
    known.unseen = not observe


def _forget_if_clipping(module: Any, weight: Tensor) -> None:
    """Drop the delayed scale of a weight that was replaced by a far larger one.

    An optimizer moves a weight a little, and the history follows. A scale that was measured on
    another weight may clip most of this one for steps on end. Not where it merely outgrew the
    history: a resumed run has to clip as the original did. Reads the device, at rare events only.
    """
    bank: Bank = module._fp8_bank
    recipe: Recipe = module._fp8_recipe
    largest = limit(recipe, WEIGHT)
    if recipe.scaling != "delayed":
        return
    if float(numerics.amax(weight.detach()) * module._fp8_weight_slot.scale) > 2 * largest:
        bank.forget(module._fp8_path)
        module._fp8_weight_state.unseen = True


def settled_owner(module: Any) -> bool:
    """Does whatever changes the weight announce it?"""
    known: WeightState = module._fp8_weight_state
    return known.settled(module.weight)


def _scale_that_fits(rows: Tensor, scale: Tensor, largest: float) -> Tensor:
    """The delayed scale, or the live one where a weight that nobody watches has outgrown it.

    Only where it did so by far: a resumed run, whose optimizer has yet to be met, has to clip as
    the original did. Decided on the device, without a sync.
    """
    amax = numerics.amax(rows)
    fits = (scale > 0) & (amax * scale <= 2 * largest)
    return torch.where(fits, scale, numerics.scale_from_amax(amax, largest))


# Tensors born under inference_mode could not be saved for a later backward.
@torch.inference_mode(False)
@torch.no_grad()
def _quantize_weight(module: Any, weight: Tensor, observe: bool, calibrating: bool) -> None:
    recipe: Recipe = module._fp8_recipe
    in_out = module._fp8_in_out
    # Where no padding differs, a weight [K, N] is read as it lies: its transpose is the rows.
    swap = in_out and recipe.scaling != "rowwise" and not any(s % ALIGNMENT for s in weight.shape)
    rows = weight.detach().t() if in_out and not swap else weight.detach()
    missing = -rows.shape[0] % ALIGNMENT
    if missing:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    slot: Slot = module._fp8_weight_slot
    if recipe.scaling == "delayed" and not settled_owner(module):
        slot = slot._replace(scale=_scale_that_fits(rows, slot.scale, limit(recipe, WEIGHT)))
    new = cast(
        rows,
        slot,
        limit(recipe, WEIGHT),
        e5m2=False,
        rowwise=recipe.scaling == "rowwise",
        # A frozen weight is changed by merging an adapter into it, behind everybody's back, and
        # there is no telling by how much.
        live=recipe.scaling == "current" or calibrating or not weight.requires_grad,
        observe=observe,
        transpose=True,
    )
    if swap:
        new = Quantized(new.rows_t, new.rows, new.scale_inv_t, new.scale_inv)
    old: Quantized | None = module._fp8_weight_q
    known: WeightState = module._fp8_weight_state
    # Between two steps, what FSDP gathers once more is the same weight.
    same = known.gathered and not known.outdated
    if old is None or same or not settled_owner(module) or not _fit(old.rows, new.rows):
        # Fresh tensors: a graph that is still to run backward may hold the old ones, and what it
        # holds is right (the weight may not even have changed).
        module._fp8_weight_q = new
        return
    # In place: as in stock PyTorch, a backward through a weight that has since been stepped raises.
    for target, source in zip(old, new, strict=True):
        target.copy_(source)


def _fit(old: Tensor, new: Tensor) -> bool:
    """Can one be written over the other? (The model may have moved to another device.)"""
    return old.shape == new.shape and old.device == new.device
