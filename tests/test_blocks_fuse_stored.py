"""The pass that has a gradient cast from where it lies, rounded or masked by dropout on the way."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quiet import FRESH, INDUCTOR
from test_blocks_fuse import CAST, D, Graphs, losses_on_a_gpu, train
from torch import Tensor, nn

import fp8patch
from fp8patch.bench.gpt import GptLayers
from fp8patch.blocks import compiling, fuse_stored
from fp8patch.ops import quantize_form

transformers = pytest.importorskip("transformers")

pytestmark = [*INDUCTOR, FRESH]


class Block(nn.Module):
    """An FP32 residual stream, and Linears that compute in BF16.

    Attributes:
        dropout: Half is dropped: 2 is a factor that BF16 holds, so that nothing but the one
            rounding is left, and graphs can be compared to the bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(D), nn.Linear(D, D)
        self.dropout = nn.Dropout(0.5)


class Last(Block):
    """The Linear comes last: its gradient is the block's, rounded."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dense(self.norm(x))
        return y


class Dropped(Block):
    """Behind the Linear there is a dropout."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.dense(self.norm(x)))
        return y


class DroppedWide(Block):
    """The dropout is of FP32 numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.dense(self.norm(x)).float())
        return y


class Normed(Block):
    """The gradient is computed here, and the residual reads it, too."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.dropout(self.dense(x)))
        return y


class Narrow(Block):
    """The residual stream is BF16."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        y: Tensor = x + self.dropout(self.dense(self.norm(x)))
        return y.float()


class Read(Block):
    """Something else reads the rounded gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.dense(self.norm(x))
        y: Tensor = x + (h + h.square() * 0 + x.bfloat16())
        return y


class Alone(Block):
    """The gradient is computed here, for nobody else."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x.detach() + self.dropout(self.dense(self.norm(x))) * 3
        return y


class Undropped(Block):
    """The gradient is computed here, the residual reads it, and there is no dropout: the rounding
    costs Inductor nothing where it computes."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.dense(x))
        return y


class Scaled(Block):
    """What is multiplied by is no mask."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dense(self.norm(x)) * (x > 0) * 2
        return y


CASES: dict[Any, str] = {
    Last: "to_bf16",
    Dropped: "dropout_to_bf16",
    DroppedWide: "dropout_to_bf16",
    Normed: "dropout_to_bf16",
    Narrow: "dropout",
}


@pytest.mark.parametrize("block", CASES)
def test_one_operator_and_not_another_bit(block: Callable[[], nn.Module]) -> None:
    apart, before = train(block, fuse=False)
    fused, after = train(block, fuse=True)
    # Twice: for the first shape, and for all others.
    assert after.casts == [{CAST: 1}, {CASES[block]: 1}] * 2
    assert before.casts == [{CAST: 1}] * 4
    assert after.saved == before.saved
    assert all(torch.equal(a, b) for a, b in zip(apart, fused, strict=True))


@pytest.mark.parametrize("block", [Read, Alone, Undropped, Scaled])
def test_left_as_it_is(block: Callable[[], nn.Module]) -> None:
    _, graphs = train(block, fuse=True, steps=2)
    assert graphs.casts == [{CAST: 1}] * 2


@pytest.mark.parametrize(
    ("block", "form", "wrong"),
    [
        (Last, "to_bf16", lambda x, _, __: (x * 1.01).bfloat16()),
        (Dropped, "dropout_to_bf16", lambda x, mask, factor: (x * ~mask * factor).bfloat16()),
    ],
)
def test_a_wrong_form_is_noticed(
    block: Callable[[], nn.Module], form: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, _ = train(block, fuse=False, steps=2)
    monkeypatch.setitem(quantize_form.STORED, form, wrong)
    fused, _ = train(block, fuse=True, steps=2)
    assert not all(torch.equal(a, b) for a, b in zip(apart, fused, strict=True))


class Usual(Dropped):
    """The factor is none that BF16 holds."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)


def test_the_factor_is_as_exact_as_compiled_code_has_it() -> None:
    apart, _ = train(Usual, fuse=False, steps=2)
    fused, graphs = train(Usual, fuse=True, steps=2)
    assert graphs.casts == [{CAST: 1}, {"dropout_to_bf16": 1}]
    # The graph, run as it stands, rounds 1 / 0.9 to BF16: by a sixth of a percent.
    bias_apart, bias_fused = (seen[-2] for seen in (apart, fused))
    assert bias_apart.shape == (D,)
    ratio = (bias_fused.double() @ bias_apart.double()) / bias_apart.double().square().sum()
    assert ratio == pytest.approx(1 / 0.9 / 1.109375, abs=5e-4)


# By model: its configuration, and what the casts of its backward are.
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * D}
MODELS: dict[str, tuple[Any, dict[str, int]]] = {
    "bert": (
        lambda: transformers.BertConfig(**SIZES, hidden_size=D, vocab_size=64),
        {"dropout_to_bf16": 2, "grads of gelu": 1, CAST: 3},
    ),
    "gpt2": (
        lambda: transformers.GPT2Config(
            n_embd=D, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0
        ),
        {"dropout_to_bf16": 2, "grads of gelu_tanh": 1, CAST: 1},
    ),
    "llama": (
        lambda: transformers.LlamaConfig(**SIZES, hidden_size=D, vocab_size=64),
        {"to_bf16": 1, "grads of silu_mul": 1, "transpose": 1, CAST: 4},
    ),
    "vit": (
        lambda: transformers.ViTConfig(**SIZES, hidden_size=D, image_size=16, patch_size=4),
        {"to_bf16": 1, "grads of gelu": 1, "transpose": 1, CAST: 4},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    config, casts = MODELS[name]
    model = transformers.AutoModel.from_config(config()).train()
    pixels = {"pixel_values": torch.ones(2, 3, 16, 16)}
    inputs = pixels if name == "vit" else {"input_ids": torch.arange(32).view(2, 16)}
    model = fp8patch.convert_model(model, include=("h.*",) if name == "gpt2" else ("*layer*",))
    graphs = Graphs(fuse=True, keep_less=True)
    fp8patch.compile_blocks(model, backend=graphs)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
            model(**inputs).last_hidden_state.float().square().mean().backward()
    assert graphs.casts[1] == casts


def test_plain_layers_in_bf16() -> None:
    model: Any = fp8patch.convert_model(GptLayers(2, D, 2 * D, 2).bfloat16(), include=("*",))
    graphs = Graphs(fuse=True, keep_less=True)
    fp8patch.compile_blocks(model, backend=graphs)
    for _ in range(2):
        with fp8patch.autocast(backend="emulate"):
            model(torch.randn(2, 16, D, dtype=torch.bfloat16)).float().square().mean().backward()
    backward = [casts for casts in graphs.casts if "grads of gelu_tanh" in casts]
    # The first layer's input needs no gradient: nobody else reads the one in the middle.
    assert Counter(casts["dropout"] for casts in backward) == {1: 1, 2: 1}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*force_disable_caches:UserWarning")
# PyTorch makes an empty one first, on purpose, to have a pool.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("graphs", [False, True], ids=["compiled", "graphs"])
@pytest.mark.parametrize("block", [*CASES, Usual])
def test_inductors_own_code(
    block: Callable[[], nn.Module], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    plain = fuse_stored.cast_as_stored
    monkeypatch.setattr(
        fuse_stored, "cast_as_stored", lambda *args: calls.append(plain(*args)) or calls[-1]
    )
    fused = losses_on_a_gpu(graphs, block)
    assert sorted(calls) == [False, True]
    monkeypatch.setattr(compiling, "for_inductor", lambda keep_less: {})
    apart = losses_on_a_gpu(graphs, block)
    assert len(calls) == 2
    # Inductor's own kernels round once, too: the casts are equal to the bit. Bias gradients are
    # added up in another order, which single BF16 biases show.
    assert fused == pytest.approx(apart, rel=1e-6 if block is not Narrow else 5e-4)
    assert apart[-1] < apart[0]
