"""The pass that has backward make what forward would keep, on the graphs that Inductor gets."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quiet import FRESH, INDUCTOR
from test_blocks_fuse import (
    CAST,
    D,
    Gated,
    Graphs,
    Leaky,
    Mlp,
    Model,
    gelu,
    gelu_tanh,
    losses_on_a_gpu,
    train,
)
from torch import Tensor, nn

import fp8patch
from fp8patch import numerics
from fp8patch.blocks import compiling, keep_less
from fp8patch.ops import activation_grads

transformers = pytest.importorskip("transformers")

pytestmark = [*INDUCTOR, FRESH]


def fp8_kept(saved: list[Any]) -> Counter[tuple[int, ...]]:
    """Shapes of the FP8 tensors that a forward graph returns."""
    return Counter(tuple(shape) for shape, dtype in saved if dtype == numerics.E4M3)


# By block: its casts in forward and in backward.
CASES: dict[Any, tuple[dict[str, int], dict[str, int]]] = {
    gelu: ({CAST: 1, "gelu": 1}, {"to_bf16": 1, "grads of gelu": 1}),
    gelu_tanh: ({CAST: 1, "gelu_tanh": 1}, {"to_bf16": 1, "grads of gelu_tanh": 1}),
    Gated: ({CAST: 1, "silu_mul": 1}, {"to_bf16": 1, "grads of silu_mul": 1}),
}


@pytest.mark.parametrize("block", CASES)
def test_less_is_kept_and_nothing_else_changes(block: Callable[[], nn.Module]) -> None:
    apart, before = train(block, fuse=True)
    less, after = train(block, fuse=True, keep_less=True)
    # Twice: for the first shape, and for all others.
    assert after.casts == list(CASES[block]) * 2
    # [2 D, 32 tokens], the transpose of what the activation returned. (Weights are inputs.)
    assert fp8_kept(before.saved[0]) - fp8_kept(after.saved[0]) == Counter([(2 * D, 32)])
    assert len(before.saved[0]) == len(after.saved[0]) + 1
    assert all(torch.equal(a, b) for a, b in zip(apart, less, strict=True))


class Swapped(Gated):
    """As Phi's, and others'."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x) * nn.functional.silu(self.gate(x)))
        return y


def gelu_new() -> nn.Module:
    return Mlp(transformers.activations.NewGELUActivation())


def gelu_python_tanh() -> nn.Module:
    return Mlp(transformers.activations.GELUTanh(use_gelu_tanh_python=True))


@pytest.mark.parametrize("block", [Swapped, gelu_new, gelu_python_tanh])
def test_other_ways_to_write_it(block: Callable[[], nn.Module]) -> None:
    apart, _ = train(block, fuse=False, steps=2)
    less, after = train(block, fuse=True, steps=2, keep_less=True)
    form = "silu_mul" if block is Swapped else "gelu_tanh"
    assert after.casts == [{CAST: 1, form: 1}, {"to_bf16": 1, f"grads of {form}": 1}]
    if block is Swapped:
        assert all(torch.equal(a, b) for a, b in zip(apart, less, strict=True))
        return
    # Written out, tanh GELU rounds to BF16 eight times; in one operator, once.
    outputs, gradients = apart[:1] + less[:1], apart[1:-1]
    assert numerics.sqnr(outputs[0], outputs[1]) > 40
    for a, b in zip(gradients, less[1:-1], strict=True):
        assert numerics.sqnr(a, b) > 20


@pytest.mark.parametrize("block", [gelu, Gated])
def test_a_wrong_gradient_is_noticed(
    block: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, _ = train(block, fuse=True, steps=2)
    form = "silu_mul" if block is Gated else "gelu"
    right = activation_grads.GRADS[form]
    wrong: Any = lambda *read: tuple(-grad for grad in right(*read))  # noqa: E731
    monkeypatch.setitem(activation_grads.GRADS, form, wrong)
    less, _ = train(block, fuse=True, steps=2, keep_less=True)
    assert not all(torch.equal(a, b) for a, b in zip(apart, less, strict=True))


def leaky() -> nn.Module:
    return Leaky(nn.GELU())


class WithBias(Gated):
    """The gradients of gate and up want column sums."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D)


class Frozen(Mlp):
    """No weight gradient, so no transpose."""

    def __init__(self) -> None:
        super().__init__(nn.GELU())
        self.down.weight.requires_grad_(False)


class Regrouped(Mlp):
    """The gradient is cast as [M, 2 D], the activation as [2 M, D]."""

    def __init__(self) -> None:
        super().__init__(nn.GELU())
        self.down = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.up(x)).unflatten(-1, (2, D))
        y: Tensor = x + self.down(h).sum(-2)
        return y


class OneGateForTwo(Gated):
    """The gradient of gate is cast as [M, 2 D], that of up and the product as [2 M, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate(x).unflatten(-1, (2, D)))
        up = self.up(torch.stack((x, -x), -2))
        y: Tensor = x + self.down(gate * up).sum(-2)
        return y


@pytest.mark.parametrize("block", [leaky, WithBias, Frozen, Regrouped, OneGateForTwo])
def test_left_as_it_is(block: Callable[[], nn.Module]) -> None:
    apart, before = train(block, fuse=True, steps=2)
    less, after = train(block, fuse=True, steps=2, keep_less=True)
    assert before.casts == after.casts
    assert before.saved == after.saved
    assert all(torch.equal(a, b) for a, b in zip(apart, less, strict=True))


def hugging_face(name: str) -> tuple[Any, dict[str, Any]]:
    sizes = {
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * D,
    }
    tokens = {"input_ids": torch.arange(32).view(2, 16)}
    if name == "bert":
        config: Any = transformers.BertConfig(
            **sizes, vocab_size=64, attention_probs_dropout_prob=0.0
        )
    elif name == "llama":
        config = transformers.LlamaConfig(**sizes, vocab_size=64, num_key_value_heads=1)
    else:
        config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4)
        tokens = {"pixel_values": torch.ones(2, 3, 16, 16)}
    return config, tokens


def hidden_states(name: str, keep_less: bool, recipe: Any = None) -> tuple[list[Tensor], Graphs]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config, inputs = hugging_face(name)
    model = transformers.AutoModel.from_config(config)
    model = fp8patch.convert_model(model, recipe, include=("*layer*",))
    graphs = Graphs(True, keep_less)
    fp8patch.compile_blocks(model, backend=graphs)
    seen = []
    for _ in range(2):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
            state = model(**inputs).last_hidden_state
        state.float().square().mean().backward()
        seen += [state.detach()]
    return [*seen, *(p.grad for p in model.parameters() if p.grad is not None)], graphs


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_blocks_of_hugging_face(name: str) -> None:
    apart, before = hidden_states(name, keep_less=False)
    less, after = hidden_states(name, keep_less=True)
    form = "silu_mul" if name == "llama" else "gelu"
    _, backward = after.casts
    assert backward[f"grads of {form}"] == backward["transpose"] == 1
    gone = fp8_kept(before.saved[0]) - fp8_kept(after.saved[0])
    tokens = 2 * 17 + 14 if name == "vit" else 32
    assert gone == Counter([(2 * D, tokens), (D, tokens)])
    assert not fp8_kept(after.saved[0]) - fp8_kept(before.saved[0])
    assert all(torch.equal(a, b) for a, b in zip(apart, less, strict=True))


def test_what_backward_casts_anyway_is_not_cast_twice() -> None:
    recipe = fp8patch.Recipe.load("delayed").replace(fprop="bf16")
    apart, before = hidden_states("vit", keep_less=False, recipe=recipe)
    same, after = hidden_states("vit", keep_less=True, recipe=recipe)
    assert (before.casts, before.saved) == (after.casts, after.saved)
    assert all(torch.equal(a, b) for a, b in zip(apart, same, strict=True))


def test_other_code_of_a_pass_is_another_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[str] = []
    monkeypatch.setattr(
        "fp8patch.blocks.fuse.get_hash_for_files", lambda paths: files.extend(paths)
    )
    keep_less.KEEP_LESS.uuid()
    named = {Path(file).name for file in files}
    blocks = {"keep_less.py", "patterns.py", "graph_casts.py", "fuse_backward.py", "recast.py"}
    operators = {"activation_grads.py", "transpose_again.py", "quantize.py"}
    assert blocks | operators <= named


def gated() -> nn.Module:
    return Gated()


class Attention(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = Gated()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        y: Tensor = self.mlp(x + self.out(seen.transpose(1, 2).flatten(2)))
        return y


def losses(block: Callable[[], nn.Module], compiled: bool) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = fp8patch.convert_model(Model(block), include=("*",))
    blocks = fp8patch.compile_blocks(model) if compiled else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for _ in range(4):
        x = torch.randn(2, 16, D, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
            y = model(x)
        loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    assert blocks is None or not blocks.left
    return seen


@pytest.mark.filterwarnings("ignore:.*force_disable_caches:UserWarning")
def test_inductor_compiles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the end: what it generates for a CPU runs."""
    passes: list[int] = []
    plain = keep_less.fuse_backward.fuse_backward
    monkeypatch.setattr(
        keep_less.fuse_backward,
        "fuse_backward",
        lambda *args: passes.append(plain(*args)) or passes[-1],
    )
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = losses(Attention, compiled=True)
    assert passes == [1]
    eager = losses(Attention, compiled=False)
    # Inductor rounds less often between the GEMMs.
    assert compiled == pytest.approx(eager, rel=0.02)
    assert compiled[-1] < 0.95 * compiled[0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*force_disable_caches:UserWarning")
# PyTorch makes an empty one first, on purpose, to have a pool.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("block", [gelu, gated])
@pytest.mark.parametrize("graphs", [False, True], ids=["compiled", "graphs"])
def test_inductors_own_code(
    graphs: bool, block: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    plain = keep_less.fuse_backward.fuse_backward
    monkeypatch.setattr(
        keep_less.fuse_backward,
        "fuse_backward",
        lambda *args: calls.append(plain(*args)) or calls[-1],
    )
    less = losses_on_a_gpu(graphs, block)
    # CUDA graphs are asked for speed.
    assert (1 in calls) is not graphs
    monkeypatch.setattr(compiling, "for_inductor", lambda keep_less: {})
    apart = losses_on_a_gpu(graphs, block)
    # Some FP8 values are one step off.
    assert less == pytest.approx(apart, rel=1e-3)
    assert apart[-1] < apart[0]
