"""`transpose_again`: the transpose of a cast, made once more in backward instead of being kept.

Only the weight gradient reads the transpose of a layer's input. Where the input itself is kept for
backward anyway (attention's output, by attention), the transpose is a byte an element too much.

Nobody calls this operator: a pass over compiled blocks puts it in. x [M, K] is what was cast, to
E4M3, and `scale_inv` what that cast returned; scaled is by 1 / scale_inv. `after` is not read: that
it is there makes the operator a part of backward, and has it wait for its turn. Returns the
transpose [padded K, padded M].
"""

from typing import Any

import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.norm import register
from fp8patch.ops.quantize import kernels, padded, quantize_now


def transposed_cast(x: Tensor, scale_inv: Tensor) -> Tensor:
    """The operator, in plain PyTorch but for the cast; x in any layout."""
    unused = torch.zeros((), device=x.device)
    limit = numerics.FP8_MAX[numerics.E4M3]
    return quantize_now(
        x, scale_inv.reciprocal(), unused, unused, limit, False, False, False, True, False
    )[1]


def _now(x: Tensor, scale_inv: Tensor, after: Tensor) -> Tensor:
    if x.is_cuda and x.numel() and kernels() is not None:
        from fp8patch.ops.triton.transpose_again import transpose_again as kernel

        return kernel(x.contiguous(), scale_inv)
    return transposed_cast(x, scale_inv)


def _fake(x: Tensor, scale_inv: Tensor, after: Tensor) -> Tensor:
    m, k = x.shape
    return x.new_empty((padded(k), padded(m)), dtype=numerics.E4M3)


register("transpose_again(Tensor x, Tensor scale_inv, Tensor after) -> Tensor", _now, _fake)
# As a graph's node names it.
TRANSPOSE_AGAIN: Any = torch.ops.fp8patch.transpose_again.default
