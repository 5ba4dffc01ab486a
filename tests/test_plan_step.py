"""The predicted gain of a whole step: against what was measured, by hand, and at its limits."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fp8patch.bench.workloads import WORKLOADS
from fp8patch.plan import step
from fp8patch.plan.model import Plan, plan_model
from fp8patch.plan.step import step_gain, step_gains
from fp8patch.rates import Rates
from fp8patch.recipe import Recipe

ROWS = Path(__file__).resolve().parent.parent / "scripts" / "results" / "bench_train_h200.json"
BF16 = Recipe(fprop="bf16", dgrad="bf16", wgrad="bf16", loss="stock")


def _fastest(workload: str, *contenders: str) -> float:
    """Step time in ms, of the newest call of each contender (they come first)."""
    # The CPU bounds bert-base's steps, and differs by host: what is predicted is its kernels.
    time = "kernel_ms" if workload == "bert-base" else "step_ms"
    rows = [row for row in json.loads(ROWS.read_text("utf-8")) if row["workload"] == workload]
    found = [[row[time] for row in rows if row["contender"] == name] for name in contenders]
    return min((times[0] for times in found if times), default=float("nan"))


def _vit_huge() -> nn.Module:
    """What timm's has of Linears and norms, under its names."""
    d = 1280
    with torch.device("meta"):
        model = nn.Module()
        model.blocks = nn.Sequential()
        for _ in range(32):
            attention = nn.ModuleDict({"qkv": nn.Linear(d, 3 * d), "proj": nn.Linear(d, d)})
            mlp = nn.ModuleDict({"fc1": nn.Linear(d, 4 * d), "fc2": nn.Linear(4 * d, d)})
            norms = {name: nn.LayerNorm(d) for name in ("norm1", "norm2")}
            model.blocks.append(nn.ModuleDict({**norms, "attn": attention, "mlp": mlp}))
        model.head = nn.Linear(d, 1000)
    return model


# The ratio to BF16 run the same way; for gpt-4096 only eager BF16 was measured.
@pytest.mark.parametrize(
    ("workload", "within"),
    [
        ("bert-base", 0.12),  # issue 4 asks for 0.15
        ("bert-large", 0.10),
        ("llama-8b-4l", 0.03),
        ("vit-huge", 0.05),
        ("bert-4096-4l", 0.06),
        ("gpt-4096", 0.04),
    ],
)
def test_it_is_near_what_was_measured(workload: str, within: float) -> None:
    entry = WORKLOADS[workload]
    model = _vit_huge() if workload == "vit-huge" else entry.model("meta")
    plan = plan_model(model, include=entry.include, tokens=entry.tokens, gpu="h200", meta=True)
    gain = step_gain(plan, "compiled", entry.optimizer)
    base = ("bf16",) if workload == "gpt-4096" else ("bf16-compile", "bf16-graphs")
    measured = _fastest(workload, *base) / _fastest(workload, "fp8-compile", "fp8-graphs")
    assert gain == pytest.approx(measured, rel=within)


def _blocks(**layers: nn.Module) -> nn.Module:
    """Two blocks of such layers."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict(copy.deepcopy(layers)) for _ in range(2))
    return model


def _linear(k: int, n: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(k, n, bias=bias, device="meta")


def _plan(model: nn.Module, recipe: Any = None, gpu: str | None = "h200", **options: Any) -> Plan:
    return plan_model(model, recipe, gpu=gpu, meta=True, **options)


@pytest.fixture
def slow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that only moves bytes, one each unit of time (1e-12 s), in whatever kernel."""
    rates = Rates(
        bf16_tflops=1e9, fp8_tflops=1e9, bf16_us=0.0, fp8_us=0.0, copy_tbps=1.0, cast_tbps=1.0,
        cast_us=0.0, weight_cast_tbps=1.0,
    )  # fmt: skip
    monkeypatch.setattr(step, "rates_of", lambda gpu: rates)


@pytest.mark.usefixtures("slow_memory")
def test_an_mlp_by_hand() -> None:
    m, d, f = 64, 32, 128
    model = _blocks(up=_linear(d, f, bias=True), down=_linear(f, d))
    plan = _plan(model, tokens=m)

    # Of one block. A GEMM reads two operands and writes BF16, as fprop does.
    weights, up, down = 2 * d * f, m * f, m * d
    gemms_bf16 = 3 * (2 * (down + d * f) + 2 * up) + 3 * (2 * (up + d * f) + 2 * down)
    gemms_fp8 = 3 * (down + d * f + 2 * up) + 3 * (up + d * f + 2 * down)
    # BF16: weights to BF16 and their gradients to FP32; the bias gradient reads grad_output.
    bf16 = gemms_bf16 + 12 * weights + 2 * up
    # FP8: weights to FP8, and transposed; each cast reads two bytes and writes two.
    casts = {"up's input": 4 * down, "up's grad": 4 * up, "down's input": 4 * up, "grad": 4 * down}
    eager = gemms_fp8 + 6 * weights + sum(casts.values())
    compiled = eager - casts["up's grad"] - casts["down's input"]
    # Both: four bytes a value of all inputs and outputs; the activation's backward; AdamW.
    both = 4 * (down + up) + 4 * (up + down) + 2 * up + 28 * (weights + f)
    assert step_gain(plan, "eager") == pytest.approx((both + bf16) / (both + eager))
    assert step_gain(plan, "compiled") == pytest.approx((both + bf16) / (both + compiled))
    without = both - 28 * (weights + f)
    expected = (without + bf16) / (without + compiled)
    assert step_gain(plan, "compiled", "none") == pytest.approx(expected)


@pytest.mark.usefixtures("slow_memory")
def test_siblings_share_a_cast() -> None:
    m, d = 64, 32
    apart = _plan(_blocks(a=_linear(d, d), b=_linear(d, d), c=_linear(d, d)), tokens=m)
    shared = _plan(_blocks(q=_linear(d, d), k=_linear(d, d), v=_linear(d, d)), tokens=m)
    # Three Linears, nine GEMMs; then weights, and what is left of a gradient.
    bf16 = 9 * (2 * (m * d + d * d) + 2 * m * d) + 3 * 12 * d * d
    fp8 = 9 * (m * d + d * d + 2 * m * d) + 3 * 6 * d * d + 6 * 4 * m * d
    both = 24 * m * d + 3 * 28 * d * d
    expected = (both + bf16) / (both + fp8)
    assert step_gain(apart, "eager") == pytest.approx(expected)
    # Two inputs less are cast, and written by the kernel before.
    fewer = both - 2 * 2 * m * d
    expected = (fewer + bf16) / (fewer + fp8 - 2 * 4 * m * d)
    assert step_gain(shared, "eager") == pytest.approx(expected)


@pytest.mark.usefixtures("slow_memory")
@pytest.mark.parametrize(("loss", "each"), [("fused", 6), ("stock", 28)])
def test_a_loss_by_hand(loss: Any, each: int) -> None:
    m, d, v = 64, 32, 256
    model = nn.Module()
    model.lm_head = _linear(d, v)
    plan = _plan(model, Recipe(loss=loss, include=("lm_head",)), tokens=m)
    # A value of the logits: 28 bytes in BF16, whoever computes them.
    bf16 = 3 * 2 * (m * d + d * v + m * v) + 12 * d * v + 28 * m * v
    fp8 = 3 * (m * d + d * v + 2 * m * v) + 6 * d * v + 4 * m * (d + v) + each * m * v
    both = 4 * m * (d + v) + 28 * d * v
    assert step_gain(plan, "eager") == pytest.approx((both + bf16) / (both + fp8))


@pytest.mark.parametrize(
    ("paths", "shared"),
    [
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"), 2),
        (("attention.self.query", "attention.self.key", "attention.output.dense"), 1),
        (("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj"), 1),
        (("EncDecAttention.q", "EncDecAttention.k", "EncDecAttention.v"), 1),
        (("mlp.gate_proj", "mlp.up_proj"), 1),
        (("a.q_proj", "b.q_proj"), 0),
        (("mlp.up_proj", "mlp.other"), 0),
    ],
)
def test_who_is_a_sibling(paths: tuple[str, ...], shared: int) -> None:
    model = nn.Module()
    for path in paths:
        inner = model
        *above, leaf = path.split(".")
        for name in above:
            if not hasattr(inner, name):
                inner.add_module(name, nn.Module())
            inner = inner.get_submodule(name)
        inner.add_module(leaf, _linear(32, 32))
    assert len(step._Around(list(_plan(model).decisions)).shares) == shared


def test_attention_with_wide_heads_is_no_mlp() -> None:
    # T5-11B: keys and values are wider than the model, and what comes back is not.
    model = _blocks(q=_linear(32, 64), k=_linear(32, 64), v=_linear(32, 64), o=_linear(64, 32))
    assert not step._Around(list(_plan(model).decisions)).after
    gated = _blocks(gate_proj=_linear(32, 64), up_proj=_linear(32, 64), down_proj=_linear(64, 32))
    around = step._Around(list(_plan(gated).decisions))
    assert around.after == {"layers.0.down_proj", "layers.1.down_proj"}
    assert len(around.before) == 4


def _bert(vocabulary: int) -> nn.Module:
    config = transformers.BertConfig(vocab_size=vocabulary, num_hidden_layers=2)
    with torch.device("meta"):
        return transformers.BertForMaskedLM(config)


def test_a_vocabulary_that_is_no_multiple_of_eight_gains() -> None:
    odd, even = _plan(_bert(30522)), _plan(_bert(30528))
    difference = step_gain(odd, "compiled") - step_gain(even, "compiled")  # type: ignore[operator]
    assert difference > 0.2
    # Not where tensor cores take rows of any length.
    on_l4 = [step_gain(_plan(_bert(size), gpu="l4"), "compiled") for size in (30522, 30528)]
    assert on_l4[0] == pytest.approx(on_l4[1], rel=0.01)


def test_scales_of_live_values_leave_activations_apart() -> None:
    model = _blocks(up=_linear(1024, 4096), down=_linear(4096, 1024))
    delayed, current = step_gains(_plan(model)), step_gains(_plan(model, "current"))
    assert delayed is not None
    assert current is not None
    assert delayed["compiled"] > delayed["eager"] > current["eager"] == current["compiled"]


def test_where_nothing_is_predicted_or_nothing_gained() -> None:
    assert step_gains(_plan(_bert(30522), gpu=None)) is None
    assert step_gains(_plan(_bert(30522), min_gain=99)) == {"eager": 1.0, "compiled": 1.0}
    # BF16 in all GEMMs: the same but for the padded head.
    assert step_gain(_plan(_bert(30528), BF16), "eager") == pytest.approx(1.0, abs=0.02)


def test_what_stays_in_bf16_makes_it_matter_less() -> None:
    config = transformers.MixtralConfig(num_hidden_layers=2, vocab_size=32000)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    plan = _plan(model, Recipe(loss="stock"))
    assert any(d.kind == "experts" for d in plan.decisions)
    gain, gemms = step_gain(plan, "eager"), plan.summary()["gemm_gain"]
    assert gain is not None
    assert 1.0 < gain < gemms
