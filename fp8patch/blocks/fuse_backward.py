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
from fp8patch.blocks.fuse import ACTIVATIONS, Activation
from fp8patch.blocks.graph_casts import E5M2, LIMIT, SUMS, output, read_instead, without_transpose
from fp8patch.ops import activation_grads

assert {activation.form for activation in ACTIVATIONS} == activation_grads.GRADS.keys()


class _Cast(NamedTuple):
    """A cast (`quantize`), and its argument with what it is a view of."""

    node: Node
    path: list[Node]


# A gradient's cast, and the gradient that it is computed of.
_Gradient = tuple[_Cast, Node]


def fuse_backward(graph: Graph, casts: list[Node]) -> int:
    """How many of `casts` are of activations whose gradients are cast too, and were fused."""
    found = [_Cast(node, list(patterns.views(node))) for node in casts]
    found = [cast for cast in found if cast.path]
    return sum(_fuse(graph, cast, found) for cast in found)


def _fuse(graph: Graph, forward: _Cast, casts: list[_Cast]) -> bool:
    """`forward` casts an activation? Then its transpose comes from the cast of the gradient."""
    for activation in ACTIVATIONS:
        read = patterns.match(forward.path[-1], activation.function, activation.arity)
        if read is None or forward.node.args[E5M2]:
            continue
        grads: list[_Gradient] = []
        for i in range(activation.arity):
            # All are of one gradient: `y * silu(x)` looks as the gradient of y would, for another.
            grads += _gradients(activation, i, read, casts, [grad for _, grad in grads[:1]])[:1]
        if len(grads) == activation.arity and _agree(forward, grads):
            _replace(graph, activation.form, forward, read, grads)
            return True
    return False


def _gradients(
    activation: Activation,
    index: int,
    read: list[Node | None],
    casts: list[_Cast],
    of: list[Node],
) -> list[_Gradient]:
    """Casts of the gradient of `read[index]`, computed of any gradient, or of what `of` names."""
    function = patterns.gradient(activation.function, index)
    found = []
    for cast in casts:
        *arguments, grad = patterns.match(cast.path[-1], function, activation.arity + 1) or [None]
        same = all(a is None or a is b for a, b in zip(arguments, read, strict=False))
        if grad is not None and same and (not of or grad in of):
            found.append((cast, grad))
    return found


def _agree(forward: _Cast, grads: list[_Gradient]) -> bool:
    first, *others = [cast.node.args for cast, _ in grads]
    # What lies between a layer and the activation may be any view: of one value, matrices of other
    # sizes are cast then. (Sizes by name: see patterns.py.)
    matrices = [cast.path[0].meta["val"] for cast in (forward, *(cast for cast, _ in grads))]
    if len({str(matrix.shape) for matrix in matrices}) > 1:
        return False
    same_terms = all(args[LIMIT:SUMS] == first[LIMIT:SUMS] for args in others)
    # With two gradients, no kernel adds up columns.
    plain = not others or not any(args[SUMS] for args in (first, *others))
    return same_terms and plain


def _replace(
    graph: Graph,
    form: str,
    forward: _Cast,
    read: list[Node | None],
    grads: list[_Gradient],
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


def _second(grads: list[_Gradient]) -> list[Any]:
    """What the operator returns of a second gradient."""
    if len(grads) == 2:
        found: list[Any] = list(grads[1][0].node.meta["val"][:3])
        return found
    rows, *_ = grads[0][0].node.meta["val"]
    return [rows.new_empty(0, 0), rows.new_empty(0, 0), rows.new_empty(0, dtype=torch.float32)]
