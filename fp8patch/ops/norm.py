"""`norm` and `norm_backward`: LayerNorm and RMSNorm with FP32 statistics, in one read of the input.

    center=True    y = (x - mean) * rstd * w + b        LayerNorm
    center=False   y = x * rstd * w                     RMSNorm; `offset`: * (1 + w), as in Gemma

All arithmetic is FP32 whatever the dtypes are, and a result is rounded once, when it is written.
(Stock RMSNorms round x * rstd to the input's dtype before they multiply; that only loses digits.)
The output's dtype is an argument: under autocast stock norms write FP32, and where only GEMMs read
it that is twice the traffic for nothing.

In eager nothing goes through the dispatcher, which costs eight microseconds a call: a small model
has no time for that. A compiler traces the operators, which are the same functions.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fp8patch.ops.kernels import load

# The kernels hold whole rows in registers; beyond this they are right too, and spill most of a row.
MAX_COLUMNS = 16384
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_library = torch.library.Library("fp8patch", "FRAGMENT")


def register(schema: str, function: Any, fake: Any) -> None:
    """Make `function` an operator of that schema, on the CPU and on CUDA."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, function, key)
    torch.library.register_fake(f"fp8patch::{name}", fake, lib=_library)


def kernels() -> Any:
    """The Triton kernels, or None where there is no Triton (the stock norm is faster then)."""
    return load("norm", "norms run as plain PyTorch")


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    offset: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise the rows of x.

    Args:
        x: [..., K] in FP32, BF16 or FP16, in any layout; M rows in all.
        weight, bias: [K] in FP32, BF16 or FP16, or None. A bias needs a weight.
        eps: Added to the variance, or to the mean square.
        center: Subtract the mean (LayerNorm).
        offset: Multiply by 1 + weight.
        dtype: Of y.

    Returns:
        y [..., K]; mean FP32 [M] (empty unless `center`); rstd FP32 [M].
    """
    arguments = x, weight, bias, eps, center, offset, dtype
    found: tuple[Tensor, Tensor, Tensor]
    if type(x) is Tensor and not torch.compiler.is_compiling():
        found = _norm_now(*arguments)
    else:
        found = torch.ops.fp8patch.norm.default(*arguments)
    return found


def _norm_now(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    offset: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.is_cuda and x.numel() and (found := kernels()) is not None:
        return found.norm(x, weight, bias, eps, center, offset, dtype)  # type: ignore[no-any-return]
    values = x.float().contiguous()
    mean = values.mean(-1) if center else values.new_empty(0)
    if center:
        values = values - mean.unsqueeze(-1)
    rstd = (values.square().mean(-1) + eps).rsqrt()
    y = values * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * _factor(weight, offset)
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype), mean.reshape(-1), rstd.reshape(-1)


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    center: bool,
    offset: bool,
    parameters: bool,
) -> tuple[Tensor, Tensor]:
    """The backward of `norm`.

    Args:
        grad: [..., K], of y; any of the three dtypes.
        x, weight, mean, rstd, center, offset: What the forward was given and returned.
        parameters: The gradients of weight and bias are wanted.

    Returns:
        grad_x [..., K] in the dtype of x; FP32 [2, K], the gradients of weight and of bias ([1, K]
        and only the former where nothing is centred, [0, K] where none is wanted). They are summed
        in an order that depends on shape and device alone.
    """
    arguments = grad, x, weight, mean, rstd, center, offset, parameters
    found: tuple[Tensor, Tensor]
    if type(x) is type(grad) is Tensor and not torch.compiler.is_compiling():
        found = _norm_backward_now(*arguments)
    else:
        found = torch.ops.fp8patch.norm_backward.default(*arguments)
    return found


def _norm_backward_now(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    center: bool,
    offset: bool,
    parameters: bool,
) -> tuple[Tensor, Tensor]:
    if x.is_cuda and x.numel() and (found := kernels()) is not None:
        return found.norm_backward(  # type: ignore[no-any-return]
            grad, x, weight, mean, rstd, center, offset, parameters
        )
    values, by_y = x.float().contiguous(), grad.float().contiguous()
    if center:
        values = values - mean.view(x.shape[:-1]).unsqueeze(-1)
    inverse = rstd.view(x.shape[:-1]).unsqueeze(-1)
    normed = values * inverse
    by_normed = by_y if weight is None else by_y * _factor(weight, offset)
    along = (by_normed * normed).mean(-1, keepdim=True)
    by_x = by_normed - normed * along
    if center:
        by_x = by_x - by_normed.mean(-1, keepdim=True)
    by_x = (by_x * inverse).to(x.dtype)
    if not parameters:
        return by_x, by_y.new_empty(0, x.shape[-1])
    parts = [by_y * normed, by_y] if center else [by_y * normed]
    return by_x, torch.stack([part.reshape(-1, x.shape[-1]).sum(0) for part in parts])


def _factor(weight: Tensor, offset: bool) -> Tensor:
    return weight.float() + 1.0 if offset else weight.float()


def _norm_fake(
    x: Tensor, weight: Any, bias: Any, eps: float, center: bool, offset: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    rows = math.prod(x.shape[:-1])
    stats = x.new_empty(rows, dtype=torch.float32)
    mean = x.new_empty(rows if center else 0, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), mean, stats


def _norm_backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Any,
    mean: Tensor,
    rstd: Tensor,
    center: bool,
    offset: bool,
    parameters: bool,
) -> tuple[Tensor, Tensor]:
    sums = (2 if center else 1) if parameters else 0
    return x.new_empty(x.shape), x.new_empty(sums, x.shape[-1], dtype=torch.float32)


register(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool center, bool offset, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _norm_now,
    _norm_fake,
)
register(
    "norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool center, "
    "bool offset, bool parameters) -> (Tensor, Tensor)",
    _norm_backward_now,
    _norm_backward_fake,
)
