"""Transformer Engine in a benchmark: its modules in the place of ours, or its whole layer.

Delayed scaling with its defaults. Parameters stay the objects they are, so ties do too.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch.bench.gpt import GptLayers
from fp8patch.errors import Fp8PatchError

__all__ = ["region", "replace_layers", "swap"]


def _engine() -> Any:
    try:
        import transformer_engine.pytorch as engine
    except (ImportError, OSError) as error:
        raise Fp8PatchError(
            f"Transformer Engine is not installed ({error}). Install it, or leave te out of "
            "--contenders."
        ) from None
    return engine


def region() -> AbstractContextManager[Any]:
    """Its FP8 region; once around each forward."""
    context: AbstractContextManager[Any] = _engine().autocast(enabled=True, recipe=_recipe())
    return context


@cache
def _recipe() -> Any:
    from transformer_engine.common.recipe import DelayedScaling

    return DelayedScaling()


def swap(model: nn.Module, paths: set[str]) -> int:
    """Replace the Linears at `paths`, and every norm, by its own; returns how many Linears."""
    engine = _engine()
    swapped = 0
    for path, module in list(model.named_modules()):
        made: Any = None
        if path in paths and isinstance(module, nn.Linear):
            made = engine.Linear(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                params_dtype=module.weight.dtype,
                device="cuda",
            )
            swapped += 1
        elif isinstance(module, nn.LayerNorm) and module.weight is not None:
            size = module.normalized_shape[0]
            made = engine.LayerNorm(
                size, eps=module.eps, params_dtype=module.weight.dtype, device="cuda"
            )
        elif (epsilon := _rms_epsilon(module)) is not None:
            weight: Any = module.weight
            made = engine.RMSNorm(
                weight.numel(), eps=epsilon, params_dtype=weight.dtype, device="cuda"
            )
        if made is not None:
            _keep_parameters(module, made)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, made)
    return swapped


def _rms_epsilon(module: nn.Module) -> float | None:
    """Its epsilon if it is a plain RMSNorm; others (1 + w) are left alone."""
    if type(module).__name__ not in ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm"):
        return None
    epsilon: Any = module.variance_epsilon
    return float(epsilon)


def _keep_parameters(module: nn.Module, made: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        own = getattr(made, name, None)
        if not isinstance(own, nn.Parameter) or own.shape != parameter.shape:
            raise Fp8PatchError(
                f"Transformer Engine's {type(made).__name__} has no parameter {name} of shape "
                f"{tuple(parameter.shape)}: this version of it is not known here."
            )
        setattr(made, name, parameter)


class _Layers(nn.Module):
    """timm's blocks: [batch, tokens, width] in FP32 in and out, BF16 and sequence first inside."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = hidden.transpose(0, 1).contiguous().to(torch.bfloat16)
        for layer in self.layers:
            inner = layer(inner)
        return inner.transpose(0, 1)


def replace_layers(
    model: nn.Module,
) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]], Callable[[], None], int]:
    """Put TransformerLayers in the place of the layers of a `GptLayers` or of timm's ViT.

    Returns:
        The model, its region, what to do before a step, and how many GEMM modules are in FP8.
    """
    engine = _engine()
    if isinstance(model, GptLayers):
        count = len(model.layers)
        # As its documentation has it for training: gradients are added to `main_grad`, in FP32.
        model.layers = nn.ModuleList(
            engine.TransformerLayer(
                model.width,
                model.inner,
                model.heads,
                self_attn_mask_type="causal",
                fuse_qkv_params=True,
                fuse_wgrad_accumulation=True,
                params_dtype=torch.bfloat16,
                device="cuda",
            )
            for _ in range(count)
        )
        model.sequence_first = True
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        return model, region, _nothing, 4 * count
    blocks: Any = getattr(model, "blocks", None)
    if blocks is None:
        raise Fp8PatchError("te-layer has a builder for gpt-4096 and vit-huge only. Use te-swap.")
    width, heads = blocks[0].norm1.normalized_shape[0], blocks[0].attn.num_heads
    layers = [
        engine.TransformerLayer(
            width,
            blocks[0].mlp.fc1.out_features,
            heads,
            layernorm_epsilon=blocks[0].norm1.eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="no_mask",
            fuse_qkv_params=True,
            params_dtype=torch.float32,
            device="cuda",
        )
        for _ in blocks
    ]
    model.blocks = _Layers(layers)
    return model, region, _nothing, 4 * len(layers)


def _nothing() -> None:
    """Nothing has to be done before a step."""
