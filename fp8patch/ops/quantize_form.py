"""`quantize_form`: GELU (or another form) and the cast of what it returns, in one read.

Left apart, the elementwise kernel writes its result to memory, and the cast is all that reads it.
Nobody calls this operator: passes over compiled blocks put it where the two meet.

Arguments and outputs are those of `quantize`: x [M, K] is GELU's input, y [M, K] is None where the
form has none; there is no `live`. Declared without mutation as well, for the reasons given there.

    gelu, gelu_tanh, silu_mul, …_backward   an activation, or its gradient; y and it are like x
    to_bf16, to_fp16                        x in FP32, rounded
    dropout                                 its gradient, x * (y * factor): y is the mask, bool
    dropout_to_bf16, dropout_to_fp16        the same of x in FP32, rounded once

On a GPU an activation is as exact as PyTorch's, not equal to it: some FP8 values are one step off.
Where PyTorch's `1 + erf` cancels to zero, below -5.5, it gives tiny numbers, and they count as
flushed. The other forms are equal to the bit.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8patch.ops.norm import register
from fp8patch.ops.quantize import FLAGS, as_traced, dtype_of, is_cold, kernels, quantize_now

_INV_SQRT_2, _INV_SQRT_2PI = 0.7071067811865476, 0.3989422804014327
# tanh GELU is 0.5 x (1 + tanh(_B (x + _C x^3))).
_B, _C = 0.7978845608028654, 0.044715


def _gelu(x: Tensor, _: Tensor) -> Tensor:
    v = x.float()
    return ((v * 0.5) * (torch.erf(v * _INV_SQRT_2) + 1)).to(x.dtype)


def _gelu_backward(x: Tensor, grad: Tensor) -> Tensor:
    v = x.float()
    slope = (torch.erf(v * _INV_SQRT_2) + 1) * 0.5
    slope = slope + v * (torch.exp((v * v) * -0.5) * _INV_SQRT_2PI)
    return (grad.float() * slope).to(x.dtype)


def _gelu_tanh(x: Tensor, _: Tensor) -> Tensor:
    v = x.float()
    return ((v * 0.5) * (torch.tanh((v + v * v * v * _C) * _B) + 1)).to(x.dtype)


def _gelu_tanh_backward(x: Tensor, grad: Tensor) -> Tensor:
    v = x.float()
    tanh = torch.tanh((v + v * v * v * _C) * _B)
    slope = (tanh + 1) * 0.5 + (v * 0.5) * (1 - tanh * tanh) * ((v * v * (3 * _C) + 1) * _B)
    return (grad.float() * slope).to(x.dtype)


def _silu_mul(x: Tensor, y: Tensor) -> Tensor:
    v = x.float()
    return (v / (torch.exp(-v) + 1)).to(x.dtype) * y


# What is cast, of x and y. The order of the operations is that of the compiler's decompositions, so
# that on a CPU no bit is another than without this operator.
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": _gelu,
    "gelu_backward": _gelu_backward,
    "gelu_tanh": _gelu_tanh,
    "gelu_tanh_backward": _gelu_tanh_backward,
    "silu_mul": _silu_mul,
}


def _dropout(x: Tensor, mask: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    # Inductor's kernels round once, too, and take the factor in FP32. (Run as it stands, the graph
    # would round it to BF16, which makes 1 / 0.9 a sixth of a percent smaller.)
    return (x.float() * (mask.float() * factor)).to(dtype)


# What is cast, of x, a mask and a factor.
STORED: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "to_bf16": lambda x, _, __: x.bfloat16(),
    "to_fp16": lambda x, _, __: x.half(),
    "dropout": lambda x, mask, factor: _dropout(x, mask, factor, x.dtype),
    "dropout_to_bf16": lambda x, mask, factor: _dropout(x, mask, factor, torch.bfloat16),
    "dropout_to_fp16": lambda x, mask, factor: _dropout(x, mask, factor, torch.float16),
}


def formed(x: Tensor, y: Tensor | None, form: str, factor: float = 1.0) -> Tensor:
    """What is cast."""
    second = x if y is None else y
    return STORED[form](x, second, factor) if form in STORED else FORMS[form](x, second)


def _now(
    x: Tensor, y: Tensor | None, form: str, *terms: Any, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale, amax, counts, limit, e5m2, *flags = terms
    # A cold scale needs the amax first, for which the result has to be there.
    found = kernels() if x.is_cuda and x.numel() and not is_cold(scale) else None
    if found is not None:
        named = dict(zip(FLAGS, flags, strict=True))
        named |= {"form": form, "y": None if y is None else y.contiguous(), "factor": factor}
        slot = scale, amax, counts
        x, dtype = x.contiguous(), dtype_of(e5m2)
        return as_traced(found.quantize(x, *slot, limit, dtype, live=False, **named))
    value = formed(x, y, form, factor)
    return as_traced(quantize_now(value, scale, amax, counts, limit, e5m2, False, *flags))


def _fake(
    x: Tensor, y: Tensor | None, form: str, *rest: Any, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *slot_and_format, observe, transpose, column_sums = rest
    outputs: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.fp8patch.quantize.default(
        x, *slot_and_format, False, observe, transpose, column_sums
    )
    return outputs


register(
    "quantize_form(Tensor x, Tensor? y, str form, Tensor scale, Tensor amax, Tensor counts, "
    "float limit, bool e5m2, bool observe, bool transpose, bool column_sums, *, float factor=1.0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _now,
    _fake,
)
