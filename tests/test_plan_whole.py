"""The plan as a whole: shares, predicted gain, groups, dictionaries; and that planning is pure."""

import copy
import json
from typing import Any

import pytest
import torch
import transformers
import zoo
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from plan_cases import holder
from torch import nn

from fp8patch.errors import PlanError, RecipeError
from fp8patch.plan.model import CODES, Plan, plan_model
from fp8patch.plan.walk import walk
from fp8patch.recipe import Recipe

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
