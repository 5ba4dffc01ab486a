"""A gradient that lies in memory in another form than it is cast in is cast from there.

What a block gets as the gradient of its output is FP32 where its residual stream is, and is rounded
to BF16 for the Linear that comes last; behind a dropout it is masked and scaled as well. Inductor
writes that to memory, in a kernel of its own as a rule, and only the cast reads it.

This pays where the gradient is in memory in any case: it is an input of the graph; or somebody else
reads it, too, as the residual does, and there is a mask, which takes more than rounding on the way.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8patch.blocks import patterns

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
# What FP32 is rounded to.
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class _Stored(NamedTuple):
    """What a value is computed of: x, and a mask and a factor where there was a dropout."""

    x: Node
    mask: Node | None = None
    factor: float = 1.0


def _dropout_backward(grad: Tensor, mask: Tensor) -> Tensor:
    result: Tensor = _aten.native_dropout_backward(grad, mask, patterns.NUMBER)
    return result


def cast_as_stored(graph: Graph, cast: Node) -> bool:
    """Is what this cast (`quantize`) reads only rounded or masked for it? Then it is replaced."""
    _, scale, amax, counts, limit, e5m2, live, *flags = cast.args
    path = list(patterns.views(cast))
    found = None if live or not path else _stored(path[-1])
    form = None if found is None else _form(path[-1], found)
    if found is None or form is None:
        return False
    x, mask = (None if n is None else patterns.through(path, n) for n in (found.x, found.mask))
    with graph.inserting_before(cast):
        fused = graph.call_function(
            torch.ops.fp8patch.quantize_form.default,
            (x, mask, form, scale, amax, counts, limit, e5m2, *flags),
            {"factor": found.factor},
        )
    fused.meta["val"] = cast.meta["val"]
    cast.replace_all_uses_with(fused)
    graph.erase_node(cast)
    return True


def _stored(value: Node) -> _Stored:
    """One rounding and one dropout behind `value`, in any order, are taken away."""
    found = _Stored(value)
    for take in (_unrounded, _undropped, _unrounded):
        if found.x is value or patterns.is_read_once(found.x):
            found = take(found)
    return found


def _unrounded(found: _Stored) -> _Stored:
    if found.x.target is _CONVERT:
        x, dtype = found.x.args
        if isinstance(x, Node) and dtype in _NAMES and _dtype(x) is torch.float32:
            return found._replace(x=x)
    return found


def _undropped(found: _Stored) -> _Stored:
    dtypes = _dtype(found.x), torch.bool
    read = patterns.match_typed(found.x, _dropout_backward, dtypes)
    if read is None:
        return found
    (grad, mask), factor = read
    assert grad is not None
    return _Stored(grad, mask, factor)


def _form(value: Node, found: _Stored) -> str | None:
    """What `quantize_form` calls it, if that can compute it, and if it pays."""
    if found.x is value or not _is_in_memory(found):
        return None
    dropout = found.mask is not None
    if _dtype(value) == _dtype(found.x):
        return "dropout" if dropout else None
    return f"{'dropout_' if dropout else ''}to_{_NAMES[_dtype(value)]}"


def _is_in_memory(found: _Stored) -> bool:
    x: Any = found.x
    if found.mask is not None and not patterns.is_read_once(x):
        return True
    while x.target in patterns.VIEWS:
        x = x.args[0]
    return bool(x.op == "placeholder")


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
