"""How long Inductor's norms take on a GPU, with rows read twice (above 1024, its choice) and once.

    python scripts/time_wide_rows.py

Forward and backward, each kernel by itself, in microseconds; what blocks/wide_rows.py is there for.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from fp8patch.blocks import wide_rows

BF16, STEPS = torch.bfloat16, 5


def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A block's first."""
    return F.layer_norm(residual, weight.shape, weight, bias).to(BF16)


def behind_residual(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """As in a ViT."""
    total = x + residual
    return total, F.layer_norm(total, weight.shape, weight, bias).to(BF16)


def behind_dropout(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As in a BERT."""
    return F.layer_norm(F.dropout(x, 0.1) + residual, weight.shape, weight, bias)


def rms(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """As in a Llama."""
    total = x + residual
    scaled = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    return total, (weight * scaled).to(BF16)


CASES: tuple[tuple[Callable[..., Any], int, int], ...] = (
    (behind_dropout, 12288, 1024),
    (norm, 25216, 1280),
    (behind_residual, 25216, 1280),
    (rms, 8192, 4096),
    (behind_dropout, 8192, 4096),
    (rms, 4096, 8192),
)


def stock(graph: Any, inputs: Any) -> Any:
    return compile_fx(graph, inputs)


def ours(graph: Any, inputs: Any) -> Any:
    return compile_fx(graph, inputs, inner_compile=wide_rows.compile_inner)


def kernels(function: Callable[..., Any], rows: int, width: int, backend: Any) -> Counter[str]:
    """Microseconds by kernel, of a forward and a backward."""
    torch._dynamo.reset()
    made: dict[str, Any] = {"device": "cuda", "requires_grad": True}
    inputs = [
        torch.randn(rows, width, dtype=BF16, **made),
        torch.randn(rows, width, **made),
        *(torch.randn(width, **made) for _ in range(2)),
    ]
    with torch._inductor.config.patch(fx_graph_cache=False):
        compiled = torch.compile(function, backend=backend)

        def step() -> None:
            found = compiled(*inputs)
            found = found if isinstance(found, tuple) else (found,)
            torch.autograd.backward(found, [torch.ones_like(each) for each in found])
            for each in inputs:
                each.grad = None

        for _ in range(4):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
    taken: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and event.name.startswith("triton"):
            taken[event.name] += event.device_time / STEPS
    return taken


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for function, rows, width in CASES:
        for backend in (stock, ours):
            taken = kernels(function, rows, width, backend)
            shown = ", ".join(f"{name[:10]} {us:.1f}" for name, us in taken.items())
            print(f"{function.__name__} {rows}x{width} {backend.__name__}: {shown} us", flush=True)


if __name__ == "__main__":
    main()
