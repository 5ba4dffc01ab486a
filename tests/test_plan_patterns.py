"""Which modules a user's patterns choose, and what is said of one that chooses none."""

from typing import Any

import pytest
import zoo
from torch import nn

from fp8patch.errors import PlanError
from fp8patch.plan.model import plan_model
from fp8patch.plan.patterns import logical_path, matches
from fp8patch.recipe import Recipe


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
