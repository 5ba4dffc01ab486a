"""The scaled GEMM: `(a * scale_a) @ (b * scale_b)` of FP8 operands, and its emulation.

Layout: FP8 tensor cores on Hopper and Ada want both operands contiguous along what is contracted
("TN"). So every GEMM here is `a [M, K] @ b_t [N, K]^T`, both row-major, and the caller keeps a
transpose of what it needs along the other axis:

    fprop  output      [M, N] = input_fp8      [M, K] @ weight_fp8   [N, K]^T
    dgrad  grad_input  [M, K] = grad_fp8       [M, N] @ weight_fp8_t [K, N]^T
    wgrad  grad_weight [N, K] = grad_fp8_t     [N, M] @ input_fp8_t  [K, M]^T

K here is whatever is contracted, and a multiple of 16 (`quantize` pads it).
"""

import torch
from torch import Tensor


def fp8_gemm(
    a: Tensor,
    b_t: Tensor,
    scale_inv_a: Tensor,
    scale_inv_b: Tensor,
    out_dtype: torch.dtype,
    *,
    fast_accum: bool,
    emulate: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """[M, K] x [N, K] -> [M, N] in `out_dtype`.

    Args:
        a, b_t: FP8, contiguous, K a multiple of 16 and N too (a hardware rule; emulation accepts
            any).
        scale_inv_a: FP32 scalar, or [M, 1] for rowwise; `scale_inv_b`: scalar, or [N, 1].
        fast_accum: let the tensor core accumulate at reduced precision (Hopper: about 14 bits), as
            Transformer Engine and torchao do for fprop and not for dgrad and wgrad.
        emulate: the same product in FP32, on any device.
        bias: [N], added before the result is rounded to `out_dtype`.
    """
    if a.shape[0] == 0 or a.shape[1] == 0:
        zeros = torch.zeros(a.shape[0], b_t.shape[0], dtype=out_dtype, device=a.device)
        return zeros if bias is None else zeros + bias.to(out_dtype)
    if emulate:
        return _emulated(a, b_t, scale_inv_a, scale_inv_b, bias).to(out_dtype)
    rowwise = scale_inv_a.dim() == 2
    # The rowwise kernel writes BF16 only.
    kernel_dtype = torch.bfloat16 if rowwise else out_dtype
    bias_dtype = None if bias is None else fused_bias_dtype(out_dtype, rowwise)
    # Not torch.nn.functional.scaled_mm: it takes CPU time on top of this call, and
    # Inductor knows how to plan memory and graphs for this one.
    output = torch._scaled_mm(
        a,
        b_t.t(),
        scale_inv_a,
        scale_inv_b.t() if rowwise else scale_inv_b,
        None if bias is None or bias_dtype is None else _to(bias, bias_dtype),
        None,
        kernel_dtype,
        fast_accum,
    )
    output = _to(output, out_dtype)
    return output if bias is None or bias_dtype is not None else output + bias.to(out_dtype)


def fused_bias_dtype(out_dtype: torch.dtype, rowwise: bool) -> torch.dtype | None:
    """The dtype in which the kernel adds a bias; None where it can't (to an FP32 result)."""
    dtype = torch.bfloat16 if rowwise else out_dtype
    return None if dtype == torch.float32 else dtype


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Asking first, because `to` takes a microsecond where there is nothing to do.
    return x if x.dtype == dtype else x.to(dtype)


def _emulated(
    a: Tensor, b_t: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, bias: Tensor | None
) -> Tensor:
    # An FP8 product has at most 8 significant bits, so it is exact in FP32 (and in TF32): only the
    # order of the sum differs from the hardware. Autocast would turn this matmul into BF16.
    with torch.autocast(a.device.type, enabled=False):
        product = a.float() @ b_t.float().t()
    product = product * scale_inv_a
    product = product * (scale_inv_b.t() if scale_inv_b.dim() == 2 else scale_inv_b)
    return product if bias is None else product + bias.float()
