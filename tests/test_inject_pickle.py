"""Whole models in a `torch.save` under `train`: what is written is the stock model."""

import copy
import io
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from injected import armed
from torch import nn
from transformers.pytorch_utils import Conv1D
from trap_models import blocks, llama, noise, tokens

import fp8patch


def trained(model: Any) -> Any:
    model(noise(4, 32)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    return model


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("inside", [False, True])
def test_a_pickled_model_is_the_stock_one(inside: bool, new_format: bool) -> None:
    with armed(backend="emulate"):
        model = blocks()
        model.register_forward_hook(Counts())
        # Saved before the first step is over, while its calls are counted.
        model(noise(4, 32)).square().mean().backward()
        keys = {name: dict(vars(module)) for name, module in model.named_modules()}
        value = {"model": model, "epoch": 3} if inside else model
        data = saved(value, _use_new_zipfile_serialization=new_format)
        # The live one is as it was.
        assert {n: dict(vars(m)) for n, m in model.named_modules()} == keys
        assert any(hasattr(type(m), "_fp8_base") for m in model.modules())
    assert b"fp8patch." not in data  # (torch writes the paths of sources, too)
    assert b"_fp8_" not in data
    twin = loaded(data)
    twin = twin["model"] if inside else twin
    assert [type(m) for m in twin.modules()] == [type(m) for m in blocks().modules()]
    assert len(twin._forward_hooks) == 1  # the script's own
    twin._forward_hooks.clear()
    stock = blocks()
    stock.load_state_dict(model.state_dict())
    assert torch.equal(twin(noise(4, 32)), stock(noise(4, 32)))


class Counts:
    """A hook of the script's own."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        return


def test_norms_and_heads_too() -> None:
    with armed(backend="emulate"):
        model = llama()
        ids = tokens(2, 8)
        model(input_ids=ids, labels=ids).loss.backward()
        data = saved(model)
    assert b"fp8patch." not in data  # (torch writes the paths of sources, too)
    assert [type(m) for m in loaded(data).modules()] == [type(m) for m in llama().modules()]


def test_another_process_needs_nothing_of_ours(tmp_path: Path) -> None:
    with armed(backend="emulate"):
        model = trained(nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)))
        torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch; sys.modules['fp8patch'] = None; from torch import nn\n"
        "kinds = [nn.Sequential, nn.Linear, nn.LayerNorm]\n"
        "with torch.serialization.safe_globals(kinds): print(type(torch.load('model.pt')[0]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "<class 'torch.nn.modules.linear.Linear'>", done.stderr


def test_a_converted_models_pickle_names_no_module_that_may_move() -> None:
    """Without `train`, `torch.save(model)` names our classes: a move of one breaks every file."""
    model = fp8patch.convert_model(nn.Sequential(llama(), blocks(), Conv1D(64, 64)))
    with fp8patch.autocast(backend="emulate"):
        model[1](noise(4, 32))
    names = {
        argument
        for _, argument, _ in pickletools.genops(pickle.dumps(model))
        if isinstance(argument, str) and argument.startswith("fp8patch.")
    }
    modules = ("base", "conv1d", "linear", "norm", "norm_forms", "weights")
    others = ("plan.types", "recipe", "roots", "scaling", "slots", "steps")
    assert names == {
        *(f"fp8patch.modules.{name}" for name in modules),
        *(f"fp8patch.{name}" for name in others),
    }


def test_copies_stay_converted_and_others_are_left_alone() -> None:
    stock_save = torch.save
    with armed(backend="emulate"):
        model = trained(blocks())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert any(hasattr(type(m), "_fp8_base") for m in twin.modules())
        assert type(loaded(saved(nn.Sequential(nn.ReLU())))) is nn.Sequential
        state = loaded(saved(model.state_dict()))
        assert state.keys() == model.state_dict().keys()
        assert torch.save is not stock_save
    assert torch.save is stock_save
