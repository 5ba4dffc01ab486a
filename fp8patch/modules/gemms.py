"""The three GEMMs of a linear layer, each in FP8 or in the model's own precision.

    fprop  output      [M, N] = input  [M, K] @ weight^T       E4M3 x E4M3, fast accumulation
    dgrad  grad_input  [M, K] = grad_output [M, N] @ weight    E5M2 x E4M3, precise
    wgrad  grad_weight [N, K] = grad_output^T @ input [M, K]   E5M2 x E4M3, precise

What is kept for backward is FP8: the transpose of the quantised input, and the quantised weight. A
GEMM that the recipe keeps in `bf16` keeps its operands in the output's dtype instead.

Everything is 2-D inside. Leading dimensions are folded and unfolded in the Function: outside it,
that would be two more nodes of autograd's a layer. The output is no view, as nn.Linear's: a custom
Function that returned one would forbid the caller to edit it in place (DeBERTa adds a bias to it).
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8patch.input_cache import recall, remember
from fp8patch.modules.again import Again
from fp8patch.modules.autograd_calls import first_order, quick_apply
from fp8patch.ops.gemm import fp8_gemm
from fp8patch.ops.quantize import quantize, quantize_rowwise
from fp8patch.slots import Slot


class GemmSpec(NamedTuple):
    """How one call computes: constants only, so that a compiler can guard on them.

    Attributes:
        fprop, dgrad, wgrad: FP8 (True) or high precision.
        rowwise: One scale a row instead of one a tensor.
        live: Scale by the tensor's own amax.
        observe: Write the slots.
        save: Gradients are enabled: keep what backward needs.
        emulate: FP32 arithmetic on FP8 values.
        grad_e5m2: Gradients in E5M2.
        input_limit, grad_limit: What a live amax is scaled to.
        out_dtype: Dtype of the output, and of high-precision operands.
        in_out: The weight is stored [K, N] (Conv1D) instead of [N, K].
    """

    fprop: bool
    dgrad: bool
    wgrad: bool
    rowwise: bool
    live: bool
    observe: bool
    save: bool
    emulate: bool
    grad_e5m2: bool
    input_limit: float
    grad_limit: float
    out_dtype: torch.dtype
    in_out: bool


class Quantized(NamedTuple):
    """One quantised operand: rows, their transpose, the scale_inv of each (scalar or column)."""

    rows: Tensor
    rows_t: Tensor
    scale_inv: Tensor
    scale_inv_t: Tensor


def cast(
    x: Tensor,
    slot: Slot,
    limit: float,
    *,
    e5m2: bool,
    rowwise: bool,
    live: bool,
    observe: bool,
    transpose: bool,
) -> Quantized:
    """Quantise x [M, K] for a GEMM; `transpose=False` leaves `rows_t` empty."""
    if rowwise:
        return Quantized(
            *quantize_rowwise(x, slot.amax, slot.counts, limit, e5m2, observe, transpose)
        )
    rows, rows_t, scale_inv, _ = quantize(
        x, slot.scale, slot.amax, slot.counts, limit, e5m2, live, observe, transpose
    )
    return Quantized(rows, rows_t, scale_inv, scale_inv)


def cast_input(x: Tensor, slot: Slot, spec: "GemmSpec", transpose: bool) -> Quantized:
    """Quantise the input of a layer."""
    return cast(
        x,
        slot,
        spec.input_limit,
        e5m2=False,
        rowwise=spec.rowwise,
        live=spec.live,
        observe=spec.observe,
        transpose=transpose,
    )


def needs_transpose(spec: "GemmSpec", weight: Tensor) -> bool:
    """Does backward need the input's transpose?"""
    return spec.wgrad and spec.save and weight.requires_grad


def input_key(slot: Slot, spec: "GemmSpec", transpose: bool) -> Hashable:
    """What two casts of one input have to agree on to be the same."""
    # The slots that siblings share are one object, so this compares nothing but identities.
    return (id(slot.amax), spec.rowwise, spec.live, spec.observe, spec.input_limit, transpose)


def rows_of(x: Tensor) -> Tensor:
    """[..., K] as [M, K]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def shared_input(input: Tensor, slot: Slot, spec: "GemmSpec", transpose: bool) -> Quantized | None:
    """The quantised input [..., K] of a layer, made once for all siblings; None if none is needed.

    Eager only.
    """
    if not (spec.fprop or transpose):
        return None
    key = input_key(slot, spec, transpose)
    known: Quantized | None = recall(input, key)
    if known is None:
        known = cast_input(rows_of(input.detach()), slot, spec, transpose)
        remember(input, key, known)
    return known


def _cast_grad(
    x: Tensor, slot: Slot, spec: "GemmSpec", transpose: bool, bias: bool
) -> tuple[Quantized, Tensor | None]:
    """Quantise grad_output [M, N]; with it its column sums (FP32 [N]), the gradient of a bias."""
    if spec.rowwise:
        sums = x.sum(0, dtype=torch.float32) if bias else None
        quantized = quantize_rowwise(
            x, slot.amax, slot.counts, spec.grad_limit, spec.grad_e5m2, spec.observe, transpose
        )
        return Quantized(*quantized), sums
    rows, rows_t, scale_inv, sums = quantize(
        x,
        slot.scale,
        slot.amax,
        slot.counts,
        spec.grad_limit,
        spec.grad_e5m2,
        spec.live,
        spec.observe,
        transpose,
        bias,
    )
    return Quantized(rows, rows_t, scale_inv, scale_inv), sums


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return a.to(dtype) @ b.to(dtype)


class Operands(NamedTuple):
    """What a call needs besides the tensors that autograd knows.

    In one argument, because autograd looks at each. `input` may be None: it is quantised by the
    call then. So may `bias`: a copy of the bias in the dtype that the GEMM adds (bias_copies.py);
    and `again`, without which the transpose of the input is kept.
    """

    weight: Quantized
    input: Quantized | None
    input_slot: Slot
    grad_slot: Slot
    bias: Tensor | None = None
    again: Again | None = None


class Float8Gemms(torch.autograd.Function):
    """(input [..., K], weight, bias [N] or None, operands, spec) -> output [..., N]."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operands: Operands,
        spec: GemmSpec,
    ) -> Tensor:
        weight_q, input_q, input_slot, grad_slot, bias_copy, again = operands
        ctx.spec, ctx.grad_slot = spec, grad_slot
        ctx.again = None if again is None else again.make
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dtypes = input.dtype, weight.dtype
        needs = ctx.needs_input_grad
        need_input, need_weight = spec.save and needs[0], spec.save and needs[1]
        wgrad_fp8 = need_weight and spec.wgrad
        features = weight.shape[1] if spec.in_out else weight.shape[0]
        ctx.features = features, input.shape[-1]

        if input_q is None and (spec.fprop or wgrad_fp8):
            input_q = cast_input(rows_of(input), input_slot, spec, wgrad_fp8)
        if spec.fprop:
            assert input_q is not None
            # [M, K] @ [N, K]^T; both padded to multiples of 16 where the recipe pads.
            added = bias if bias_copy is None else bias_copy
            output = _fprop(input_q, weight_q, added, spec, features)
        else:
            matrix = weight if spec.in_out else weight.t()
            output = _mm(rows_of(input), matrix, spec.out_dtype)
            if bias is not None:
                output = output + bias.to(spec.out_dtype)

        keep = need_weight and not spec.wgrad
        saved_input = rows_of(input).to(spec.out_dtype) if keep else None
        kept = input_q if wgrad_fp8 else None
        ctx.save_for_backward(
            saved_input,
            weight if need_input and not spec.dgrad else None,
            None if kept is None else kept.rows_t,
            None if kept is None else kept.scale_inv_t,
            weight_q.rows_t if need_input and spec.dgrad else None,
            weight_q.scale_inv_t if need_input and spec.dgrad else None,
            *(() if again is None else again.read),
        )
        if input.dim() != 2:
            shape = [*input.shape[:-1], features]
            output = torch.ops.aten._unsafe_view.default(output, shape)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        spec: GemmSpec = ctx.spec
        input, weight, input_t, input_inv_t, weight_t, weight_inv_t, *read = ctx.saved_tensors
        need_input, need_weight, need_bias, *_ = ctx.needs_input_grad
        n, k = ctx.features
        leading, grad_output = grad_output.shape[:-1], rows_of(grad_output)
        input_dtype, weight_dtype = ctx.dtypes

        wgrad_fp8 = need_weight and spec.wgrad
        grad_q = grad_bias = None
        if wgrad_fp8 or (need_input and spec.dgrad):
            grad_q, grad_bias = _cast_grad(grad_output, ctx.grad_slot, spec, wgrad_fp8, need_bias)
        elif need_bias:
            grad_bias = grad_output.sum(0, dtype=torch.float32)
        if need_bias and grad_bias is not None:
            grad_bias = _to(grad_bias, ctx.bias_dtype)

        grad_input = grad_weight = None
        if need_input and spec.dgrad:
            assert grad_q is not None
            # [M, N] @ [K, N]^T
            grad_input = fp8_gemm(
                grad_q.rows,
                weight_t,
                grad_q.scale_inv,
                weight_inv_t,
                spec.out_dtype,
                fast_accum=False,
                emulate=spec.emulate,
            )
            grad_input = _to(_cut(grad_input, grad_input.shape[0], k), input_dtype)
        elif need_input:
            matrix = weight.t() if spec.in_out else weight
            grad_input = _mm(grad_output, matrix, spec.out_dtype).to(input_dtype)
        if wgrad_fp8:
            assert grad_q is not None
            if ctx.again is not None:
                input_t = ctx.again(*read)
            grad_weight = _wgrad(grad_q, input_t, input_inv_t, spec, weight_dtype, n, k)
        elif need_weight:
            a, b = (input.t(), grad_output) if spec.in_out else (grad_output.t(), input)
            grad_weight = _mm(a, b, spec.out_dtype).to(weight_dtype)
        if grad_input is not None and len(leading) != 1:
            grad_input = grad_input.reshape(*leading, k)
        return grad_input, grad_weight, grad_bias if need_bias else None, None, None


# `Float8Gemms.apply` where nothing is traced.
run_gemms = quick_apply(Float8Gemms)


def _fprop(
    input_q: Quantized, weight_q: Quantized, bias: Tensor | None, spec: GemmSpec, n: int
) -> Tensor:
    padded = weight_q.rows.shape[0] - n
    if bias is not None and padded:
        bias = torch.nn.functional.pad(bias, (0, padded))
    output = fp8_gemm(
        input_q.rows,
        weight_q.rows,
        input_q.scale_inv,
        weight_q.scale_inv,
        spec.out_dtype,
        fast_accum=True,
        emulate=spec.emulate,
        bias=bias,
    )
    return output[:, :n].contiguous() if padded else output


def _wgrad(
    grad_q: Quantized,
    input_t: Tensor,
    input_inv_t: Tensor,
    spec: GemmSpec,
    dtype: torch.dtype,
    n: int,
    k: int,
) -> Tensor:
    # [N, M] @ [K, M]^T, or [K, M] @ [N, M]^T for a weight stored [K, N]. An FP32 weight gets its
    # gradient straight from the FP32 accumulator, not through BF16 as under stock autocast.
    a, a_inv, b, b_inv = grad_q.rows_t, grad_q.scale_inv_t, input_t, input_inv_t
    if spec.in_out:
        a, a_inv, b, b_inv, n, k = b, b_inv, a, a_inv, k, n
    product = fp8_gemm(a, b, a_inv, b_inv, dtype, fast_accum=False, emulate=spec.emulate)
    return _cut(product, n, k)


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    # As `x.to`, which takes a microsecond where there is nothing to do.
    return x if x.dtype == dtype else x.to(dtype)


def _cut(x: Tensor, rows: int, cols: int) -> Tensor:
    # Slicing what has the right shape would still cost a call, and a view in a compiled graph.
    return x if tuple(x.shape) == (rows, cols) else x[:rows, :cols]
