"""The wrapped savers and loaders: in any order of imports, once, and transparent."""

import inspect
import subprocess
import sys
from typing import Any

import accelerate
import peft
import pytest
import transformers
from resume_cases import build

import fp8patch
from fp8patch.checkpoint import hooks

WRAPPED = [
    (transformers.PreTrainedModel, "save_pretrained"),
    (peft.PeftModel, "save_pretrained"),
    (transformers.Trainer, "save_model"),
    (transformers.Trainer, "_load_from_checkpoint"),
    (transformers.Trainer, "_load_best_model"),
    (accelerate.Accelerator, "save_state"),
    (accelerate.Accelerator, "load_state"),
]

CONVERT_FIRST = """
import sys
from fp8patch import convert_model
assert "transformers.modeling_utils" not in sys.modules
assert "accelerate.accelerator" not in sys.modules
from torch import nn
convert_model(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), include=["*"])
"""
CHECK = """
from transformers.trainer import Trainer
from transformers.modeling_utils import PreTrainedModel
from accelerate import Accelerator
from peft import PeftModel
for method in (PreTrainedModel.save_pretrained, Trainer.save_model, Accelerator.load_state,
               PeftModel.save_pretrained, Accelerator.save_state, Trainer._load_best_model):
    assert hasattr(method, "_fp8patch_wrapped"), method
"""


def test_what_is_imported_later_is_wrapped_then() -> None:
    code = CONVERT_FIRST + CHECK
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "fp8patch:" not in done.stderr


@pytest.mark.parametrize(("cls", "name"), WRAPPED)
def test_wrapped_once_and_transparent(cls: Any, name: str) -> None:
    hooks.install()
    method = getattr(cls, name)
    original = method.__wrapped__
    assert not hasattr(original, hooks._MARK), "wrapped twice"
    assert method.__name__ == name
    assert method.__qualname__ == original.__qualname__
    assert inspect.signature(method) == inspect.signature(original)

    hooks._installed.clear()
    hooks.install()
    fp8patch.convert_model(build("llama"))
    assert getattr(cls, name) is method


def test_a_method_that_is_gone_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    class Module:
        __name__ = "transformers.trainer"

        class Trainer:
            def save_model(self) -> None: ...

    hooks._wrap_all(hooks._TARGETS["transformers.trainer"], Module())
    said = capsys.readouterr().err
    assert "no Trainer._load_best_model in this version" in said
    assert "save_model" not in said


def test_a_library_imported_halfway_is_wrapped_at_the_next_call() -> None:
    # accelerate imports torch; a hook on torch's import then finds accelerate's module begun, and
    # its class not there yet.
    code = """
import importlib.util, sys, types
from fp8patch.checkpoint import hooks
half = types.ModuleType("accelerate.accelerator")
half.__spec__ = importlib.util.spec_from_loader("accelerate.accelerator", loader=None)
half.__spec__._initializing = True
sys.modules["accelerate.accelerator"] = half
hooks.install()
del sys.modules["accelerate.accelerator"]
from accelerate import Accelerator
hooks.install()
assert hasattr(Accelerator.save_state, "_fp8patch_wrapped")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "fp8patch:" not in done.stderr
