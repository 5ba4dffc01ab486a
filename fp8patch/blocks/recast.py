"""Of what attention keeps for its backward, no transposed cast is kept beside it.

The layer behind attention casts its output, and its weight gradient wants the transpose: a byte an
element, while attention keeps the very tensor in BF16. Backward makes the transpose from that,
which is one more read of it.
"""

from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from fp8patch.blocks.graph_casts import E5M2, output, read_instead, readers, without_transpose
from fp8patch.ops.transpose_again import TRANSPOSE_AGAIN

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
# What leads from attention's output to the cast, and computes nothing.
_MOVES = (
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.permute.default,
    _aten.transpose.int,
)


def recast(graph: Graph, casts: list[Node]) -> int:
    """How many of `casts` are of attention's output, and make their transpose in backward now."""
    backward = _backward(graph)
    return sum(_move(graph, cast, backward) for cast in casts if cast not in backward)


def _backward(graph: Graph) -> set[Node]:
    """What depends on a gradient."""
    found: set[Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and node.name.startswith("tangents")
        if is_gradient or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _move(graph: Graph, cast: Node, backward: set[Node]) -> bool:
    # (Of which nobody reads the rows, that cast is made in backward as it is: `fprop: bf16`.)
    if cast.args[E5M2] or not readers(cast, 0) or not _is_kept(cast.args[0], backward):
        return False
    after = _beside(readers(cast, 1), backward)
    if after is None:
        return False
    _, transpose, scale_inv, _ = cast.meta["val"]
    with graph.inserting_before(cast.next):
        scale_inv = output(graph, cast, 2, scale_inv)
    with graph.inserting_after(after):
        again = graph.call_function(TRANSPOSE_AGAIN, (cast.args[0], scale_inv, after))
    again.meta["val"] = transpose
    read_instead(graph, cast, {1: again})
    without_transpose(cast)
    return True


def _beside(readers: list[Node], backward: set[Node]) -> Node | None:
    """The cast that the weight gradient reads beside the transpose, which comes to it through
    `readers`."""
    for reader in readers:
        if reader not in backward:
            return _beside(list(reader.users), backward)
        for operand in reader.all_input_nodes:
            # Where FP8 is emulated, its values are widened first.
            found = operand.args[0] if operand.target is _CONVERT else operand
            if isinstance(found, Node) and found in backward:
                return found
    return None


def _is_kept(node: Any, backward: set[Node]) -> bool:
    """Is this the output of attention, which its backward reads?"""
    while isinstance(node, Node) and node.target in _MOVES:
        node = node.args[0]
    return (
        isinstance(node, Node)
        and node.target is getitem
        and isinstance(node.args[0], Node)
        and "attention" in str(node.args[0].target)
        and not backward.isdisjoint(node.users)
    )
