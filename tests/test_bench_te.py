"""Transformer Engine's part of the benchmark, against a stand-in with its interface."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fp8patch.bench.te import replace_layers, swap
from fp8patch.bench.workloads import WORKLOADS
from fp8patch.errors import Fp8PatchError


class _Linear(nn.Module):
    def __init__(
        self, k: int, n: int, *, bias: bool, params_dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, k, dtype=params_dtype))
        self.bias = nn.Parameter(torch.zeros(n, dtype=params_dtype)) if bias else torch.Tensor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias if self.bias.numel() else None)


class _LayerNorm(nn.Module):
    def __init__(self, size: int, *, eps: float, params_dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=params_dtype))
        self.bias = nn.Parameter(torch.zeros(size, dtype=params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class _RMSNorm(nn.Module):
    def __init__(self, size: int, *, eps: float, params_dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _TransformerLayer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.weight = nn.Parameter(torch.ones(width, dtype=options["params_dtype"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    package, engine = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    for name in ("Linear", "LayerNorm", "RMSNorm", "TransformerLayer"):
        setattr(engine, name, globals()[f"_{name}"])
    package.pytorch = engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)


def _bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(config)


def test_the_swap_keeps_parameters_ties_and_outputs() -> None:
    model = _bert()
    ids = torch.arange(16).reshape(2, 8)
    before, parameters = model(ids).logits, {id(p) for p in model.parameters()}
    paths = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert swap(model, paths - {"cls.predictions.transform.dense"}) == len(paths) - 1
    kinds = {type(m) for m in model.modules()}
    assert {_Linear, _LayerNorm, nn.Linear} <= kinds
    assert nn.LayerNorm not in kinds
    assert {id(p) for p in model.parameters()} == parameters
    embedding = model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.weight is embedding
    torch.testing.assert_close(model(ids).logits, before)


def test_a_plain_rms_norm_is_swapped() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, rms_norm_eps=1e-3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(8).reshape(1, 8)
    before = model(ids).logits
    assert swap(model, set()) == 0
    assert [type(m) for m in model.modules()].count(_RMSNorm) == 3
    torch.testing.assert_close(model(ids).logits, before)


def test_an_engine_without_the_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*args: Any, **options: Any) -> nn.Module:
        return nn.Identity()

    monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], "LayerNorm", other)
    with pytest.raises(Fp8PatchError, match=r"no parameter weight of shape \(32,\)"):
        swap(_bert(), set())


def test_its_layer_for_gpt_adds_gradients_in_place() -> None:
    workload = WORKLOADS["tiny"]
    model, _, _, converted = replace_layers(workload.model("cpu").bfloat16())
    assert converted == 8
    layers: Any = model.layers
    assert all(layer.options["fuse_wgrad_accumulation"] for layer in layers)
    assert all(p.main_grad.dtype == torch.float32 for p in model.parameters())
    # Sequence first, as it wants it.
    assert workload.training(model, "cpu").forward().shape == (16, 2, 32)


def test_its_layer_for_a_vision_transformer() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(32, eps=1e-6)
            self.attn = nn.Module()
            self.attn.num_heads = 2
            self.mlp = nn.ModuleDict({"fc1": nn.Linear(32, 64)})
            self.mlp.fc1 = self.mlp["fc1"]

    model = nn.Module()
    model.blocks = nn.Sequential(Block(), Block(), Block())
    made, _, _, converted = replace_layers(model)
    assert converted == 12
    blocks: Any = made.blocks
    assert blocks.layers[0].options["layernorm_epsilon"] == 1e-6
    hidden = torch.randn(2, 5, 32)
    output = blocks(hidden)
    assert (output.shape, output.dtype) == (hidden.shape, torch.float32)
    torch.testing.assert_close(output, hidden.bfloat16().float())
    with pytest.raises(Fp8PatchError, match="use te-swap|Use te-swap"):
        replace_layers(nn.Linear(4, 4))
