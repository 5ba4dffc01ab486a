"""What the first step needs not keep: transposes that backward can make of what autograd keeps.

Where blocks are compiled, the first step is still eager (see observation.py), and its activations
were the peak of a whole run: 35 GiB of a ViT that needs 28 from then on. Two thirds of that
difference are the casts of what an activation returns, whose argument autograd keeps in any case,
and of attention's output, which attention keeps itself. Backward makes them again here: from the
same numbers by the same operations, so to the last bit. It costs a read and a write more, in one
step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8patch.ops.quantize import is_cold, quantize_now
from fp8patch.slots import Slot

__all__ = ["Again", "find_again"]

_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "TransposeBackward0", "PermuteBackward0")
# What these keep, and can be computed from.
_KEEPS = {"GeluBackward0": ("self",), "SiluBackward0": ("self",), "MulBackward0": ("self", "other")}


class Again(NamedTuple):
    """The transpose of a cast, to be made in backward.

    Attributes:
        read: Of what; autograd keeps these already.
        make: They -> the transpose [padded K, padded M].
    """

    read: tuple[Tensor, ...]
    make: Callable[..., Tensor]


def find_again(input: Tensor, slot: Slot, limit: float, live: bool) -> Again | None:
    """How to cast `input` [..., K] once more with what `slot` says now; None if that takes memory.

    What is written to `input` behind autograd's back (`.data`) after its activation is not seen.

    Args:
        limit, live: Of the cast, as `quantize` takes them.
    """
    # (Checkpointing keeps nothing, and would compute the block again for our question.)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    try:
        found = _kept(input)
    except RuntimeError:  # Written to since: the activation's own backward will say so.
        return None
    if found is None:
        return None
    function, read = found
    live = live or is_cold(slot.scale)
    make = partial(_transposed_cast, function, slot.scale.clone(), limit, live)
    return Again(tuple(tensor.detach() for tensor in read), make)


def _kept(input: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]] | None:
    """How to compute `input` from what autograd keeps, or None."""
    node: Any = input.grad_fn
    if node is None:
        return None
    if input._version == 0 and (kind := node.name()) in _KEEPS:
        if not all(_is_kept_as_it_is(node, name) for name in _KEEPS[kind]):
            return None
        read = tuple(getattr(node, f"_saved_{name}") for name in _KEEPS[kind])
        if any(each is None for each in read):  # One factor of a product that has no gradient.
            return None
        if kind == "GeluBackward0":
            return partial(F.gelu, approximate=node._saved_approximate), read
        return (F.silu if kind == "SiluBackward0" else torch.mul), read
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    attention = node is not None and node.name().startswith("ScaledDotProduct")
    return (_itself, (input,)) if attention and _is_kept_as_it_is(node, "output") else None


def _is_kept_as_it_is(node: Any, name: str) -> bool:
    """Does autograd keep this, and no hook something else in its place (checkpointing of the
    activation alone)?"""
    saved = getattr(node, f"_raw_saved_{name}", None)
    # (Asking what lies there would run the hook.)
    return getattr(saved, "unpack_hook", saved) is None and saved is not None


def _itself(x: Tensor) -> Tensor:
    return x


def _transposed_cast(
    function: Callable[..., Tensor], scale: Tensor, limit: float, live: bool, *read: Tensor
) -> Tensor:
    x = function(*read)
    unused = torch.zeros((), device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    return quantize_now(rows, scale, unused, unused, limit, False, live, False, True, False)[1]
