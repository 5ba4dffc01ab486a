"""The plan: every reason code, and what is converted. Each trap is one that a naive rule
(`isinstance(module, nn.Linear)` and nothing else) falls into."""

import pytest
import torch
import transformers
import zoo
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from plan_cases import (
    RMS,
    ChannelsFirst,
    DuckLayerNorm,
    GatedRMSNorm,
    LayerScale,
    Scaled,
    decision,
    holder,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrizations, prune
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from fp8patch.convert import convert_model
from fp8patch.plan.model import CODES, plan_model
from fp8patch.plan.walk import stock_class
from fp8patch.recipe import Recipe


def naive(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.LayerNorm)


# -- what is converted ----------------------------------------------------------------------------


def test_plain_linear_norm_and_conv1d_are_converted() -> None:
    model = holder(
        linear=nn.Linear(32, 64),
        plain=nn.LayerNorm(32),
        bare=nn.LayerNorm(32, elementwise_affine=False),
        unbiased=nn.LayerNorm(32, bias=False),
        conv=Conv1D(64, 32),
    )
    plan = plan_model(model)
    assert [d.path for d in plan.converted()] == ["linear", "plain", "bare", "unbiased", "conv"]
    assert {d.code for d in plan.decisions} == {"ok"}
    # Conv1D keeps [in, out]: the shape must not be read off the weight as a Linear's.
    assert (plan["conv"].out_features, plan["conv"].in_features) == (64, 32)


def test_the_root_may_be_a_candidate_itself() -> None:
    plan = plan_model(nn.Linear(16, 16), only=["*"])
    assert plan[""].action == "convert"
    assert str(plan[""]).startswith("(root): ")


def test_drop_in_subclasses_are_converted() -> None:
    assert decision(FalconLinear(32, 32)).action == "convert"
    timm_norm = type("LayerNorm", (nn.LayerNorm,), {"__module__": "timm.layers.norm"})
    assert decision(timm_norm(32)).action == "convert"


def test_fsdp_linear_counts_as_linear() -> None:
    module = nn.Linear(32, 32)
    # What fully_shard does to a module's class.
    module.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    assert stock_class(module) is nn.Linear
    assert decision(module).action == "convert"
    odd = Scaled(32, 32)
    odd.__class__ = type("FSDPScaled", (FSDPModule, Scaled), {})
    assert decision(odd).code == "subclass"


def test_accelerate_hook_is_converted_and_said_so() -> None:
    module = nn.Linear(32, 32)
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    found = decision(module)
    assert (found.action, found.code) == ("convert", "hooked")


def test_a_converted_model_is_planned_as_its_stock_model() -> None:
    model = zoo.ENTRIES["gpt2"].build()
    before = plan_model(model)
    convert_model(model)
    assert plan_model(model) == before


# -- what is not, and why -------------------------------------------------------------------------


def _forward_replaced() -> nn.Module:
    module = nn.Linear(32, 32)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


def _hook_over_a_replaced_forward() -> nn.Module:
    module = _forward_replaced()
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    return module


def _pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.5)


def _with_weight(weight: torch.Tensor) -> nn.Module:
    module = nn.Linear(32, 32, bias=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def _of_library(name: str) -> nn.Module:
    return type("Linear8bit", (nn.Linear,), {"__module__": f"{name}.nn"})(32, 32)


IMPOSSIBLE = [
    ("subclass", Scaled(32, 32)),
    ("subclass", ChannelsFirst(32)),
    ("parametrized", parametrizations.weight_norm(nn.Linear(32, 32))),
    ("parametrized", _pruned()),
    ("instance_forward", _forward_replaced()),
    ("instance_forward", _hook_over_a_replaced_forward()),
    ("meta_weight", nn.Linear(32, 32, device="meta")),
    ("quantized", _with_weight(torch.zeros(32, 32, dtype=torch.float8_e4m3fn))),
    ("quantized", _with_weight(torch.zeros(32, 32, dtype=torch.int8))),
    ("quantized", _of_library("bitsandbytes")),
    ("quantized", _of_library("torchao")),
    ("dtype", nn.Linear(32, 32, dtype=torch.float64)),
    ("dtype", nn.LayerNorm(32, dtype=torch.float64)),
    ("dtype", nn.Linear(32, 32, dtype=torch.complex64)),
    ("misaligned", nn.Linear(32, 24)),
    ("misaligned", nn.Linear(40, 32)),
]


@pytest.mark.parametrize(("code", "module"), IMPOSSIBLE)
def test_impossible_is_skipped_and_include_changes_nothing(code: str, module: nn.Module) -> None:
    assert naive(module)
    for include in ((), ("layer",)):
        found = decision(module, include=include)
        assert (found.action, found.code) == ("skip", code)


def test_reasons_name_the_class() -> None:
    assert "Scaled is a subclass of Linear" in decision(Scaled(32, 32)).reason


def test_fp64_is_no_dtype_for_fp8_and_16_bits_are() -> None:
    found = decision(nn.Linear(32, 32).double())
    assert found.reason == CODES["dtype"]
    conv = Conv1D(64, 32).double()
    assert decision(conv).code == "dtype"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert decision(nn.Linear(32, 32, dtype=dtype)).code == "ok"
    model = holder(wide=nn.Linear(32, 32).double(), plain=nn.Linear(32, 32))
    assert [d.path for d in plan_model(model).converted()] == ["plain"]
    convert_model(model)
    assert type(model.wide) is nn.Linear


def test_misaligned_sentence_and_padding() -> None:
    model = holder(mlp=holder(gate_proj=nn.Linear(32, 10), up_proj=nn.Linear(33, 34)))
    plan = plan_model(model)
    sentence = "mlp.gate_proj: out_features=10 is not a multiple of 16"
    assert str(plan["mlp.gate_proj"]).startswith("mlp.gate_proj: only 10 outputs")
    # Inside a repeated block the same layer is no head, and its shape is the reason.
    blocks = plan_model(holder(mlp=nn.ModuleList([nn.Linear(32, 10)])))
    assert str(blocks["mlp.0"]).startswith(sentence.replace("gate_proj", "0"))
    both = "out_features=34 and in_features=33 are not multiples of 16"
    assert plan["mlp.up_proj"].reason.startswith(both)
    padded = plan_model(model, Recipe(misaligned="pad"), include=["*gate_proj"])
    assert [d.code for d in padded.decisions] == ["ok", "ok"]
    assert "padded to 48 x 48" in padded["mlp.up_proj"].reason


def test_meta_is_a_reason_only_for_a_live_model() -> None:
    module = nn.Linear(32, 32, device="meta")
    assert decision(module, meta=True).action == "convert"
    # accelerate's offload leaves weights on meta until its hook runs: hooked, and not there.
    offloaded = cpu_offload(nn.Linear(32, 32), execution_device=torch.device("cpu"))
    assert offloaded.weight.device.type == "meta"
    assert decision(offloaded).code == "meta_weight"


def test_multihead_attention_and_the_out_proj_it_never_calls() -> None:
    plan = plan_model(holder(attn=nn.MultiheadAttention(32, 2)))
    assert [(d.path, d.kind, d.code) for d in plan.decisions] == [
        ("attn", "mha", "unsupported"),
        ("attn.out_proj", "linear", "bypassed"),
    ]
    assert sum(d.param_share for d in plan.decisions) == pytest.approx(1)


ADVISED = [
    ("lm_head", nn.Linear(32, 64), "head"),
    ("classifier", nn.Linear(32, 2), "classifier"),
    ("score", nn.Linear(32, 1), "classifier"),
    ("value", nn.Linear(32, 1), "classifier"),
    ("gate", nn.Linear(32, 64), "router"),
    ("router", nn.Linear(32, 64), "router"),
    ("shared_expert_gate", nn.Linear(32, 16), "router"),
    ("lora_A", holder(default=nn.Linear(32, 16)), "lora"),
]


@pytest.mark.parametrize(("name", "module", "code"), ADVISED)
def test_advised_skips_and_include_lifts_them(name: str, module: nn.Module, code: str) -> None:
    model = holder(**{name: module})
    (found,) = plan_model(model).decisions
    assert (found.action, found.code) == ("skip", code)
    (found,) = plan_model(model, include=[name]).decisions
    aligned = found.out_features % 16 == 0
    assert (found.action, found.code) == (("convert", "ok") if aligned else ("skip", "misaligned"))


@pytest.mark.parametrize("name", ["gate_proj", "gate_up_proj", "aggregate", "up_gate_x"])
def test_gated_mlps_are_no_routers(name: str) -> None:
    assert decision(nn.Linear(32, 64), name).code == "ok"


def test_tied_head_is_found_by_its_weight_not_its_name() -> None:
    embedding, out = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    out.weight = embedding.weight
    plan = plan_model(holder(tok=embedding, unembed=out))
    assert plan["unembed"].code == "tied_head"
    assert "the embedding tok" in plan["unembed"].reason


@pytest.mark.parametrize(
    ("name", "path", "code"),
    [
        ("bert", "cls.predictions.decoder", "tied_head"),
        ("llama", "lm_head", "head"),
        ("gpt2", "lm_head", "tied_head"),
        ("t5", "lm_head", "tied_head"),
        ("mobilebert", "cls.predictions.dense", "head"),
        ("wav2vec2", "lm_head", "head"),
        ("bert_cls", "classifier", "classifier"),
        ("detr", "bbox_predictor.layers.2", "classifier"),
        ("detr", "bbox_predictor.layers.0", "ok"),
        ("vilt", "classifier.3", "classifier"),
        ("roberta", "lm_head.dense", "ok"),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert_gate", "router"),
        ("switch_transformers", "encoder.block.1.layer.1.mlp.router.classifier", "router"),
        ("llama4_text", "model.layers.1.feed_forward.router", "subclass"),
        ("squeezebert", "transformer.encoder.layers.0.output.layernorm", "subclass"),
        ("convnext", "convnext.embeddings.layernorm", "subclass"),
        ("t5", "encoder.block.0.layer.1.DenseReluDense.wo", "keep_in_fp32"),
        ("t5", "encoder.block.0.layer.1.DenseReluDense.wi", "ok"),
        ("wavlm", "wavlm.encoder.layers.0.attention.gru_rel_pos_linear", "misaligned"),
        ("mask2former", "transformer_module.decoder.layers.0.cross_attn.out_proj", "bypassed"),
        ("deberta", "deberta.embeddings.LayerNorm", "unsupported"),
    ],
)
def test_architectures(name: str, path: str, code: str) -> None:
    assert plan_model(zoo.ENTRIES[name].build())[path].code == code


def test_a_classifier_of_many_labels_is_known_by_the_config() -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        image_size=32, num_labels=160,
    )  # fmt: skip
    plan = plan_model(transformers.ViTForImageClassification(config))
    assert (plan["classifier"].out_features, plan["classifier"].code) == (160, "classifier")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
def test_peft_adapters_are_skipped_and_bases_converted() -> None:
    model = zoo.ENTRIES["bert_cls"].build()
    lora = LoraConfig(r=16, target_modules=["query"], modules_to_save=["classifier"])
    plan = plan_model(get_peft_model(model, lora))
    by_leaf: dict[str, set[str]] = {}
    for found in plan.decisions:
        if ".query." in found.path or "classifier" in found.path:
            leaf = found.path.split("query.")[-1].split("base_model.model.")[-1]
            by_leaf.setdefault(leaf, set()).add(found.code)
    assert by_leaf == {
        "base_layer": {"ok"},
        "lora_A.default": {"lora"},
        "lora_B.default": {"lora"},
        "classifier.original_module": {"classifier"},
        "classifier.modules_to_save.default": {"classifier"},
    }


# -- norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
@pytest.mark.parametrize("offset", [False, True])
def test_rmsnorm_is_known_by_what_it_computes(offset: bool, eps: float, meta: bool) -> None:
    with torch.device("meta" if meta else "cpu"):
        module = RMS(48, eps, offset)
    found = decision(module, meta=meta)
    assert (found.kind, found.code, found.class_name) == ("rmsnorm", "ok", "RMS")
    assert f"* {'(1 + w)' if offset else 'w'})" in found.reason


def test_torch_rmsnorm_with_the_default_eps() -> None:
    assert "* w)" in decision(nn.RMSNorm(32)).reason


def test_a_name_is_not_enough() -> None:
    found = decision(GatedRMSNorm(32))
    assert (found.kind, found.code) == ("rmsnorm", "unsupported")
    assert "computes more" in found.reason
    assert plan_model(holder(scale=LayerScale(32), act=nn.PReLU(32))).decisions == ()
    duck = decision(DuckLayerNorm(32))
    assert (duck.kind, duck.code) == ("norm", "unsupported")


@pytest.mark.parametrize(
    ("name", "form"),
    [("llama", "w"), ("gemma2", "(1 + w)"), ("t5", "w"), ("qwen3_next", "(1 + w)")],
)
def test_rmsnorms_of_architectures(name: str, form: str) -> None:
    norms = [d for d in plan_model(zoo.ENTRIES[name].build()).decisions if d.kind == "rmsnorm"]
    assert any(f"* {form})" in d.reason for d in norms)
