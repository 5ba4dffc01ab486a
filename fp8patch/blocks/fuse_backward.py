"""What backward needs of an activation is cast in backward, with the activation's gradient.

The weight gradient of the layer behind an activation wants its input transposed, in FP8: one byte
an element, written by the forward's cast and kept until backward. But backward reads what the
activation was computed of in any case, for the activation's own gradient. So one operator there
casts that gradient, and on the way the activation again: as many bytes are written, and a byte an
element less is kept. Where the activation is gated (SiLU and mul), both gradients come from the one
operator, which reads gate, up and gradient once instead of twice.
"""

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fp8patch.blocks import patterns
from fp8patch.blocks.fuse import ACTIVATIONS
from fp8patch.blocks.graph_casts import E5M2, LIMIT, SUMS, output, read_instead, without_transpose
from fp8patch.ops import activation_grads

_aten = torch.ops.aten

# By form: (how many tensors they read, they -> the gradients), the gradient last: of x, and of y.
_GRADS: dict[str, tuple[tuple[int, patterns.Function], ...]] = {
    "gelu": (ACTIVATIONS["gelu_backward"],),
    "gelu_tanh": (ACTIVATIONS["gelu_tanh_backward"],),
    "silu_mul": (
        (3, lambda x, y, grad: _aten.silu_backward(grad * y, x)),
        (2, lambda x, grad: grad * _aten.silu(x)),
    ),
}
assert _GRADS.keys() == activation_grads.GRADS.keys()


class _Cast(NamedTuple):
    """A cast (`quantize`), and its argument with what it is a view of."""

    node: Node
    path: list[Node]


def fuse_backward(graph: Graph, casts: list[Node]) -> int:
    """How many of `casts` are of activations whose gradients are cast too, and were fused."""
    found = [_Cast(node, list(patterns.views(node))) for node in casts]
    found = [cast for cast in found if cast.path]
    return sum(_fuse(graph, cast, found) for cast in found)


def _fuse(graph: Graph, forward: _Cast, casts: list[_Cast]) -> bool:
    """`forward` casts an activation? Then its transpose comes from the cast of the gradient."""
    for form, grads in _GRADS.items():
        read = patterns.match(forward.path[-1], ACTIVATIONS[form][1], ACTIVATIONS[form][0])
        if read is None or forward.node.args[E5M2]:
            continue
        found = [_gradient(grad, read, casts) for grad in grads]
        known = [grad for grad in found if grad is not None]
        if len(known) == len(grads) and _agree(known):
            _replace(graph, form, forward, read, known)
            return True
    return False


def _gradient(
    grad: tuple[int, patterns.Function], read: list[Node], casts: list[_Cast]
) -> tuple[_Cast, Node] | None:
    """The cast of this gradient, and the gradient that it is computed of."""
    arity, function = grad
    for cast in casts:
        of = patterns.match(cast.path[-1], function, arity)
        if of is not None and of[:-1] == read[: arity - 1]:
            return cast, of[-1]
    return None


def _agree(grads: list[tuple[_Cast, Node]]) -> bool:
    first, *others = [cast.node.args for cast, _ in grads]
    same_terms = all(args[LIMIT:SUMS] == first[LIMIT:SUMS] for args in others)
    # With two gradients, no kernel adds up columns.
    plain = not others or not any(args[SUMS] for args in (first, *others))
    return same_terms and plain and len({grad for _, grad in grads}) == 1


def _replace(
    graph: Graph, form: str, forward: _Cast, read: list[Node], grads: list[tuple[_Cast, Node]]
) -> None:
    (cast, grad), *_ = grads
    slot, slot_y = (*(tuple(cast.node.args[1:4]) for cast, _ in grads), (None,) * 3)[:2]
    limit, e5m2, _, observe, _, sums = cast.node.args[LIMIT:]
    x, y = (*read, None)[:2]
    of = [None if node is None else patterns.through(cast.path, node) for node in (x, y, grad)]
    value = forward.node.meta["val"]
    with graph.inserting_before(cast.node):
        scale_inv = output(graph, forward.node, 2, value[2])
        fused = graph.call_function(
            torch.ops.fp8patch.activation_grads.default,
            (*of, form, scale_inv, *slot, *slot_y, limit, e5m2, observe, sums),
        )
        vals = [*cast.node.meta["val"], *_second(grads), value[1]]
        fused.meta["val"] = tuple(vals)
        outputs = [output(graph, fused, i, val) for i, val in enumerate(vals)]
    for (cast, _), first in zip(grads, (0, 4), strict=False):
        read_instead(graph, cast.node, dict(enumerate(outputs[first:7])))
        graph.erase_node(cast.node)
    read_instead(graph, forward.node, {1: outputs[7]})
    without_transpose(forward.node)


def _second(grads: list[tuple[_Cast, Node]]) -> list[Any]:
    """What the operator returns of a second gradient."""
    if len(grads) == 2:
        found: list[Any] = list(grads[1][0].node.meta["val"][:3])
        return found
    rows, *_ = grads[0][0].node.meta["val"]
    return [rows.new_empty(0, 0), rows.new_empty(0, 0), rows.new_empty(0, dtype=torch.float32)]
