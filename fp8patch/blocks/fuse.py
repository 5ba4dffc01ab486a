"""A pass over Inductor's graphs: an activation and the cast of its output become one operator.

The cast is opaque, so Inductor writes GELU's output to memory for it, and in backward the gradient
of GELU's input, and nothing else ever reads those. The pass runs after forward and backward were
taken apart: what is kept for backward stays as it is.

By then an activation is twenty primitive operations. What to look for is therefore traced from
PyTorch's own operator, by the same decompositions that the graph went through, and compared node by
node; a version that decomposes in another way is followed, and what matches nothing is left alone.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from fp8patch.blocks import fuse_parts
from fp8patch.ops import quantize_form

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)

# By form: x, y -> what is cast.
_ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": lambda x, _: _aten.gelu(x),
    "gelu_backward": lambda x, y: _aten.gelu_backward(y, x),
    "gelu_tanh": lambda x, _: _aten.gelu(x, approximate="tanh"),
    "gelu_tanh_backward": lambda x, y: _aten.gelu_backward(y, x, approximate="tanh"),
    "silu_mul": lambda x, y: _aten.silu(x) * y,
}
assert _ACTIVATIONS.keys() == quantize_form.FORMS.keys()


@functools.cache
def _pattern(form: str, dtype: torch.dtype) -> tuple[Node, Node, Node]:
    """The placeholders of x and y and the result, as primitive operations."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    example = torch.empty(2, 2, dtype=dtype, device="meta")
    traced = make_fx(_ACTIVATIONS[form], select_decomp_table())(example, example.clone())
    traced.graph.eliminate_dead_code()
    x, y, *_ = traced.graph.nodes
    result = traced.graph.output_node().args[0]
    assert isinstance(result, Node)
    return x, y, result


def _matches(pattern: Any, found: Any, bound: dict[Node, Any]) -> bool:
    """Does `found` compute what `pattern` does? Adds what each node of the pattern stands for."""
    if isinstance(pattern, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(pattern) == len(found)
            and all(_matches(p, f, bound) for p, f in zip(pattern, found, strict=True))
        )
    if not isinstance(pattern, Node):
        return type(pattern) is type(found) and bool(pattern == found)
    if pattern in bound:
        return bound[pattern] is found
    if not isinstance(found, Node):
        return False
    bound[pattern] = found
    return pattern.op == "placeholder" or (
        found.op == "call_function"
        and found.target is pattern.target
        and _matches(pattern.args, found.args, bound)
        and pattern.kwargs == found.kwargs == {}
    )


def _activation(value: Node) -> tuple[str, Node, Node | None] | None:
    """(form, x, y) of a node that holds an activation's result."""
    like = value.meta.get("val")
    if not isinstance(like, Tensor):
        return None
    for form in _ACTIVATIONS:
        x, y, result = _pattern(form, like.dtype)
        bound: dict[Node, Any] = {}
        if not _matches(result, value, bound):
            continue
        read = bound[x], bound.get(y)
        if all(n is None or _is_like(n.meta.get("val"), like) for n in read):
            return form, *read
    return None


def _is_like(tensor: Any, like: Tensor) -> bool:
    if not isinstance(tensor, Tensor) or tensor.dtype != like.dtype:
        return False
    # By name: comparing sizes that move would pin them down.
    sizes, wanted = (*tensor.shape, *tensor.stride()), (*like.shape, *like.stride())
    return list(map(str, sizes)) == list(map(str, wanted))


def _sizes_of(node: Node) -> list[Node]:
    """Users that only ask how large it is."""
    return [user for user in node.users if user.target is _aten.sym_size.int]


def _views(cast: Node) -> Iterator[Node]:
    """The argument of a cast, and what it is a view of, as far as nothing else reads them."""
    node = cast.args[0]
    while isinstance(node, Node) and len(node.users) - len(_sizes_of(node)) == 1:
        yield node
        if node.target not in _VIEWS:
            return
        node = node.args[0]


def _fuse(graph: Graph, cast: Node) -> bool:
    _, scale, amax, counts, limit, e5m2, live, *flags = cast.args
    path = list(_views(cast))
    found = None if live or not path else _activation(path[-1])
    if found is None:
        return False
    form, x, y = found
    x_2d = _through(path, x)
    y_2d = None if y is None else _through(path, y)
    with graph.inserting_before(cast):
        fused = graph.call_function(
            torch.ops.fp8patch.quantize_form.default,
            (x_2d, y_2d, form, scale, amax, counts, limit, e5m2, *flags),
        )
    fused.meta["val"] = cast.meta["val"]
    cast.replace_all_uses_with(fused)
    graph.erase_node(cast)
    return True


def _through(path: list[Node], node: Node) -> Node:
    """`node` through the views that the activation's result, last in `path`, goes through."""
    *views, value = path
    _stand_in(node, value)
    for view in reversed(views):
        assert callable(view.target)
        with node.graph.inserting_after(view):
            node = node.graph.call_function(view.target, (node, *view.args[1:]))
        node.meta["val"] = view.meta["val"]
        _stand_in(node, view)
    return node


def _stand_in(node: Node, other: Node) -> None:
    """Who asks how large `other` is asks `node`, so that nothing keeps `other`."""
    for user in _sizes_of(other):
        user.replace_input_with(other, node)


class FuseCasts(CustomGraphPass):
    """For `torch.compile(options={"post_grad_custom_pre_pass": FuseCasts()})`."""

    def __call__(self, graph: Graph) -> None:
        casts = graph.find_nodes(op="call_function", target=torch.ops.fp8patch.quantize.default)
        if sum(_fuse(graph, cast) or fuse_parts.join(graph, cast) for cast in casts):
            graph.eliminate_dead_code()

    def uuid(self) -> Any:
        # What is compiled is found again by this. It leans on what operators return, too: their
        # strides, in another release, are no part of the graph that Inductor goes by.
        operators = sorted(Path(quantize_form.__file__).parent.glob("*.py"))
        return get_hash_for_files((__file__, fuse_parts.__file__, *map(str, operators)))


FUSE_CASTS = FuseCasts()
