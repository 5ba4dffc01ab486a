"""A cast of tensors that Inductor would join first becomes one that reads them where they lie.

One Linear for queries, keys and values: attention returns their gradients as three tensors, the
backward of how they were taken apart joins these, and only the cast reads the result. There are
three ways to take them apart, and these alone are looked for:

    unbind   [B, N, P H D] as [B, N, P, H, D], permuted to [P, B, H, N, D]
    index    the same, and then qkv[0], qkv[1], qkv[2]: joined by adding up, each among zeros
    split    along the last dimension

Only what attention itself returns has a layout that is known here, and is in memory anyway. Parts
that are computed elementwise (with rotary embeddings, say) would be written for the cast, and the
joining is free where they are.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8patch.ops import quantize_parts

_aten = torch.ops.aten
# What leaves the elements in their order.
_RESHAPES = (
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.clone.default,
)
_PERMUTE, _CAT = _aten.permute.default, _aten.cat.default
_HEADS, _STACKED = [0, 2, 1, 3], [1, 3, 0, 2, 4]


def join(graph: Graph, cast: Node) -> bool:
    """Does this cast (`quantize`) read parts that are joined for it? Then it is replaced."""
    joined, scale, amax, counts, limit, e5m2, live, *flags = cast.args
    parts = None if live else _parts(joined)
    if parts is None:
        return False
    with graph.inserting_before(cast):
        views = [_side_by_side(graph, part) for part in parts]
        fused = graph.call_function(
            torch.ops.fp8patch.quantize_parts.default,
            (views, scale, amax, counts, limit, e5m2, *flags),
        )
    fused.meta["val"] = cast.meta["val"]
    cast.replace_all_uses_with(fused)
    graph.erase_node(cast)
    return True


def _parts(joined: Any) -> list[Node] | None:
    """[B, H, N, D] tensors; [B, N, H D] of each are the columns of `joined` side by side."""
    way, node = [], joined
    while _is_call(node, *_RESHAPES, _PERMUTE) and len(node.users) == 1:
        way.append(node)
        node = node.args[0]
    if not isinstance(node, Node) or len(node.users) > 1:
        return None
    parts, dim = _joined(node)
    permutes = [step for step in way if step.target is _PERMUTE]
    if not permutes and dim in (-1, len(_shape(node)) - 1):
        found = [_before_heads_joined(part) for part in parts]
    elif [step.args[1] for step in permutes] == [_STACKED] and dim == 0:
        stacked = _shape(permutes[0].args[0])
        found = [part if _is(stacked, (len(parts), *_shape(part))) else None for part in parts]
    else:
        return None
    whole = [part for part in found if part is not None and _is_matrix(part)]
    return whole if len(whole) == len(parts) and _fit(joined, whole) else None


def _joined(node: Node) -> tuple[Sequence[Any], Any]:
    """(what is joined, along which dimension); nothing where that is not what `node` does."""
    if _is_call(node, _CAT):
        parts, dim = (*node.args, 0)[:2]
        return (parts, dim) if isinstance(parts, Sequence) and not node.kwargs else ((), 0)
    size = _shape(node)[0] if _shape(node) else None
    if type(size) is not int or not size:  # (Asking one that moves would pin it down.)
        return (), 0
    found: dict[int, Any] = {}
    pending: list[Any] = [node]
    while pending:
        each = pending.pop()
        if not isinstance(each, Node) or not _is_alike(each, node):
            return (), 0
        if _is_call(each, _aten.add.Tensor) and not each.kwargs:
            pending += each.args
            continue
        if not (_is_call(each, _aten.select_scatter.default) and _is_zero(each.args[0])):
            return (), 0
        _, part, dim, index = each.args
        if dim != 0 or type(index) is not int or index % size in found:
            return (), 0
        found[index % size] = part
    return [found[i] for i in range(size)] if len(found) == size else (), 0


def _is_alike(node: Node, other: Node) -> bool:
    """Of one shape and dtype: nothing is broadcast or widened on the way."""
    a, b = node.meta.get("val"), other.meta.get("val")
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    return a.dtype == b.dtype and _is(a.shape, b.shape)


def _is_zero(node: Any) -> bool:
    return _is_call(node, _aten.full.default) and node.args[1] == 0


def _before_heads_joined(part: Node) -> Node | None:
    """[B, H, N, D] of what is [B, N, H D]."""
    node: Any = part
    while _is_call(node, *_RESHAPES):
        node = node.args[0]
    if not (_is_call(node, _PERMUTE) and node.args[1] == _HEADS):
        return None
    batch, length, heads, depth = _shape(node)
    return node.args[0] if _is(_shape(part), (batch, length, heads * depth)) else None


def _is_matrix(part: Node) -> bool:
    """Is this [B, H, N, D] from attention, and in memory as a contiguous [B N, H D] is?"""
    if not _is_call(part, operator.getitem) or len(_shape(part)) != 4:
        return False
    _, heads, length, depth = _shape(part)
    row = heads * depth
    return _is(part.meta["val"].stride(), (length * row, depth, row, 1))


def _fit(joined: Node, parts: list[Node]) -> bool:
    """Can the cast's kernels read these as the columns of `joined`?"""
    widths = [_width(part) for part in parts]
    return (
        2 <= len(parts) <= 3
        and all(type(width) is int and width % quantize_parts.COLUMNS == 0 for width in widths)
        and _is(_shape(joined)[1:], (sum(widths),))
        and all(part.meta["val"].dtype == joined.meta["val"].dtype for part in parts)
    )


def _side_by_side(graph: Graph, part: Node) -> Node:
    """[B N, H D] of [B, H, N, D]: a view."""
    rows = graph.call_function(_PERMUTE, (part, _HEADS))
    rows.meta["val"] = value = part.meta["val"].permute(_HEADS)
    width = _width(part)
    matrix = graph.call_function(_aten.reshape.default, (rows, [-1, width]))
    matrix.meta["val"] = value.as_strided((value.shape[0] * value.shape[1], width), (width, 1))
    return matrix


def _width(part: Node) -> Any:
    _, heads, _, depth = _shape(part)
    return heads * depth


def _is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _shape(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _is(sizes: Any, wanted: Any) -> bool:
    """Equal for certain: comparing sizes that move in any other way would pin them down."""
    return len(sizes) == len(wanted) and all(
        statically_known_true(a == b) for a, b in zip(sizes, wanted, strict=True)
    )
