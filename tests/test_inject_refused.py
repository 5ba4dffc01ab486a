"""What a model returns under injection, and what is refused."""

import dataclasses
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch
from injected import Wrapped, armed
from torch import Tensor, nn
from trap_models import blocks, noise, tokens

import fp8patch
from fp8patch.errors import ConversionError, Fp8PatchError, PlanError
from fp8patch.inject.outputs import find_loss, to_fp32, tokens_of


@dataclasses.dataclass
class Output:
    x: Tensor
    note: str = "kept"


class Pair(NamedTuple):
    a: Tensor
    b: Any


def test_outputs_keep_their_type() -> None:
    from transformers import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    narrow, ids, cache = noise(2, 3).bfloat16(), torch.arange(3), DynamicCache()
    hf: Any = to_fp32(CausalLMOutputWithPast(logits=narrow, past_key_values=cache))
    assert type(hf) is CausalLMOutputWithPast
    assert hf.logits.dtype == hf["logits"].dtype == torch.float32
    assert hf.past_key_values is cache
    assert hf.loss is None
    pair = to_fp32(Pair(narrow, (ids, [narrow])))
    assert type(pair) is Pair
    assert pair.b[0] is ids
    assert pair.b[1][0].dtype == torch.float32
    output = to_fp32(Output(narrow))
    assert type(output) is Output
    assert output.x.dtype == torch.float32
    assert output.note == "kept"
    untouched = {"a": ids, "b": (noise(2),)}
    assert to_fp32(untouched) is untouched
    assert to_fp32(narrow.requires_grad_()).grad_fn is not None


def test_losses_and_batch_sizes_are_found() -> None:
    loss = noise(3).requires_grad_().sum()
    logits = noise(2, 3).requires_grad_() * 1
    for output in (loss, (logits, loss), {"loss": loss}, types.SimpleNamespace(loss=loss)):
        found = find_loss(output)
        assert found is not None
        assert torch.equal(found, loss)
        assert not found.requires_grad
    assert find_loss((loss, loss)) is find_loss(logits) is find_loss(None) is None
    assert tokens_of(nn.Linear(1, 1), (), {"input_ids": tokens(3, 5)}) == 15
    assert tokens_of(nn.Linear(1, 1), (noise(2, 7, 32),), {}) == 14
    patches = nn.Sequential(nn.Conv2d(3, 8, 4, 4))
    assert tokens_of(patches, (noise(2, 3, 16, 16),), {}) == 32
    assert tokens_of(nn.Linear(1, 1), ("text",), {}) is None


# -- what is refused ------------------------------------------------------------------------------


def pretend(module: nn.Module, name: str, origin: str) -> nn.Module:
    """`module` as if its class were `origin.name`."""
    module.__class__ = type(name, (type(module),), {"__module__": origin})
    return module


def conflicting(kind: str) -> nn.Module:
    model = blocks()
    if kind == "DataParallel":
        return nn.DataParallel(model)
    if kind == "torchao":
        pretend(model.layers[0].up, "Float8Linear", "torchao.float8.float8_linear")
    elif kind == "Transformer Engine":
        pretend(model.layers[0].norm, "LayerNormLinear", "transformer_engine.pytorch.module")
    elif kind == "DeepSpeed":
        return pretend(Wrapped(model), "DeepSpeedEngine", "deepspeed.runtime.engine")
    elif kind == "quantised":
        model.is_quantized = True
    else:
        pretend(model, "FullyShardedDataParallel", "torch.distributed.fsdp")
        model._use_orig_params = False
    return model


@pytest.mark.parametrize(
    "kind",
    ["DataParallel", "torchao", "Transformer Engine", "DeepSpeed", "quantised", "FSDP1"],
)
def test_conflicts_are_refused_before_anything_is_touched(kind: str) -> None:
    model = conflicting(kind)
    keys = {name: type(m) for name, m in model.named_modules()}
    with armed(backend="emulate") as run:
        for _ in range(2):  # a script that catches it does not go on half-applied
            with pytest.raises(ConversionError, match=kind):
                model(noise(4, 32))
        assert not run.models
    assert {name: type(m) for name, m in model.named_modules()} == keys


def test_accelerates_own_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with armed(backend="emulate"):
        from accelerate.state import AcceleratorState

        monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp8")
        with pytest.raises(ConversionError, match="mixed_precision='fp8'"):
            blocks()(noise(4, 32))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConversionError, match="ACCELERATE_MIXED_PRECISION=fp8"):
        fp8patch.enable(backend="emulate")
    from fp8patch.inject import patch

    patch.disarm()


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with armed(backend="emulate", only=["*.nothing"]), pytest.raises(PlanError, match="nothing"):
        blocks()(noise(4, 32))


def test_options_are_checked() -> None:
    with pytest.raises(Fp8PatchError, match="no option 'backends'"):
        fp8patch.enable(backends="emulate")
    with armed(backend="emulate"):
        fp8patch.enable(backend="emulate", skip="*.up")  # nothing is converted yet
        model = blocks()
        model(noise(4, 32))
        assert type(model.layers[0].up) is nn.Linear
        with pytest.raises(Fp8PatchError, match="called before"):
            fp8patch.enable(backend="bf16")


def test_nothing_is_patched_afterwards() -> None:
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert "fp8patch" not in getattr(sys.excepthook, "__module__", "")
