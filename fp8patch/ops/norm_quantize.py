"""`norm_quantize`: a norm whose output a GEMM reads, with the cast that the GEMM needs.

`norm` and `quantize` in one, for one read of the input and one launch. Declared without mutation,
and writing the slot all the same, for `quantize`'s reasons.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.norm import kernels, norm, register
from fp8patch.ops.quantize import ALIGNMENT, is_cold, padded, quantize

# Up to here the kernel's second look at a row finds it in a cache. Wider rows, in bytes as they are
# read, take the norm and then the cast: as many bytes from memory, in simpler kernels.
MAX_ROW_BYTES = 16384

_Result = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    offset: bool,
    dtype: torch.dtype,
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    limit: float,
    observe: bool,
    transpose: bool,
) -> _Result:
    """Normalise the rows of x, and quantise what was written of it to E4M3.

    Args:
        x, weight, bias, eps, center, offset, dtype: As for `norm`.
        scale, amax, counts, limit, observe, transpose: As for `quantize`, whose `live` is False: a
            scale that was never set is found in a second pass.

    Returns:
        y [..., K] in `dtype`, mean, rstd (as `norm`); y_fp8 [M, padded K], its transpose [padded K,
        padded M], scale_inv: what `quantize` makes of that y, bit for bit.
    """
    arguments = (
        x, weight, bias, eps, center, offset, dtype, scale, amax, counts, limit, observe, transpose
    )  # fmt: skip
    found: _Result
    if type(x) is Tensor and not torch.compiler.is_compiling():
        found = _norm_quantize_now(*arguments)
    else:
        found = torch.ops.fp8patch.norm_quantize.default(*arguments)
    return found


def _norm_quantize_now(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    offset: bool,
    dtype: torch.dtype,
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    limit: float,
    observe: bool,
    transpose: bool,
) -> _Result:
    # Under four columns the compiler knows neighbours to be equal zeros, and ptxas 12.8 converts a
    # pair of equal registers wrongly.
    cols = x.shape[-1]
    fits = x.is_cuda and x.numel() > 0 and cols >= ALIGNMENT
    fits = fits and cols * x.element_size() <= MAX_ROW_BYTES
    if fits and kernels() is not None and not is_cold(scale):
        from fp8patch.ops.triton.norm_quantize import norm_quantize as kernel

        return kernel(
            x, weight, bias, eps, center, offset, dtype, scale, amax, counts, observe, transpose
        )
    y, mean, rstd = norm(x, weight, bias, eps, center, offset, dtype)
    y_fp8, y_fp8_t, scale_inv, _ = quantize(
        y.view(-1, y.shape[-1]), scale, amax, counts, limit, False, False, observe, transpose
    )
    return y, mean, rstd, y_fp8, y_fp8_t, scale_inv


def _norm_quantize_fake(
    x: Tensor,
    weight: Any,
    bias: Any,
    eps: float,
    center: bool,
    offset: bool,
    dtype: torch.dtype,
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    limit: float,
    observe: bool,
    transpose: bool,
) -> _Result:
    cols = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    stats = x.new_empty(rows, dtype=torch.float32)
    mean = x.new_empty(rows if center else 0, dtype=torch.float32)
    y_fp8 = x.new_empty((rows, padded(cols)), dtype=numerics.E4M3)
    shape = (padded(cols), padded(rows)) if transpose else (0, 0)
    y_fp8_t = x.new_empty(shape, dtype=numerics.E4M3)
    y = x.new_empty(x.shape, dtype=dtype)
    return y, mean, stats, y_fp8, y_fp8_t, torch.empty_like(scale)


register(
    "norm_quantize(Tensor x, Tensor? weight, Tensor? bias, float eps, bool center, bool offset, "
    "ScalarType dtype, Tensor scale, Tensor amax, Tensor counts, float limit, bool observe, "
    "bool transpose) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm_quantize_now,
    _norm_quantize_fake,
)
