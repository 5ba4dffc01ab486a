"""FP8 training for the Hugging Face model you already have.

Public names are loaded when they are first used: `import fp8patch` imports neither torch nor
transformers, so that `fp8patch --help` is quick and an injected process pays nothing.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Public name -> the module that defines it. No name may equal a submodule's: importing the
# submodule would then replace the name.
_PUBLIC = {
    "CheckpointError": "fp8patch.errors",
    "ConversionError": "fp8patch.errors",
    "Float8Conv1D": "fp8patch.modules.conv1d",
    "Float8LayerNorm": "fp8patch.modules.norm",
    "Float8Linear": "fp8patch.modules.linear",
    "Float8RMSNorm": "fp8patch.modules.norm",
    "Fp8PatchError": "fp8patch.errors",
    "HardwareError": "fp8patch.errors",
    "PlanError": "fp8patch.errors",
    "Recipe": "fp8patch.recipe",
    "RecipeError": "fp8patch.errors",
    "autocast": "fp8patch.amp",
    "compile_blocks": "fp8patch.blocks.compiled",
    "convert_model": "fp8patch.convert",
    "enable": "fp8patch.inject.patch",
    "invalidate": "fp8patch.inspect.metrics",
    "load": "fp8patch.checkpoint.save_load",
    "measure_sqnr": "fp8patch.inspect.metrics",
    "metrics": "fp8patch.inspect.metrics",
    "plan_model": "fp8patch.plan.model",
    "revert_model": "fp8patch.convert",
    "save": "fp8patch.checkpoint.save_load",
}

__all__ = [
    "CheckpointError",
    "ConversionError",
    "Float8Conv1D",
    "Float8LayerNorm",
    "Float8Linear",
    "Float8RMSNorm",
    "Fp8PatchError",
    "HardwareError",
    "PlanError",
    "Recipe",
    "RecipeError",
    "__version__",
    "autocast",
    "compile_blocks",
    "convert_model",
    "enable",
    "invalidate",
    "load",
    "measure_sqnr",
    "metrics",
    "plan_model",
    "revert_model",
    "save",
]

if TYPE_CHECKING:
    from fp8patch.amp import autocast
    from fp8patch.blocks.compiled import compile_blocks
    from fp8patch.checkpoint.save_load import load, save
    from fp8patch.convert import convert_model, revert_model
    from fp8patch.errors import (
        CheckpointError,
        ConversionError,
        Fp8PatchError,
        HardwareError,
        PlanError,
        RecipeError,
    )
    from fp8patch.inject.patch import enable
    from fp8patch.inspect.metrics import invalidate, measure_sqnr, metrics
    from fp8patch.modules.conv1d import Float8Conv1D
    from fp8patch.modules.linear import Float8Linear
    from fp8patch.modules.norm import Float8LayerNorm, Float8RMSNorm
    from fp8patch.plan.model import plan_model
    from fp8patch.recipe import Recipe


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # the next use is a plain attribute
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))
