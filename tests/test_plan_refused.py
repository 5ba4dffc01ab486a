"""What `plan_model` refuses, and layers that hold nothing."""

from typing import Any

import pytest
import torch
from plan_cases import decision, holder
from torch import nn

import fp8patch
from fp8patch.errors import PlanError
from fp8patch.plan.model import plan_model
from fp8patch.recipe import Recipe


@pytest.mark.parametrize("model", ["my-model", None, nn.Linear, {"a": 1}, torch.ones(2)])
def test_what_is_no_module(model: Any) -> None:
    with pytest.raises(
        PlanError, match=r"plan_model takes a torch\.nn\.Module, not .*Load"
    ) as error:
        plan_model(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("min_gain", [float("nan"), float("inf"), -1, True, "1"])
def test_a_gain_that_nothing_compares_with(min_gain: Any) -> None:
    with pytest.raises(PlanError, match="min_gain: .* is not allowed. Use a number of at least 0"):
        plan_model(nn.Linear(16, 16), min_gain=min_gain)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("misaligned", ["skip", "pad"])
@pytest.mark.parametrize("sizes", [(0, 16), (16, 0), (0, 0), (0, 7)])
def test_an_empty_layer_stays_as_it_is(sizes: tuple[int, int], misaligned: Any) -> None:
    layer = nn.Linear(*sizes)
    found = decision(layer, recipe=Recipe(misaligned=misaligned), include=["layer"])
    assert (found.action, found.code, found.gain) == ("skip", "empty", None)
    assert "no elements" in found.reason
    model = holder(layer=layer, other=nn.Linear(16, 32))
    fp8patch.convert_model(model, Recipe(misaligned=misaligned))
    assert type(model.layer) is nn.Linear
    out = layer(torch.ones(2, sizes[0]))
    assert out.shape == (2, sizes[1])


def test_an_empty_norm_too() -> None:
    assert decision(nn.LayerNorm(0)).code == "empty"
