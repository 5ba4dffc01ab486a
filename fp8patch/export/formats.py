"""The FP8 formats that servers load: names and dtypes of what is stored, and what a config says.

    compressed-tensors   X.weight E4M3 [N, K], X.weight_scale FP32 [N, 1]
    hf-fp8               X.weight E4M3 [N, K], X.weight_scale_inv FP32 [N / 128, K / 128]
    torchao              X._weight_qdata and X._weight_scale of the same shapes as the first, as
                         torchao itself takes its tensor class apart

In each a weight is its FP8 value times its scale, and activations are quantised as they come. The
values are those of `numerics`; only their names differ. N is out_features, K in_features.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.export.writer import Entry

__all__ = ["BlockFp8", "CompressedTensors", "Format", "Layer"]

_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A Linear whose weight is stored in FP8.

    Attributes:
        path: Its path in the model.
        key: The name under which its weight is stored in the source, which ends in "weight".
        shape: (N, K).
        dtype: The dtype of the stored weight.
    """

    path: str
    key: str
    shape: tuple[int, int]
    dtype: torch.dtype


class Format:
    """One scale a row of the weight; a format overrides what it does otherwise."""

    name: str
    # Pieces of a weight have a multiple of as many rows.
    rows = 1

    def obstacle(self, layer: Layer, class_name: str) -> tuple[str, str] | None:
        """(code, reason) why the format, or a loader of it, cannot have this layer."""
        return None

    def of_subclass(self, class_name: str) -> tuple[str, str] | None:
        """(code, reason) for a class whose forward may read its weight, which is no matrix then."""
        if class_name == "Linear":
            return None
        return "subclass", f"is a {class_name}, and loaders of this format take nn.Linear alone"

    def swallows(self, entry: str, path: str) -> bool:
        """Whether a loader that is told to leave `entry` alone leaves `path` alone too."""
        return entry == path

    def left_alone(self, model: torch.nn.Module) -> tuple[str, ...]:
        """Names that loaders leave alone although config.json does not say so."""
        return ()

    def experts(self, owner: str) -> tuple[str, ...]:
        """Entries that make loaders leave the experts alone whose 3-D weights `owner` holds."""
        return (owner,)

    def entries(self, layer: Layer) -> tuple[Entry, Entry]:
        """The weight and its scales, as they are stored."""
        raise NotImplementedError

    def quantize(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of a weight -> (E4M3 of the same shape, the rows of the scales that go with it)."""
        weight, scale = numerics.quantize_rowwise(
            part, numerics.E4M3, numerics.FP8_MAX[numerics.E4M3]
        )
        return weight, scale.reciprocal()

    def config(self, kept: Sequence[str]) -> dict[str, Any]:
        """The quantization_config of config.json; `kept` are modules in high precision."""
        raise NotImplementedError

    def remark(self, layers: Sequence[Layer]) -> str:
        """What somebody who loads this has to know; empty for nothing."""
        return ""

    def metadata(self, layers: Sequence[Layer], plain: Mapping[str, Entry]) -> dict[str, str]:
        """What goes into the header of every file."""
        return {"format": "pt"}


def _entries(layer: Layer, weight: str, scale: str, rows: int, columns: int) -> tuple[Entry, Entry]:
    return (
        Entry(weight, numerics.E4M3, layer.shape),
        Entry(scale, torch.float32, (rows, columns)),
    )


class CompressedTensors(Format):
    """One scale a row, so that servers can fuse q, k and v without requantising them."""

    name = "compressed-tensors"

    def swallows(self, entry: str, path: str) -> bool:
        if entry.startswith("re:"):
            return re.match(entry.removeprefix("re:"), path) is not None
        return entry == path

    def experts(self, owner: str) -> tuple[str, ...]:
        # A server has a module for each expert, under names of its own.
        leaf = owner.rpartition(".")[2]
        return owner, rf"re:.*\.{re.escape(leaf)}\..*"

    def entries(self, layer: Layer) -> tuple[Entry, Entry]:
        return _entries(layer, layer.key, f"{layer.key}_scale", layer.shape[0], 1)

    def config(self, kept: Sequence[str]) -> dict[str, Any]:
        # These keys and no others: a scheme of which a loader does not know a key is refused.
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**common, "strategy": "channel", "dynamic": False, "observer": "minmax"},
            "input_activations": {
                **common,
                "strategy": "token",
                "dynamic": True,
                "observer": None,
            },
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            "ignore": list(kept),
        }


class BlockFp8(Format):
    """One scale a block of 128 x 128, as DeepSeek-V3 stores it."""

    name = "hf-fp8"
    rows = _BLOCK

    def obstacle(self, layer: Layer, class_name: str) -> tuple[str, str] | None:
        # transformers takes the size of a block for rows / scales: at N=192 it would read the
        # scales of 96 rows where 128 were written, without an error.
        ragged = [
            f"{label}={size}"
            for label, size in zip(("N", "K"), layer.shape, strict=True)
            if size % _BLOCK
        ]
        if ragged:
            verb = "is no multiple" if len(ragged) == 1 else "are no multiples"
            return "block", f"{' and '.join(ragged)} {verb} of {_BLOCK}, the side of a block"
        return self.of_subclass(class_name)

    def swallows(self, entry: str, path: str) -> bool:
        return path == entry or path.startswith(f"{entry}.") or path.endswith(entry)

    def left_alone(self, model: torch.nn.Module) -> tuple[str, ...]:
        return tuple(map(str, getattr(model, "_keep_in_fp32_modules", None) or ()))

    def entries(self, layer: Layer) -> tuple[Entry, Entry]:
        rows, columns = (size // _BLOCK for size in layer.shape)
        return _entries(layer, layer.key, f"{layer.key}_scale_inv", rows, columns)

    def quantize(self, part: Tensor) -> tuple[Tensor, Tensor]:
        return numerics.quantize_blockwise(part, numerics.E4M3, (_BLOCK, _BLOCK))

    def config(self, kept: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
            # transformers reads the first, older vLLM only the second.
            "modules_to_not_convert": list(kept),
            "ignored_layers": list(kept),
        }
