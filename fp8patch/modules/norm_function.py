"""A norm as autograd sees it: one operator forward, one backward, nothing kept but its input."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8patch.modules.autograd_calls import first_order
from fp8patch.modules.gemms import Quantized
from fp8patch.ops.norm import norm, norm_backward
from fp8patch.ops.norm_quantize import norm_quantize
from fp8patch.slots import Slot


class NormSpec(NamedTuple):
    """How one call computes: constants only, so that a compiler can guard on them.

    Attributes:
        eps: Added to the variance or the mean square.
        center: Subtract the mean: LayerNorm, else RMSNorm.
        offset: Multiply by 1 + weight.
        dtype: Of the output.
    """

    eps: float
    center: bool
    offset: bool
    dtype: torch.dtype


class Cast(NamedTuple):
    """The cast of the output that is made on the way, as `modules.gemms.cast_input` would.

    Attributes:
        slot, limit, observe, transpose: As there.
        key: Under which the module that reads the output looks for it.
    """

    slot: Slot
    limit: float
    observe: bool
    transpose: bool
    key: Hashable


class Normalize(torch.autograd.Function):
    """(input [..., K], weight, bias, spec, cast, made) -> output [..., K].

    Weight and bias may be None, and so may `cast`; what it asks for is appended to the list `made`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        spec: NormSpec,
        cast: Cast | None = None,
        made: list[Quantized] | None = None,
    ) -> Tensor:
        arguments = input, weight, bias, spec.eps, spec.center, spec.offset, spec.dtype
        if cast is None or made is None:
            y, mean, rstd = norm(*arguments)
        else:
            scale, amax, counts = cast.slot
            y, mean, rstd, y_fp8, y_fp8_t, inverse = norm_quantize(
                *arguments, scale, amax, counts, cast.limit, cast.observe, cast.transpose
            )
            made.append(Quantized(y_fp8, y_fp8_t, inverse, inverse))
        ctx.spec = spec
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(input, weight, mean, rstd)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        spec: NormSpec = ctx.spec
        input, weight, mean, rstd = ctx.saved_tensors
        need_weight, need_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        grad_input, sums = norm_backward(
            grad_output,
            input,
            weight,
            mean,
            rstd,
            spec.center,
            spec.offset,
            need_weight or need_bias,
        )
        return (
            grad_input,
            sums[0].to(weight.dtype) if need_weight else None,
            sums[1].to(ctx.bias_dtype) if need_bias else None,
            *[None] * 3,
        )
