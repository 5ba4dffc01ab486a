"""`activation_grads`: the casts of an activation's gradients, and of the activation once more.

What goes forward through an activation is cast there, and its transpose is wanted in backward only:
by the weight gradient of the layer behind it. Backward reads what the activation was computed of in
any case, so it can make the transpose on its way, and nobody keeps it in between.

Nobody calls this operator: a pass over compiled blocks puts it in place of the casts.

    form       value           gradients
    gelu       gelu(x)         of x
    gelu_tanh  tanh gelu(x)    of x
    silu_mul   silu(x) * y     of x, of y

Arguments: x, y and grad [M, K] of one dtype, y None where the form has none; scale_inv of the
value's cast in forward, which its transpose is scaled by again (as 1 / scale_inv: the slot's scale
may have moved since); a slot for each gradient; the rest as in `quantize`, there is no `live`.

Outputs: of each gradient the rows [M, padded K], the transpose [padded K, padded M], and scale_inv;
after the first of these also its column sums (FP32 [K]). Last the transpose of the value. What was
not asked for is empty. Declared without mutation, for the reasons given in quantize.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.norm import register
from fp8patch.ops.quantize import dtype_of, is_cold, kernels, padded, quantize_now
from fp8patch.ops.quantize_form import FORMS
from fp8patch.ops.transpose_again import transposed_cast


def _silu_mul(x: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    v = x.float()
    s = torch.sigmoid(v)
    by_x = ((grad * y).float() * s * (v * (1 - s) + 1)).to(x.dtype)
    return by_x, grad * (v / (torch.exp(-v) + 1)).to(x.dtype)


# x, y, grad -> the gradients of x and y. Operations in the order of the compiler's decompositions.
GRADS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "gelu": lambda x, _, grad: (FORMS["gelu_backward"](x, grad),),
    "gelu_tanh": lambda x, _, grad: (FORMS["gelu_tanh_backward"](x, grad),),
    "silu_mul": _silu_mul,
}


def _now(
    x: Tensor, y: Tensor | None, grad: Tensor, form: str, scale_inv: Tensor, *terms: Any
) -> tuple[Tensor, ...]:
    scale, amax, counts, scale_y, amax_y, counts_y, limit, e5m2, observe, column_sums = terms
    slots = [(scale, amax, counts)]
    if scale_y is not None:
        slots.append((scale_y, amax_y, counts_y))
    # A cold scale needs the amax first, for which the gradient has to be there.
    cold = any(is_cold(scale) for scale, *_ in slots)
    dtype = dtype_of(e5m2)
    if x.is_cuda and x.numel() and not cold and kernels() is not None:
        from fp8patch.ops.triton.activation_grads import activation_grads as kernel

        x, grad, y = x.contiguous(), grad.contiguous(), None if y is None else y.contiguous()
        casts, sums, value_t = kernel(
            x, y, grad, form, scale_inv, slots, dtype, observe=observe, column_sums=column_sums
        )
    else:
        second = x if y is None else y
        casts, sums = [], None
        for slot, by in zip(slots, GRADS[form](x, second, grad), strict=True):
            rows, rows_t, inv, added = quantize_now(
                by, *slot, limit, e5m2, False, observe, True, column_sums
            )
            casts.append((rows, rows_t, inv))
            sums = added if sums is None else sums
        value_t = transposed_cast(FORMS[form](x, second), scale_inv)
    none = x.new_empty((0, 0), dtype=dtype), x.new_empty((0, 0), dtype=dtype), scale.new_empty(0)
    return (
        *casts[0],
        scale.new_empty(0) if sums is None else sums,
        *(*casts, none)[1],
        value_t,
    )


def _fake(
    x: Tensor, y: Tensor | None, grad: Tensor, form: str, scale_inv: Tensor, *terms: Any
) -> tuple[Tensor, ...]:
    scale, _, _, scale_y, _, _, _, e5m2, _, column_sums = terms
    dtype = dtype_of(e5m2)
    m, k = x.shape

    def cast(rows: Any, cols: Any, height: Any) -> tuple[Tensor, Tensor]:
        return x.new_empty((rows, cols), dtype=dtype), x.new_empty((cols, height), dtype=dtype)

    second = cast(0, 0, 0) if scale_y is None else cast(m, padded(k), padded(m))
    return (
        *cast(m, padded(k), padded(m)),
        torch.empty_like(scale),
        x.new_empty((k if column_sums else 0,), dtype=torch.float32),
        *second,
        scale.new_empty(0) if scale_y is None else torch.empty_like(scale_y),
        x.new_empty((padded(k), padded(m)), dtype=numerics.E4M3),
    )


register(
    "activation_grads(Tensor x, Tensor? y, Tensor grad, str form, Tensor scale_inv, "
    "Tensor scale, Tensor amax, Tensor counts, Tensor? scale_y, Tensor? amax_y, Tensor? counts_y, "
    "float limit, bool e5m2, bool observe, bool column_sums) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _now,
    _fake,
)
