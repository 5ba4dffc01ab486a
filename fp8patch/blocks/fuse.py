"""A pass over Inductor's graphs: an activation and the cast of its output become one operator.

The cast is opaque, so Inductor writes GELU's output to memory for it, and in backward the gradient
of GELU's input, and nothing else ever reads those. The pass runs after forward and backward were
taken apart: what is kept for backward stays as it is (fuse_backward.py is the pass that changes
it).
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from fp8patch.blocks import fuse_parts, fuse_stored, partial_sums, patterns, wide_rows
from fp8patch.ops import quantize_form

_aten = torch.ops.aten


class Activation(NamedTuple):
    """What is looked for.

    Attributes:
        form: Of `quantize_form`, which computes it; that of its gradient is `form_backward`.
        arity: How many tensors it reads.
        function: They -> what is cast.
    """

    form: str
    arity: int
    function: patterns.Function


def _gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * _one_plus_tanh(x)


def _gelu_tanh_python(x: Tensor) -> Tensor:
    return x * 0.5 * _one_plus_tanh(x)


def _one_plus_tanh(x: Tensor) -> Tensor:
    return 1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))


# Tanh GELU as PyTorch's operator, and as written out in GPT-2 and others: `gelu_new`.
ACTIVATIONS = (
    Activation("gelu", 1, _aten.gelu),
    Activation("gelu_tanh", 1, lambda x: _aten.gelu(x, approximate="tanh")),
    Activation("gelu_tanh", 1, _gelu_new),
    Activation("gelu_tanh", 1, _gelu_tanh_python),
    Activation("silu_mul", 2, lambda x, y: _aten.silu(x) * y),
    Activation("silu_mul", 2, lambda x, y: y * _aten.silu(x)),
)


def _activation(value: Node) -> tuple[str, Node, Node | None] | None:
    """(form, x, y) of a node that holds an activation's result, or the gradient of one of x."""
    for form, arity, function in ACTIVATIONS:
        read = patterns.match(value, function, arity)
        if read is None and arity == 1:
            form = f"{form}_backward"
            read = patterns.match(value, patterns.gradient(function, 0), 2)
        if read is not None:
            x, y = (*read, None)[:2]
            assert x is not None
            return form, x, y
    return None


def _fuse(graph: Graph, cast: Node) -> bool:
    _, scale, amax, counts, limit, e5m2, live, *flags = cast.args
    path = list(patterns.views(cast))
    found = None if live or not path else _activation(path[-1])
    if found is None:
        return False
    form, x, y = found
    x_2d = patterns.through(path, x)
    y_2d = None if y is None else patterns.through(path, y)
    with graph.inserting_before(cast):
        fused = graph.call_function(
            torch.ops.fp8patch.quantize_form.default,
            (x_2d, y_2d, form, scale, amax, counts, limit, e5m2, *flags),
        )
    fused.meta["val"] = cast.meta["val"]
    cast.replace_all_uses_with(fused)
    graph.erase_node(cast)
    return True


class FuseCasts(CustomGraphPass):
    """For `torch.compile(options={"post_grad_custom_pre_pass": FuseCasts()})`."""

    def __call__(self, graph: Graph) -> None:
        casts = graph.find_nodes(op="call_function", target=torch.ops.fp8patch.quantize.default)
        passes = _fuse, fuse_parts.join, fuse_stored.cast_as_stored
        if sum(any(fuse(graph, cast) for fuse in passes) for cast in casts):
            graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return files_hash(__file__, *(str(m.__file__) for m in (patterns, fuse_parts, fuse_stored)))


def files_hash(*passes: str) -> Any:
    """Of the files of passes and of all operators."""
    # What is compiled is found again by this. It leans on what operators return, too: their
    # strides, in another release, are no part of the graph that Inductor goes by; and on how wide
    # rows are read and partial sums added, which Inductor's own key leaves out.
    operators = sorted(Path(quantize_form.__file__).parent.glob("*.py"))
    return get_hash_for_files(
        (*passes, wide_rows.__file__, partial_sums.__file__, *map(str, operators))
    )


FUSE_CASTS = FuseCasts()
