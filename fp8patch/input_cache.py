"""The last quantised input: what siblings (q, k and v; gate and up) share in eager mode.

One entry, because siblings are called one after the other, and because it keeps FP8 tensors alive.
It is forgotten where a forward or a backward ends. A compiler needs none of this: it merges equal
casts by itself.
"""

import weakref
from typing import Any

from torch import Tensor

# (the tensor, its version, key, the value)
_last: tuple["weakref.ref[Tensor]", int, Any, Any] | None = None


def recall(input: Tensor, key: Any) -> Any | None:
    """What `remember` was given for this very tensor, unchanged since, under an equal `key`."""
    if _last is None:
        return None
    reference, version, known, value = _last
    # By identity: comparing weak references would compare the tensors.
    if reference() is not input or input._version != version or known != key:
        return None
    return value


def remember(input: Tensor, key: Any, value: Any) -> None:
    """Keep `value`, made of `input`, until the next call."""
    global _last
    # A tensor made under inference_mode has no version: nobody could tell that it has changed.
    _last = None if input.is_inference() else (weakref.ref(input), input._version, key, value)


def forget() -> None:
    """A forward or a backward has ended."""
    global _last
    _last = None
