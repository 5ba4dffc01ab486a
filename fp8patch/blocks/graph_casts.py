"""Casts (`quantize`) in a graph: where their arguments are, and changing who reads what."""

from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

LIMIT, E5M2, LIVE, OBSERVE, TRANSPOSE, SUMS = range(4, 10)


def casts_with_transpose(graph: Graph) -> list[Node]:
    """Casts that return a transpose, and whose scale is known before."""
    casts = graph.find_nodes(op="call_function", target=torch.ops.fp8patch.quantize.default)
    return [
        cast
        for cast in casts
        if cast.args[TRANSPOSE]
        and not cast.args[LIVE]
        # Checkpointing inside the block: what is computed twice is decided already.
        and "recompute" not in cast.meta
    ]


def output(graph: Graph, node: Node, index: int, val: Any) -> Node:
    """Output `index` of an operator, where nodes are being inserted."""
    found = graph.call_function(getitem, (node, index))
    found.meta["val"] = val
    return found


def readers(node: Node, index: int) -> list[Node]:
    """Nodes that read output `index` of an operator."""
    outputs = [user for user in node.users if user.target is getitem and user.args[1] == index]
    return [reader for found in outputs for reader in found.users]


def read_instead(graph: Graph, node: Node, outputs: dict[int, Node]) -> None:
    """Who reads output i of `node` reads `outputs[i]`."""
    for user in [user for user in node.users if user.target is getitem]:
        index: Any = user.args[1]
        if index in outputs:
            user.replace_all_uses_with(outputs[index])
        if not user.users:
            graph.erase_node(user)


def without_transpose(cast: Node) -> None:
    """Nobody reads its transpose any more."""
    cast.update_arg(TRANSPOSE, False)
    rows, _, *rest = cast.meta["val"]
    cast.meta["val"] = (rows, rows.new_empty(0, 0), *rest)
