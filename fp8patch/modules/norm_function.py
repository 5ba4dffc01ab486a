"""A norm as autograd sees it: one operator forward, one backward, nothing kept but its input."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8patch.ops.norm import norm, norm_backward


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


class Normalize(torch.autograd.Function):
    """(input [..., K], weight, bias, spec) -> output [..., K]; weight and bias may be None."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec
    ) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        y, mean, rstd = norm(rows, weight, bias, spec.eps, spec.center, spec.offset, spec.dtype)
        ctx.spec = spec
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(input, weight, mean, rstd)
        # No view: the caller may edit it in place, as it may edit a stock norm's.
        return torch.ops.aten._unsafe_view.default(y, input.shape)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        spec: NormSpec = ctx.spec
        input, weight, mean, rstd = ctx.saved_tensors
        rows, grad = (t.reshape(-1, input.shape[-1]) for t in (input, grad_output))
        need_weight, need_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        grad_input, sums = norm_backward(
            grad, rows, weight, mean, rstd, spec.center, spec.offset, need_weight or need_bias
        )
        return (
            grad_input.view(input.shape),
            sums[0].to(weight.dtype) if need_weight else None,
            sums[1].to(ctx.bias_dtype) if need_bias else None,
            None,
        )
