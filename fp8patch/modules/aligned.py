"""`AlignedLinear`: an output head in BF16 whose vocabulary is no multiple of eight.

Heads stay in high precision. But where a row of their output is no multiple of 16 bytes (BERT's
vocabulary of 28996 or 30522, GPT-2's of 50257), cuBLAS falls back to kernels of another age, which
take two to three times as long for each of the three GEMMs. So these run on a copy of the weight
with a few rows of zeros more. Autocast makes a copy of the weight anyway, each time: this one has
another shape. The Parameter is not touched.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8patch import regions

# Elements of two bytes in the 16 bytes that a row has to be a multiple of.
_MULTIPLE = 8
# Under this many rows the GEMM reads the weight and does little else: nothing to gain.
_FEWEST_ROWS = 256
# Bytes of a padded copy at a time. One of all logits would lie beside them in forward, and beside
# their gradient in backward, where a step needs most (BERT-large: 713 MB, now half of that).
_AT_ONCE = 1 << 29


class AlignedLinear(nn.Linear):
    """`nn.Linear`, [..., K] -> [..., N], whose BF16 or FP16 GEMMs are padded to a better N.

    Only in training, on a GPU, inside a region and under autocast; everything else is `nn.Linear`.
    """

    _fp8_base: ClassVar[type[nn.Module]] = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        if regions.active() is None or not _pays(self, input):
            return super().forward(input)
        dtype = torch.get_autocast_dtype(input.device.type)
        rows = input.reshape(-1, input.shape[-1])
        output: Tensor = AlignedGemms.apply(rows, self.weight, self.bias, dtype)  # type: ignore[no-untyped-call]
        # No view, as nn.Linear's is none: the caller may edit it in place.
        shape = [*input.shape[:-1], output.shape[-1]]
        viewed: Tensor = torch.ops.aten._unsafe_view.default(output, shape)
        return viewed


def _pays(module: nn.Linear, input: Tensor) -> bool:
    device = input.device.type
    if not torch.is_grad_enabled() or device != "cuda" or torch.compiler.is_compiling():
        return False  # (Inductor pads by itself.)
    if not torch.is_autocast_enabled(device) or not torch.is_floating_point(input):
        return False
    if torch.get_autocast_dtype(device) not in (torch.bfloat16, torch.float16):
        return False
    weight = module.weight
    if type(weight) not in (nn.Parameter, Tensor) or weight.device != input.device:
        return False
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        return False
    return bool(weight.shape[0] % _MULTIPLE) and input.numel() >= _FEWEST_ROWS * weight.shape[1]


class AlignedGemms(torch.autograd.Function):
    """(input [M, K], weight [N, K], bias [N] or None, dtype) -> output [M, N] in `dtype`.

    Rounds where autocast does: operands, output and gradients to `dtype`, sums in FP32.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.dtypes = input.dtype, weight.dtype, None if bias is None else bias.dtype
        with torch.autocast(input.device.type, enabled=False):
            rows = input.to(dtype)
            # Whole rows of its own, as nn.Linear's output has.
            output = rows.new_empty(rows.shape[0], weight.shape[0])
            for part in _parts(output):
                padded = _pad_rows(weight[part], dtype)
                longer = None if bias is None else _pad_rows(bias[part], dtype)
                target = output[:, part]
                product = torch.nn.functional.linear(rows, padded, longer)
                _copy(product[:, : target.shape[1]], target)
        # The weight, which lives anyway, and not its copy: a loss in chunks calls this many times.
        ctx.save_for_backward(rows, weight)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
        parts = _parts(grad_output)
        for part in parts:
            grad = _pad_columns(grad_output[:, part], rows.dtype)
            if ctx.needs_input_grad[0]:
                padded = _pad_rows(weight[part], rows.dtype)
                product = grad @ padded if len(parts) == 1 else _mm(grad, padded)
                grad_input = product if grad_input is None else grad_input.add_(product)
            if grad_weight is not None:
                target = grad_weight[part]
                target.copy_((grad.t() @ rows)[: target.shape[0]])
        if grad_input is not None:
            # Through the dtype of the GEMMs, as autocast's is.
            grad_input = grad_input.to(rows.dtype).to(input_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_input, grad_weight, grad_bias, None


def _parts(output: Tensor) -> list[slice]:
    """The columns of [M, N] whose GEMMs are done at a time; all but the last a multiple of 8."""
    height, n = output.shape
    number = max(1, -(-height * n * output.itemsize // _AT_ONCE))
    width = -(-n // number // _MULTIPLE) * _MULTIPLE
    return [slice(start, min(start + width, n)) for start in range(0, n, width)]


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a [M, N] @ b [N, K] in FP32, of two-byte values: what several are added up of."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy [M, N], several elements at a time where rows lie so that this can be done.

    PyTorch copies what is not contiguous one element at a time: 0.8 ms for BERT-large's logits,
    whose traffic needs 0.35.
    """
    for wide in (torch.int64, torch.int32):
        if source.dtype == target.dtype and _can_view(source, wide) and _can_view(target, wide):
            source, target = source.view(wide), target.view(wide)
            break
    target.copy_(source)


def _can_view(x: Tensor, wide: torch.dtype) -> bool:
    each = wide.itemsize // x.itemsize
    starts = (x.shape[1], x.stride(0), x.storage_offset())
    return x.stride(1) == 1 and not any(size % each for size in starts)


def _pad_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, ...] with rows of zeros up to a multiple of 8."""
    n = x.shape[0]
    padded = x.new_empty(-(-n // _MULTIPLE) * _MULTIPLE, *x.shape[1:], dtype=dtype)
    padded[:n].copy_(x)
    padded[n:].zero_()
    return padded


def _pad_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N] with columns of zeros up to a multiple of 8."""
    rows, n = x.shape
    padded = x.new_empty(rows, -(-n // _MULTIPLE) * _MULTIPLE, dtype=dtype)
    _copy(x, padded[:, :n])
    padded[:, n:].zero_()
    return padded
