"""torchao's format. torchao itself says how its tensor is taken apart; the values are ours.

Its own `quantize_` needs a GPU, and would round in a second place. Its tensor class on the meta
device needs neither, and torchao's own function names what it is made of.
"""

from collections.abc import Mapping, Sequence
from importlib import metadata as installed
from typing import Any

import torch
from torch import nn

from fp8patch import numerics
from fp8patch.errors import ConversionError
from fp8patch.export.formats import Format, Layer
from fp8patch.export.writer import Entry
from fp8patch.messages import one_line

__all__ = ["TorchAo"]

# Of an activation's amax: without one, torchao divides a token of zeros (padding) by zero.
_FLOOR = 1e-12


class TorchAo(Format):
    """FP8 weights with a scale a row, activations quantised with a scale a token.

    Raises:
        ConversionError: torchao is not installed, or has none of what is needed.
    """

    name = "torchao"

    def __init__(self) -> None:
        try:
            from torchao.core.config import config_to_dict
            from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
            from torchao.quantization import (
                Float8DynamicActivationFloat8WeightConfig,
                Float8Tensor,
                PerRow,
            )
            from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs
        except ImportError as error:
            raise ConversionError(_missing(error)) from None
        self._flatten: Any = flatten_tensor_state_dict
        self._tensor: Any = Float8Tensor
        recipe: Any = Float8DynamicActivationFloat8WeightConfig(
            granularity=PerRow(), activation_value_lb=_FLOOR
        )
        self._recipe = recipe
        self._config: dict[str, Any] = config_to_dict(recipe)
        self._activations: Any = QuantizeTensorToFloat8Kwargs(
            recipe.activation_dtype,
            recipe.granularity[0],
            hp_value_lb=recipe.activation_value_lb,
            kernel_preference=recipe.kernel_preference,
        )

    def obstacle(self, layer: Layer, class_name: str) -> tuple[str, str] | None:
        return self.of_subclass(class_name)

    def swallows(self, entry: str, path: str) -> bool:
        # transformers: the start of a path. vLLM: any whole components in it.
        return f".{entry}." in f".{path}."

    def left_alone(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(map(str, getattr(model, "_keep_in_fp32_modules", None) or ()))

    def entries(self, layer: Layer) -> tuple[Entry, Entry]:
        parts, _ = self._flatten({_parameter(layer): self._on_meta(layer)})
        by_dtype = {part.dtype: (name, tuple(part.shape)) for name, part in parts.items()}
        if len(parts) != 2 or by_dtype.keys() != {numerics.E4M3, torch.float32}:
            raise ConversionError(
                f"torchao {installed.version('torchao')} takes its FP8 tensor apart into "
                f"{sorted(parts)}, not into a weight and its scales: this fp8patch cannot write it."
            )
        weight, scale = (
            Entry(by_dtype[dtype][0], dtype, by_dtype[dtype][1])
            for dtype in (numerics.E4M3, torch.float32)
        )
        return weight, scale

    def config(self, kept: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "torchao",
            "quant_type": {"default": self._config},
            "modules_to_not_convert": list(kept),
        }

    def remark(self, layers: Sequence[Layer]) -> str:
        if all(layer.dtype == torch.bfloat16 for layer in layers):
            return ""
        return (
            "torchao quantises BF16 weights alone, and these are not: load what is written here "
            "with dtype=torch.bfloat16."
        )

    def metadata(self, layers: Sequence[Layer], plain: Mapping[str, Entry]) -> dict[str, str]:
        # vLLM drops a tensor that is not in here, also a plain one; and torchao cannot read a name
        # without a dot, which belongs to no Linear.
        tensors: dict[str, Any] = {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for name, entry in plain.items()
            if "." in name
        }
        tensors.update((_parameter(layer), self._on_meta(layer)) for layer in layers)
        _, described = self._flatten(tensors)
        return {**super().metadata(layers, plain), **described}

    def _on_meta(self, layer: Layer) -> Any:
        recipe = self._recipe
        return self._tensor.from_hp(
            torch.empty(layer.shape, dtype=layer.dtype, device="meta"),
            float8_dtype=recipe.weight_dtype,
            granularity=recipe.granularity[1],
            mm_config=recipe.mm_config,
            kernel_preference=recipe.kernel_preference,
            act_quant_kwargs=self._activations,
        )


def _parameter(layer: Layer) -> str:
    # Not `layer.key`: transformers asks torchao for the tensor by its name in the model.
    return f"{layer.path}.weight" if layer.path else "weight"


def _missing(error: ImportError) -> str:
    try:
        version = installed.version("torchao")
    except installed.PackageNotFoundError:
        return "the format torchao needs the package torchao. Install it: pip install torchao"
    return (
        f"the format torchao needs a newer torchao than {version} ({one_line(error)}). "
        "Upgrade it: pip install -U torchao"
    )
