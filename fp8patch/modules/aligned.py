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
from fp8patch.ops.cross_entropy import with_zeros

# Elements of two bytes in the 16 bytes that a row has to be a multiple of.
_MULTIPLE = 8
# Under this many rows the GEMM reads the weight and does little else: nothing to gain.
_FEWEST_ROWS = 256


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
        n = weight.shape[0]
        ctx.dtypes = input.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.features, ctx.width = n, -(-n // _MULTIPLE) * _MULTIPLE
        with torch.autocast(input.device.type, enabled=False):
            rows = input.to(dtype)
            # Whole rows of its own, as nn.Linear's output has. Until they are written, the padded
            # weight lies there: memory of its own would be a hole where a step needs most.
            whole = rows.new_empty(rows.shape[0], n)
            padded = _pad_rows(weight, ctx.width, dtype, whole.view(-1))
            if bias is None:
                output = rows @ padded.t()
            else:
                longer = torch.nn.functional.pad(bias.to(dtype), (0, ctx.width - n))
                output = torch.addmm(longer, rows, padded.t())
            _copy(output[:, :n], whole)
        # The weight, which lives anyway, and not its copy: a loss in chunks calls this many times.
        ctx.save_for_backward(rows, weight)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        n, width = ctx.features, ctx.width
        grad = with_zeros(grad_output, _MULTIPLE) if grad_output.dtype == rows.dtype else None
        if grad is None:
            grad = grad_output.new_empty(grad_output.shape[0], width, dtype=rows.dtype)
            _copy(grad_output, grad[:, :n])
            grad[:, n:].zero_()
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = (grad @ _pad_rows(weight, width, rows.dtype)).to(input_dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.t() @ rows)[:n].to(weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_input, grad_weight, grad_bias, None


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


def _pad_rows(weight: Tensor, rows: int, dtype: torch.dtype, place: Tensor | None = None) -> Tensor:
    """`weight` in `dtype` with zeros up to `rows`, in `place` if it is large enough."""
    shape = rows, weight.shape[1]
    if place is not None and place.numel() >= rows * weight.shape[1]:
        padded = place[: rows * weight.shape[1]].view(shape)
    else:
        padded = weight.new_empty(shape, dtype=dtype)
    padded[: weight.shape[0]].copy_(weight)
    padded[weight.shape[0] :].zero_()
    return padded
