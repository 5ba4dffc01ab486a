"""What else may rule a model's precision: refused, with a reason, before anything is touched.

Nothing here imports accelerate: where the script has not, there is nothing to look at.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from fp8patch.errors import ConversionError, HardwareError

if TYPE_CHECKING:
    from fp8patch.plan.model import Plan

__all__ = [
    "check_environment",
    "check_model",
    "check_plan",
    "no_fp8_in_this_build",
    "surely_no_fp8",
]

_ACCELERATE_FP8 = (
    "Accelerate's own fp8 mode converts the model by Transformer Engine or torchao, and fp8patch "
    "can't do so on top of it. "
)


def check_environment() -> None:
    """Raises ConversionError if Accelerate was told to run in FP8 by itself."""
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp8":
        raise ConversionError(
            f"ACCELERATE_MIXED_PRECISION=fp8: {_ACCELERATE_FP8}Use --mixed_precision bf16 (or "
            "leave it out): fp8patch adds FP8."
        )


def check_model(model: nn.Module) -> None:
    """Raises ConversionError if `model` (the outermost wrapper) can't be converted."""
    from fp8patch.convert import refuse_unsupported

    check_environment()
    state: Any = sys.modules.get("accelerate.state")
    shared = getattr(getattr(state, "AcceleratorState", None), "_shared_state", {})
    if shared.get("_mixed_precision") == "fp8":
        raise ConversionError(
            f"Accelerator(mixed_precision='fp8'): {_ACCELERATE_FP8}Use 'bf16': fp8patch adds FP8."
        )
    if "DEEPSPEED" in str(shared.get("distributed_type", "")):
        raise ConversionError(
            "the run uses DeepSpeed, which owns the model's weights. Use DDP or FSDP2 instead."
        )
    refuse_unsupported(model)


def check_plan(plan: "Plan") -> None:
    """Raises ConversionError if a part of the model is quantised already.

    Not a skip with a reason, as in a plan for reading: the run would be half in another format.
    """
    held = [d for d in plan.decisions if d.code == "quantized"]
    if held:
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        raise ConversionError(
            f"{held[0].path or 'the model'}{more}: {held[0].reason}. FP8 training needs the "
            "high-precision weights: load the model without quantisation, or leave these modules "
            "out (--skip PATTERN)."
        )


def no_fp8_in_this_build() -> str | None:
    """Why this PyTorch can't run FP8 on any GPU; found without starting CUDA."""
    import torch

    if torch.version.cuda is None:
        from fp8patch.hardware import detect

        return detect().reason
    return None


def surely_no_fp8() -> bool:
    """Whether `auto` is going to be off, as far as can be told without starting CUDA."""
    import torch

    if torch.version.cuda is None:
        return True
    try:
        # Asks the driver's library and opens no context.
        return int(torch.cuda._device_count_nvml()) == 0
    except Exception:
        return False


def refuse_hardware(reason: str) -> HardwareError:
    """What to raise for `--fp8` where it can't run."""
    return HardwareError(
        f"FP8 was asked for, but it cannot run here: {reason} --emulate (backend='emulate') "
        "computes the same rounding on any device, slowly; without either the script runs in its "
        "own precision."
    )
