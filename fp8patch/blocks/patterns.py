"""Finding an activation in a graph of primitive operations, and the cast that reads it.

By the time that graphs can be changed, an activation is twenty operations. What to look for is
therefore traced from PyTorch's own operator, by the same decompositions that the graph went
through, and compared node by node; a version that decomposes in another way is followed, and what
matches nothing is left alone.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

_aten = torch.ops.aten
_NOTHING = (_aten.alias.default, _aten.detach.default, _aten.clone.default)
VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)

# Takes tensors of one shape, and returns one more.
Function = Callable[..., Tensor]
# In what such a function does, this number stands for any other.
NUMBER = 0.6180339887


@functools.cache
def _pattern(function: Function, dtypes: tuple[torch.dtype, ...]) -> tuple[list[Node], Node]:
    """The placeholders and the result, as primitive operations."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    examples = [torch.empty(2, 2, dtype=dtype, device="meta") for dtype in dtypes]
    for example in examples:
        example.requires_grad_(example.is_floating_point())
    traced = make_fx(function, select_decomp_table())(*examples)
    for node in traced.graph.nodes:
        if node.target in _NOTHING:
            node.replace_all_uses_with(node.args[0])
    traced.graph.eliminate_dead_code()
    result = traced.graph.output_node().args[0]
    assert isinstance(result, Node)
    return list(traced.graph.nodes)[: len(dtypes)], result


@functools.cache
def gradient(function: Function, index: int) -> Function:
    """Takes what `function` takes, and the gradient of its result: that of argument `index`."""

    def backward(*read: Tensor) -> Tensor:
        *arguments, grad = read
        result: Tensor
        with torch.enable_grad():
            (result,) = torch.autograd.grad(function(*arguments), arguments[index], grad)
        return result

    return backward


def _matches(pattern: Any, found: Any, bound: dict[Node | float, Any]) -> bool:
    """Does `found` compute what `pattern` does? Adds what each node of the pattern stands for."""
    if isinstance(pattern, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(pattern) == len(found)
            and all(_matches(p, f, bound) for p, f in zip(pattern, found, strict=True))
        )
    if not isinstance(pattern, Node):
        if pattern == NUMBER and type(found) is float:
            return bool(bound.setdefault(NUMBER, found) == found)
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


def match(value: Node, function: Function, arity: int) -> list[Node | None] | None:
    """What `value` was computed of, if that is what `function` computes, of tensors like it.

    None for an argument that the function does not look at.
    """
    like = value.meta.get("val")
    if not isinstance(like, Tensor):
        return None
    found = match_typed(value, function, (like.dtype,) * arity)
    return None if found is None else found[0]


def match_typed(
    value: Node, function: Function, dtypes: tuple[torch.dtype, ...]
) -> tuple[list[Node | None], float] | None:
    """The same, of tensors of these dtypes; and the number that NUMBER stands for."""
    like = value.meta.get("val")
    if not isinstance(like, Tensor):
        return None
    placeholders, result = _pattern(function, dtypes)
    bound: dict[Node | float, Any] = {}
    if not _matches(result, value, bound):
        return None
    read = [bound.get(placeholder) for placeholder in placeholders]
    alike = all(
        node is None or _is_like(node.meta.get("val"), like, dtype)
        for node, dtype in zip(read, dtypes, strict=True)
    )
    return (read, bound.get(NUMBER, NUMBER)) if alike else None


def _is_like(tensor: Any, like: Tensor, dtype: torch.dtype) -> bool:
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
        return False
    # By name: comparing sizes that move would pin them down.
    sizes, wanted = (*tensor.shape, *tensor.stride()), (*like.shape, *like.stride())
    return list(map(str, sizes)) == list(map(str, wanted))


def is_read_once(node: Node) -> bool:
    """Does nobody but one read it? (Who asks how large it is does not.)"""
    return len(node.users) - len(_sizes_of(node)) == 1


def views(cast: Node) -> Iterator[Node]:
    """The argument of a cast, and what it is a view of, as far as nothing else reads them."""
    node = cast.args[0]
    while isinstance(node, Node) and is_read_once(node):
        yield node
        if node.target not in VIEWS:
            return
        node = node.args[0]


def through(path: list[Node], node: Node) -> Node:
    """`node` through the views that what is last in `path` goes through, and is like.

    (Of any dtype.)
    """
    *steps, value = path
    dtype = node.meta["val"].dtype
    _stand_in(node, value)
    for view in reversed(steps):
        assert callable(view.target)
        with node.graph.inserting_after(view):
            node = node.graph.call_function(view.target, (node, *view.args[1:]))
        val = view.meta["val"]
        node.meta["val"] = val if val.dtype == dtype else torch.empty_like(val, dtype=dtype)
        _stand_in(node, view)
    return node


def _sizes_of(node: Node) -> list[Node]:
    """Users that only ask how large it is."""
    return [user for user in node.users if user.target is _aten.sym_size.int]


def _stand_in(node: Node, other: Node) -> None:
    """Who asks how large `other` is asks `node`, so that nothing keeps `other`."""
    for user in _sizes_of(other):
        user.replace_input_with(other, node)
