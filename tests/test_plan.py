"""The plan: every reason code, patterns, purity, grouping. Each trap is one that a naive rule
(`isinstance(module, nn.Linear)` and nothing else) falls into."""

import copy
import json
from typing import Any

import pytest
import torch
import transformers
import zoo
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrizations, prune
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from fp8patch.convert import convert_model
from fp8patch.errors import PlanError, RecipeError
from fp8patch.plan import CODES, Decision, Plan, plan_model
from fp8patch.plan_patterns import logical_path, matches
from fp8patch.plan_walk import stock_class, walk
from fp8patch.recipe import Recipe


def holder(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def decision(module: nn.Module, name: str = "layer", **options: Any) -> Decision:
    """The decision on one module, in a model with nothing else."""
    return plan_model(holder(**{name: module}), **options)[name]


def naive(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.LayerNorm)


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class ChannelsFirst(nn.LayerNorm):
    pass


class RMS(nn.Module):
    """Not called a norm, and one all the same."""

    def __init__(self, width: int, eps: float = 1e-5, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.unit_offset = eps, unit_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * (self.weight + self.unit_offset)


class GatedRMSNorm(RMS):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x


class LayerScale(nn.Module):
    """One vector, no children: everything of an RMSNorm but the norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class DuckLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))


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
    assert (found.kind, found.code, found.class_name) == ("rmsnorm", "unsupported", "RMS")
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


# -- experts and shares ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4_text", "qwen3_moe", "deepseek_v3"])
def test_experts_are_listed_with_their_shape(name: str) -> None:
    model = zoo.ENTRIES[name].build()
    experts = {d.path: d for d in plan_model(model).decisions if d.kind == "experts"}
    assert experts
    hidden = model.config.hidden_size
    for path, found in experts.items():
        # The two layouts, [E, N, K] and gpt-oss's [E, K, N], come out the same.
        width = found.out_features if path.endswith("down_proj") else found.in_features
        assert (width, found.code) == (hidden, "unsupported")


@pytest.mark.parametrize("name", ["xlnet", "funnel", "wav2vec2", "vit", "mamba"])
def test_other_3d_parameters_are_no_experts(name: str) -> None:
    assert all(d.kind != "experts" for d in plan_model(zoo.ENTRIES[name].build()).decisions)


def test_expert_flops_are_those_of_the_experts_that_a_token_visits() -> None:
    model = zoo.ENTRIES["mixtral"].build()
    plan = plan_model(model)
    up = plan["model.layers.0.mlp.experts.gate_up_proj"]
    query = plan["model.layers.0.self_attn.q_proj"]
    visits = model.config.num_experts_per_tok
    ratio = visits * up.out_features * up.in_features / (query.out_features * query.in_features)
    assert up.flops_share / query.flops_share == pytest.approx(ratio)


@pytest.mark.parametrize("name", sorted(zoo.ENTRIES))
def test_every_architecture_total_and_consistent(name: str) -> None:
    model = zoo.ENTRIES[name].build()
    plan = plan_model(model)
    paths = [d.path for d in plan.decisions]
    assert len(paths) == len(set(paths))
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert linears <= set(paths)
    assert all(d.code in CODES and d.reason for d in plan.decisions)
    assert sum(d.flops_share for d in plan.decisions) == pytest.approx(1)
    assert sum(d.param_share for d in plan.decisions) < 1 + 1e-9
    assert plan.params == sum(p.numel() for p in model.parameters())
    assert plan.converted()
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_shared_parameters_count_once() -> None:
    first, second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    second.weight = first.weight
    plan = plan_model(holder(first=first, second=second))
    assert [d.param_share for d in plan.decisions] == [1.0, 0.0]
    assert [d.params for d in plan.decisions] == [1024, 1024]


def test_a_module_under_two_names_is_one_candidate_and_answers_to_both() -> None:
    shared = nn.Linear(32, 32)
    model = holder(first=shared, second=shared)
    assert [d.path for d in plan_model(model).decisions] == ["first"]
    assert plan_model(model, skip=["second"])["first"].code == "pattern"


def test_a_module_that_contains_itself_ends() -> None:
    model = holder(layer=nn.Linear(32, 32))
    model.add_module("again", model)
    assert [d.path for d in plan_model(model).decisions] == ["layer"]


# -- patterns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("model.layers.0", "model.layers.0.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("*.mlp", "model.layers.0.mlp.up_proj", True),
        ("*.up_proj", "model.layers.0.mlp.up_proj", True),
        ("up_proj", "model.layers.0.mlp.up_proj", False),
        ("*.MLP.*", "model.layers.0.mlp.up_proj", False),
        ("*.query", "base_model.model.bert.query.base_layer", True),
        ("bert.*", "module._orig_mod.bert.query", True),
    ],
)
def test_pattern_semantics(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, (path,)) is expected


def test_logical_path() -> None:
    assert logical_path("module.head.modules_to_save.default") == "head"
    assert logical_path("my_module.base_layers.x") == "my_module.base_layers.x"


def test_only_skip_and_include_together() -> None:
    model = zoo.ENTRIES["llama"].build()
    plan = plan_model(
        model, Recipe(skip=("*.v_proj",)),
        only=["model.layers.0", "lm_head"], skip=["*.o_proj"], include=["lm_head"],
    )  # fmt: skip
    assert plan["model.layers.0.self_attn.q_proj"].code == "ok"
    assert plan["model.layers.0.self_attn.v_proj"].code == "pattern"
    assert plan["model.layers.0.self_attn.o_proj"].code == "pattern"
    assert plan["model.layers.1.self_attn.q_proj"].code == "not_selected"
    assert plan["lm_head"].code == "ok"
    # A skip is a wish of the user's, which an include elsewhere does not lift.
    assert plan_model(model, skip=["lm_head"], include=["lm_head"])["lm_head"].code == "pattern"


@pytest.mark.parametrize("option", ["only", "skip", "include"])
def test_unmatched_pattern_names_the_nearest(option: str) -> None:
    model = zoo.ENTRIES["llama"].build()
    with pytest.raises(PlanError) as raised:
        plan_model(model, **{option: ["*.q_porj"]})
    text = str(raised.value)
    assert f'{option} pattern "*.q_porj" matches none of the 20 candidates' in text
    assert 'Nearest: "*.q_proj"' in text
    with pytest.raises(PlanError, match=r'Nearest: "model\.layers\.0\.self_attn\.q_proj"'):
        plan_model(model, **{option: ["model.layers.0.self_atn.q_proj"]})


def test_a_recipe_pattern_that_matches_nothing_is_an_error_too() -> None:
    with pytest.raises(PlanError, match="skip pattern"):
        plan_model(nn.Linear(16, 16), Recipe(skip=("*.nothing",)))


def test_a_pattern_for_what_is_no_candidate() -> None:
    model = zoo.ENTRIES["llama"].build()
    with pytest.raises(PlanError, match=r"model\.embed_tokens is a Embedding"):
        plan_model(model, only=["model.embed_tokens"])
    # To skip it is what happens anyway.
    assert plan_model(model, skip=["model.embed_tokens"]) == plan_model(model)


@pytest.mark.parametrize("bad", [[""], [3]])
def test_what_is_no_pattern(bad: list[Any]) -> None:
    with pytest.raises(PlanError, match="is not a pattern"):
        plan_model(nn.Linear(16, 16), only=bad)


def test_a_lone_string_is_one_pattern() -> None:
    plan = plan_model(zoo.ENTRIES["llama"].build(), only="*.q_proj")
    assert {d.path.rsplit(".", 1)[-1] for d in plan.converted()} == {"q_proj"}


# -- gain -----------------------------------------------------------------------------------------


def test_slower_layers_are_skipped_by_min_gain() -> None:
    model = holder(small=nn.Linear(64, 64), large=nn.Linear(8192, 8192, device="meta"))
    assert plan_model(model, gpu="h100", meta=True)["small"].code == "ok"  # 0 by default
    plan = plan_model(model, gpu="h100", min_gain=1.0, meta=True)
    assert plan["small"].code == "slower"
    assert plan["small"].reason == f"slower: {plan['small'].gain:.2g}x at M=4096"
    assert plan["large"].code == "ok"
    assert plan["large"].gain > 1
    from_recipe = plan_model(model, Recipe(min_gain=99), gpu="h100", meta=True)
    assert not from_recipe.converted()
    assert "min_gain 99" in from_recipe["large"].reason
    assert plan_model(model, Recipe(min_gain=99), min_gain=0, meta=True)["small"].code == "ok"
    assert plan_model(model, min_gain=99, include=["small"], meta=True)["small"].code == "ok"


def test_no_gpu_predicts_nothing() -> None:
    plan = plan_model(nn.Linear(16, 16), gpu=None, min_gain=9)
    assert (plan.gpu, plan[""].gain, plan[""].code) == (None, None, "ok")
    assert plan.summary()["gemm_gain"] is None


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True])
def test_bad_tokens(tokens: Any) -> None:
    with pytest.raises(PlanError, match="tokens"):
        plan_model(nn.Linear(16, 16), tokens=tokens)


def test_bad_gpu_and_recipe() -> None:
    with pytest.raises(PlanError, match="GPU"):
        plan_model(nn.Linear(16, 16), gpu="a100x")
    with pytest.raises(RecipeError):
        plan_model(nn.Linear(16, 16), "no_such")


# -- purity ---------------------------------------------------------------------------------------


def _state(model: nn.Module) -> list[Any]:
    """Everything that a module holds, by identity, and its tensors also by value."""
    rows: list[Any] = []
    for place in walk(model):
        module = place.module
        rows.append((place.paths, type(module), sorted(vars(module)), module.training))
        for value in vars(module).values():
            rows.append(id(value))
            if isinstance(value, dict):
                rows.extend((key, id(item)) for key, item in value.items())
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                rows.append((id(tensor), tensor._version, tensor.data_ptr(), tensor.grad is None))
                rows.append(tensor.detach().flatten().clone().view(torch.uint8).tolist())
    return rows


@pytest.mark.parametrize("name", ["bert", "gpt2", "gemma2", "mixtral", "t5", "mask2former"])
def test_planning_changes_nothing(name: str) -> None:
    model = zoo.ENTRIES[name].build()
    first = next(iter(model.parameters()))
    add_hook_to_module(model, AlignDevicesHook(execution_device="cpu"))
    before, random = _state(model), torch.get_rng_state()
    calls: list[nn.Module] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda m, _: calls.append(m))
    hooked = _state(model)
    plan_model(model, min_gain=1.0)
    assert _state(model) == hooked
    assert len(before) <= len(hooked)
    assert torch.equal(torch.get_rng_state(), random)
    assert next(iter(model.parameters())) is first
    assert not calls  # no module of the model ran, not even a norm


def test_planning_is_deterministic_and_copies_agree() -> None:
    model = zoo.ENTRIES["qwen3"].build()
    assert plan_model(model) == plan_model(model) == plan_model(copy.deepcopy(model))


# -- grouping and dictionaries --------------------------------------------------------------------


def test_groups_collapse_repeated_blocks() -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=32, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    plan = plan_model(model, meta=True, skip=["model.layers.0", "model.layers.3.mlp"])
    groups = {group.path: group for group in plan.groups()}
    assert len(plan.decisions) == 290
    assert groups["model.layers.{1-2,4-31}.mlp.up_proj"].count == 30
    assert groups["model.layers.{0,3}.mlp.up_proj"].first.code == "pattern"
    assert groups["model.layers.{1-31}.self_attn.q_proj"].count == 31
    assert sum(group.count for group in groups.values()) == 290
    whole = plan_model(model, meta=True)
    assert len(whole.groups()) == 11
    star = {group.path: group.count for group in whole.groups()}
    assert star["model.layers.*.self_attn.q_proj"] == 32
    assert sum(g.flops_share for g in whole.groups()) == pytest.approx(1)


def test_a_number_that_does_not_vary_is_shown() -> None:
    plan = plan_model(zoo.ENTRIES["t5"].build())
    assert "encoder.block.*.layer.0.SelfAttention.q" in {g.path for g in plan.groups()}


def test_summary() -> None:
    model = holder(a=nn.Linear(32, 32, bias=False), b=nn.Linear(32, 48, bias=False))
    total = plan_model(model, skip=["b"]).summary()
    assert (total["candidates"], total["converted"]) == (2, 1)
    assert total["codes"] == {"ok": 1, "pattern": 1}
    assert total["flops_share"] == pytest.approx(0.4)
    assert total["param_share"] == pytest.approx(0.4)


def test_from_dict_says_what_is_wrong() -> None:
    good = plan_model(nn.Linear(16, 16)).to_dict()
    for change, text in [
        ({"decisions": None}, "not a plan"),
        ({"decisions": [{"path": "x"}]}, "not a plan"),
        ({"decisions": [{**good["decisions"][0], "code": "whim"}]}, "'whim' is unknown"),
        ({"decisions": [{**good["decisions"][0], "kind": "pool"}]}, "'pool' is unknown"),
    ]:
        with pytest.raises(PlanError, match=text):
            Plan.from_dict({**good, **change})
    del good["tokens"]
    with pytest.raises(PlanError, match="'tokens' is missing"):
        Plan.from_dict(good)
