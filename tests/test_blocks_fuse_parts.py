"""The pass that lets a cast read the gradients of q, k and v where they lie."""

import functools
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quiet import FRESH, INDUCTOR
from test_blocks_fuse import D, Graphs, losses_on_a_gpu, train
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

import fp8patch
from fp8patch.blocks import compiling, fuse_parts
from fp8patch.blocks.fuse import FUSE_CASTS

aten = torch.ops.aten

pytestmark = [*INDUCTOR, FRESH]

HEADS, DEPTH = 4, 16
WIDTH = HEADS * DEPTH
CAST, PARTS = "fp8patch.quantize.default", "fp8patch.quantize_parts.default"
FORM = "fp8patch.quantize_form.default"


class Unbound(nn.Module):
    """Attention as in timm."""

    depth = DEPTH

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * self.depth
        self.qkv, self.proj = nn.Linear(D, 3 * width), nn.Linear(width, D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return o.transpose(1, 2).reshape(o.shape[0], o.shape[2], -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, self.depth).permute(2, 0, 3, 1, 4)
        y: Tensor = x + self.proj(self.attend(*qkv.unbind(0)))
        return y


class Indexed(Unbound):
    """Attention as in many a script."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, self.depth).permute(2, 0, 3, 1, 4)
        v, q, k = qkv[2], qkv[0], qkv[1]
        y: Tensor = x + self.proj(self.attend(q, k, v))
        return y


class TwiceIndexed(Unbound):
    """Another operation reads a part as well, and adds to its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, self.depth).permute(2, 0, 3, 1, 4)
        y: Tensor = x + self.proj(self.attend(qkv[0], qkv[1], qkv[2])) + qkv[0].square().mean()
        return y


class HalfIndexed(Unbound):
    """A third of it is read by nobody: there the gradient is zero."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, self.depth).permute(2, 0, 3, 1, 4)
        y: Tensor = x + self.proj(self.attend(qkv[0], qkv[1], qkv[1]))
        return y


def heads(qkv: Tensor) -> list[Tensor]:
    parts = qkv.split(WIDTH, -1)
    return [part.view(*part.shape[:2], HEADS, DEPTH).transpose(1, 2) for part in parts]


class Split(Unbound):
    """Attention as in GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.proj(self.attend(*heads(self.qkv(x))))
        return y


class Narrow(Unbound):
    """Parts of 32 columns, half of a tile."""

    depth = 8


class Swapped(Unbound):
    """Heads outside, q, k and v inside: parts that do not lie side by side."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, HEADS, 3, DEPTH).permute(3, 0, 2, 1, 4)
        y: Tensor = x + self.proj(self.attend(*qkv.unbind(0)))
        return y


class Computed(Split):
    """One of the gradients goes through arithmetic before it is joined with the others."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q * q.sigmoid(), k, v)


class Squared(Split):
    """Something else adds to the gradient after the parts were joined."""

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        y: Tensor = x + self.proj(self.attend(*heads(qkv))) + qkv.square().mean(-1, keepdim=True)
        return y


def casts_of(gm: Any) -> Counter[str]:
    return Counter(str(node.target) for node in gm.graph.nodes if "quantize" in str(node.target))


class Counted(Graphs):
    """Also counts casts of parts.

    Attributes:
        parts: By graph, its casts of any kind.
    """

    def __init__(self, fuse: bool, keep_less: bool = False) -> None:
        super().__init__(fuse, keep_less)
        self.parts: list[Counter[str]] = []

    def _inner(self, gm: Any, inputs: Any, **kwargs: Any) -> Any:
        result = super()._inner(gm, inputs, **kwargs)
        self.parts.append(casts_of(gm))
        return result


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_blocks_fuse.Graphs", Counted)


Block = Callable[[], nn.Module]


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("block", [Unbound, Indexed, Split])
def test_one_operator_and_not_another_bit(block: Block) -> None:
    apart, before = train(block, fuse=False)
    fused, after = train(block, fuse=True)
    assert isinstance(before, Counted)
    assert isinstance(after, Counted)
    # Forward and backward; twice: for the first shape, and for all others.
    assert after.parts == [{CAST: 2}, {FORM: 1, PARTS: 1}] * 2
    assert before.parts == [{CAST: 2}] * 4
    assert all(torch.equal(a, b) for a, b in zip(apart, fused, strict=True))


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("block", [Narrow, Swapped, Computed, Squared, TwiceIndexed, HalfIndexed])
def test_left_as_it_is(block: Block) -> None:
    _, graphs = train(block, fuse=True, steps=2)
    assert isinstance(graphs, Counted)
    assert len(graphs.parts) == 2  # forward and backward
    assert all(casts and PARTS not in casts for casts in graphs.parts)


def test_parts_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    apart, _ = train(Split, fuse=False, steps=2)
    plain = fuse_parts._parts
    monkeypatch.setattr(fuse_parts, "_parts", lambda x: (f := plain(x)) and f[::-1])
    fused, _ = train(Split, fuse=True, steps=2)
    assert not all(torch.equal(a, b) for a, b in zip(apart, fused, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*force_disable_caches:UserWarning")
# PyTorch makes an empty one first, on purpose, to have a pool.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("graphs", [False, True], ids=["compiled", "graphs"])
@pytest.mark.parametrize("block", [Unbound, Indexed, Split])
def test_inductors_own_code(block: Block, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    plain = fuse_parts.join
    monkeypatch.setattr(fuse_parts, "join", lambda *args: calls.append(plain(*args)) or calls[-1])
    fused = losses_on_a_gpu(graphs, block)
    assert sorted(calls) == [False] * 3 + [True]
    monkeypatch.setattr(compiling, "for_inductor", lambda keep_less: {})
    apart = losses_on_a_gpu(graphs, block)
    assert len(calls) == 4
    # The casts are equal to the bit; attention's backward need not be from run to run.
    assert fused == pytest.approx(apart, rel=1e-3)
    assert apart[-1] < apart[0]


# -- by hand ---------------------------------------------------------------------------------------


Pairs = Callable[[list[Node]], list[tuple[int, Node]]]


def graph_of(
    style: str,
    number: int = 3,
    *,
    order: list[int],
    leak: bool = False,
    turned: bool = True,
    pairs: Pairs = lambda parts: list(enumerate(parts)),
    at: Callable[[int], int] = lambda i: i,
) -> GraphModule:
    """A cast of parts that are joined for it. `turned`: each is in memory as [B, N, H, D].

    By index: `pairs` are (index, part), and `at` says how the index is written.
    """
    graph = Graph()

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    def given(name: str, value: Any) -> Node:
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    with FakeTensorMode():
        part = torch.empty(2, 9, HEADS, DEPTH, dtype=torch.bfloat16).transpose(1, 2)
        part = part if turned else part.contiguous()
        slot = torch.empty(()), torch.empty(()), torch.empty(4, dtype=torch.int64)
        qkv, *places = map(given, "abcd", ((part,) * number, *slot))
        parts = [call(operator.getitem, qkv, i) for i in range(number)]
        if style == "index":
            zeros = call(aten.full.default, [number, *part.shape], 0, dtype=torch.bfloat16)
            among = [call(aten.select_scatter.default, zeros, p, 0, at(i)) for i, p in pairs(parts)]
            stacked = functools.reduce(lambda a, b: call(aten.add.Tensor, a, b), among)
            joined = call(aten.permute.default, stacked, order)
        elif style == "unbind":
            stacked = call(
                aten.reshape.default, call(aten.cat.default, parts), [number, *part.shape]
            )
            joined = call(aten.permute.default, stacked, order)
        else:
            rows = [call(aten.permute.default, part, order) for part in parts]
            flat = [call(aten.reshape.default, row, [2, 9, WIDTH]) for row in rows]
            joined = call(aten.cat.default, flat, 2)
        matrix = call(aten.reshape.default, joined, [18, number * WIDTH])
        flags = 448.0, True, False, True, True, True
        cast = call(torch.ops.fp8patch.quantize.default, matrix, *places, *flags)
    graph.output((cast, matrix) if leak else (cast,))
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("style", "order", "wrong"),
    [
        ("unbind", [1, 3, 0, 2, 4], [1, 3, 2, 0, 4]),
        ("index", [1, 3, 0, 2, 4], [1, 3, 2, 0, 4]),
        ("split", [0, 2, 1, 3], [0, 1, 2, 3]),
    ],
)
def test_what_must_not_be_in_the_way(style: str, order: list[int], wrong: list[int]) -> None:
    def parts_of(number: int = 3, order: list[int] = order, **change: Any) -> Any:
        gm = graph_of(style, number, order=order, **change)
        FUSE_CASTS(gm.graph)
        gm.graph.lint()
        names = Counter(str(node.target) for node in gm.graph.nodes)
        assert names[CAST] + names[PARTS] == 1
        assert names["aten.cat.default"] == (0 if style == "index" else names[CAST])
        casts = [node for node in gm.graph.nodes if str(node.target) == PARTS]
        return [[tuple(x.meta["val"].shape) for x in cast.args[0]] for cast in casts]

    assert parts_of() == [[(18, WIDTH)] * 3]
    assert parts_of(2) == [[(18, WIDTH)] * 2]
    # More than the kernels take; a reader of the joined tensor; the parts' memory, and the joined
    # tensor's, in another order.
    assert parts_of(4) == parts_of(leak=True) == parts_of(turned=False) == []
    assert parts_of(order=wrong) == []


BY_INDEX: dict[str, tuple[Pairs, list[int]]] = {
    "backwards": (lambda parts: list(enumerate(parts))[::-1], [0, 1, 2]),
    "mixed": (lambda parts: [(0, parts[2]), (2, parts[0]), (1, parts[1])], [2, 1, 0]),
    "one twice": (lambda parts: [(0, parts[0]), (1, parts[1]), (1, parts[2])], []),
    "one left out": (lambda parts: [(0, parts[0]), (1, parts[1])], []),
}


@pytest.mark.parametrize("name", BY_INDEX)
@pytest.mark.parametrize("negative", [False, True])
def test_parts_by_index_in_their_order(name: str, negative: bool) -> None:
    pairs, expected = BY_INDEX[name]
    at = (lambda i: i - 3) if negative else (lambda i: i)
    gm = graph_of("index", order=[1, 3, 0, 2, 4], pairs=pairs, at=at)
    FUSE_CASTS(gm.graph)
    found: list[int] = []
    for cast in gm.graph.find_nodes(
        op="call_function", target=torch.ops.fp8patch.quantize_parts.default
    ):
        for matrix in cast.args[0]:
            part = matrix.args[0].args[0]
            found.append(part.args[1])
    assert found == expected


def test_zeros_that_are_broadcast_are_no_parts() -> None:
    gm = graph_of("index", order=[1, 3, 0, 2, 4])
    first = gm.graph.find_nodes(op="call_function", target=aten.select_scatter.default)[0]
    first.meta["val"] = first.meta["val"][:1]
    FUSE_CASTS(gm.graph)
    assert [str(n.target) for n in gm.graph.nodes if "quantize" in str(n.target)] == [CAST]


class Rows(nn.Module):
    """Takes two of the batch by index, which is no stack of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dense(x)
        y: Tensor = x + (h[0] * h[1]).mean()
        return y


def test_a_batch_that_grows_is_not_pinned_down() -> None:
    torch.manual_seed(0)
    model: Any = fp8patch.convert_model(nn.Sequential(Rows(), Rows()), include=("*",))
    graphs = Graphs(fuse=True)
    fp8patch.compile_blocks(model, backend=graphs)
    counts = []
    for batch in (4, 4, 5, 6, 7, 8):
        with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
            model(torch.randn(batch, 16, D, requires_grad=True)).sum().backward()
        counts.append(len(graphs.casts))
    assert counts[2] == counts[-1] > 0
