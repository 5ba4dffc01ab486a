"""`quantize_parts`: the cast of a matrix whose columns lie in several tensors, side by side.

The gradients of queries, keys and values, where one Linear made all three, come from attention as
three tensors. Joined first, they are read and written once more, for nothing but the cast.

Nobody calls this operator: a pass over compiled blocks puts it in place of the joining and the
cast. Arguments and outputs are those of `quantize` for `torch.cat(parts, 1)`, the parts being
[M, K_i] of one dtype; there is no `live`. The outputs are those of `quantize` to the bit. Declared
without mutation as well, for the reasons given there.
"""

from typing import Any

import torch
from torch import Tensor

from fp8patch.ops.kernels import load
from fp8patch.ops.norm import register
from fp8patch.ops.quantize import FLAGS, as_traced, dtype_of, is_cold, quantize_now

# A part as wide as a multiple of this needs no joining on a GPU.
COLUMNS = 64


def _kernels() -> Any:
    """The Triton kernels, or None where there is no Triton (`quantize_now` says so)."""
    found = load("parts")
    assert found is None or found.COLUMNS == COLUMNS
    return found


def _now(parts: list[Tensor], *terms: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale, amax, counts, limit, e5m2, *flags = terms
    # A cold scale needs the amax first, of all parts.
    kernels = _kernels() if parts[0].is_cuda and not is_cold(scale) else None
    if kernels is not None and kernels.can_read(parts):
        named = dict(zip(FLAGS, flags, strict=True))
        return as_traced(
            kernels.quantize_parts(parts, scale, amax, counts, limit, dtype_of(e5m2), **named)
        )
    x = torch.cat(parts, 1)
    return as_traced(quantize_now(x, scale, amax, counts, limit, e5m2, False, *flags))


def _fake(parts: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *slot_and_format, observe, transpose, column_sums = rest
    x = parts[0].new_empty(parts[0].shape[0], sum(part.shape[1] for part in parts))
    outputs: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.fp8patch.quantize.default(
        x, *slot_and_format, False, observe, transpose, column_sums
    )
    return outputs


register(
    "quantize_parts(Tensor[] parts, Tensor scale, Tensor amax, Tensor counts, float limit, "
    "bool e5m2, bool observe, bool transpose, bool column_sums) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _now,
    _fake,
)
