"""How long the norms take on a GPU: ours, the stock forms eager and compiled, and their CPU time.

`scripts/check_norms.py` runs it.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
import triton
from torch import Tensor, nn
from torch.nn import functional as F

import fp8patch
from fp8patch.modules.norm_function import Normalize, NormSpec
from fp8patch.ops import norm as ops
from fp8patch.ops import norm_quantize as fused
from fp8patch.ops.quantize import quantize

FP32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-5
TIMED = [(12288, 1024), (8192, 4096), (32768, 1280), (4096, 768)]
rows: list[dict[str, Any]] = []


def operands(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> tuple[Any, ...]:
    """(x, weight, bias, grad)"""
    x = (torch.randn(shape, device="cuda") * 3 + 1).to(dtype)
    weight = torch.randn(shape[1], device="cuda") * 0.3 + (kind != "rms offset")
    bias = torch.randn(shape[1], device="cuda") * 0.1 if kind == "layer" else None
    return x, weight, bias, torch.randn(shape, device="cuda").to(dtype)


def slot(scale: float) -> tuple[Tensor, Tensor, Tensor]:
    device = "cuda"
    counts = torch.zeros(4, dtype=torch.int64, device=device)
    return torch.tensor(scale, device=device), torch.zeros((), device=device), counts


def microseconds(function: Callable[[], object]) -> float:
    """Median time of one call."""
    ms = triton.testing.do_bench(function, warmup=10, rep=60, return_mode="median")
    return float(ms) * 1e3


def copy_speed() -> float:
    """Bytes a microsecond."""
    source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source))


def llama(x: Tensor, weight: Tensor) -> Tensor:
    """What transformers' LlamaRMSNorm computes."""
    wide = x.to(FP32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def times(copy: float) -> None:
    """Forward and backward of ours and of the stock forms, eager and compiled."""
    for shape, dtype, kind in itertools.product(TIMED, (FP32, BF16), ("layer", "rms")):
        x, weight, bias, _ = operands(shape, dtype, kind)
        given = [t.requires_grad_() for t in (x, weight, bias) if t is not None]

        def plain(given: list[Tensor] = given, kind: str = kind) -> Tensor:
            # As under autocast: LayerNorm widens its input and returns FP32.
            if kind == "rms":
                return llama(*given)
            return F.layer_norm(given[0].float(), given[0].shape[1:], *given[1:], EPS)

        torch._dynamo.reset()
        compiled = torch.compile(plain)
        forms: dict[str, Callable[[], Tensor]] = {"eager": plain, "compiled": compiled}
        for out in {BF16, FP32}:
            spec = NormSpec(EPS, kind == "layer", False, out)
            forms[f"ours {str(out)[6:]}"] = lambda s=spec, g=given: Normalize.apply(
                *[*g, None][:3], s
            )
        for name, form in forms.items():
            _time_one(name, form, given, shape, dtype, kind, copy)


def _time_one(
    name: str,
    form: Callable[[], Tensor],
    given: list[Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    kind: str,
    copy: float,
) -> None:
    y = form()
    grad = torch.randn_like(y)
    forward = microseconds(form)
    backward = microseconds(lambda: torch.autograd.grad(y, given, grad, retain_graph=True))
    size, wide = shape[0] * shape[1], dtype.itemsize
    moved = size * (wide + y.element_size()), size * (2 * wide + y.element_size())
    parts = [m / t / copy for m, t in zip(moved, (forward, backward), strict=True)]
    where = f"{kind:5s} {shape[0]}x{shape[1]} {str(dtype)[6:]}"
    rows.append(
        {"time": where, "form": name, "forward_us": forward, "backward_us": backward, "copy": parts}
    )
    print(
        f"{where:30s} {name:14s} -> {str(y.dtype)[6:]:9s} forward {forward:7.1f} us {parts[0]:4.0%}"
        f"   backward {backward:7.1f} us {parts[1]:4.0%}",
        flush=True,
    )


def fused_times(copy: float) -> None:
    """The norm with its cast, against the norm and then the cast."""
    for shape, (dtype, out) in itertools.product(TIMED, ((FP32, FP32), (FP32, BF16), (BF16, BF16))):
        x, weight, bias, _ = operands(shape, dtype, "layer")
        norm = x, weight, bias, EPS, True, False, out
        one = slot(30.0)

        def apart(norm: Any = norm, one: Any = one) -> object:
            return quantize(ops.norm(*norm)[0], *one, 448.0, False, False, True, True)

        both = microseconds(lambda n=norm, s=one: fused.norm_quantize(*n, *s, 448.0, True, True))
        moved = x.numel() * (dtype.itemsize + out.itemsize + 2)
        where = f"{shape[0]}x{shape[1]} {str(dtype)[6:]} -> {str(out)[6:]}"
        separate = microseconds(apart)
        rows.append({"fused": where, "us": both, "apart_us": separate, "copy": moved / both / copy})
        print(
            f"fused {where:30s} {both:7.1f} us {moved / both / copy:4.0%}   apart {separate:7.1f}"
        )


def cpu_times() -> None:
    """Python and launches: forward and backward of a small norm, without waiting for the GPU."""
    x = torch.randn(64, 1024, device="cuda", requires_grad=True)
    for name, norm in {"LayerNorm": nn.LayerNorm(1024), "RMSNorm": nn.RMSNorm(1024, 1e-6)}.items():
        model = nn.ModuleDict({"norm": norm, "up": nn.Linear(1024, 1024)}).cuda()
        for ours in (False, True):
            if ours:
                fp8patch.convert_model(model, include=("*",))
            with torch.autocast("cuda", BF16), fp8patch.autocast(backend="fp8"):
                spent = [_cpu(norm, x) for _ in range(3)][-1]
            shown = f"forward {spent[0]:.1f} us, backward {spent[1]:.1f} us of CPU"
            rows.append({"cpu": name, "ours": ours, "us": spent})
            print(f"{name} {'converted' if ours else 'stock'}: {shown}", flush=True)


def _cpu(norm: nn.Module, x: Tensor) -> tuple[float, float]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    outputs = [norm(x) for _ in range(200)]
    forward = time.perf_counter() - begin
    grad = torch.ones_like(outputs[0])
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.autograd.backward(outputs, [grad] * len(outputs))
    backward = time.perf_counter() - begin
    return forward / 200 * 1e6, backward / 200 * 1e6


def run(copy: float) -> list[dict[str, Any]]:
    """Print and return all times; `copy` in bytes a microsecond."""
    # Backward is run more than once over one graph.
    functorch_config.donated_buffer = False
    times(copy)
    fused_times(copy)
    cpu_times()
    return rows
