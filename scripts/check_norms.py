"""LayerNorm and RMSNorm on a GPU: correctness first, then times; with --tune, tiles instead.

    python scripts/check_norms.py [--json FILE] [--tune]

Exits non-zero if a check fails. Times are medians with a cold L2 cache; a percentage is the traffic
that the operation needs at least, as a part of what a plain copy moves in that time.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import triton
from torch import Tensor, nn
from torch.nn import functional as F

import fp8patch
from fp8patch import numerics
from fp8patch.modules.norm_function import Normalize, NormSpec
from fp8patch.ops import norm as ops
from fp8patch.ops import norm_quantize as fused
from fp8patch.ops.quantize import quantize

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BARS = {BF16: 53.0, FP16: 69.0, FP32: 110.0}
EPS = 1e-5
CHECKED = [(1, 16), (5, 48), (197, 768), (33, 1000), (12288, 1024), (65, 16384), (7, 32768)]
TIMED = [(12288, 1024), (8192, 4096), (32768, 1280), (4096, 768)]
rows: list[dict[str, Any]] = []
failures: list[str] = []


def check(name: str, ok: bool, detail: str) -> None:
    """Note one result; a failure is counted and printed at once."""
    rows.append({"check": name, "ok": ok, "detail": detail})
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}", flush=True)
    if not ok:
        failures.append(name)


def guarded(function: Callable[[], None]) -> None:
    """Run one group; an exception is a failure of the group, not the end."""
    try:
        function()
    except Exception as error:
        check(function.__name__, False, f"{type(error).__name__}: {error}"[:600])


# -- correctness ----------------------------------------------------------------------------------


def operands(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> tuple[Any, ...]:
    """(x, weight, bias, grad)"""
    x = (torch.randn(shape, device="cuda") * 3 + 1).to(dtype)
    weight = torch.randn(shape[1], device="cuda") * 0.3 + (kind != "rms offset")
    bias = torch.randn(shape[1], device="cuda") * 0.1 if kind == "layer" else None
    return x, weight, bias, torch.randn(shape, device="cuda").to(dtype)


def stock(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    if kind == "layer":
        return F.layer_norm(x, x.shape[1:], weight, bias, EPS)
    return F.rms_norm(x, x.shape[1:], weight + 1 if kind == "rms offset" else weight, EPS)


def norms_are_near_fp64() -> None:
    """Forward and backward against torch's own norms in FP64, twice: the same bits each time."""
    for kind, shape in itertools.product(("layer", "rms", "rms offset"), CHECKED):
        for dtype, out in ((FP32, FP32), (FP32, BF16), (BF16, BF16), (BF16, FP32), (FP16, FP16)):
            x, weight, bias, grad = operands(shape, dtype, kind)
            exact = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
            y = stock(exact[0], exact[1], exact[2] if bias is not None else None, kind)
            y.backward(grad.to(out).double())
            want = [y.detach(), *(t.grad for t in exact)]
            got, again = (_ours(x, weight, bias, grad.to(out), kind, out) for _ in "ab")
            db = [numerics.sqnr(a, b.double()) for a, b in zip(want, got, strict=True)]
            ok = all(d >= BARS[t.dtype] for d, t in zip(db, got, strict=True))
            same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
            name = f"{kind} {shape[0]}x{shape[1]} {str(dtype)[6:]} -> {str(out)[6:]}"
            shown = ", ".join(f"{d:.1f}" for d in db)
            check(name, ok and same, f"{shown} dB{'' if same else '; NOT DETERMINISTIC'}")


def _ours(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, kind: str, out: torch.dtype
) -> list[Tensor]:
    given = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    spec = NormSpec(EPS, kind == "layer", kind == "rms offset", out)
    y = Normalize.apply(*[*given, None][:3], spec)
    y.backward(grad)
    return [y.detach(), *(t.grad for t in given)]


def slot(scale: float) -> tuple[Tensor, Tensor, Tensor]:
    device = "cuda"
    counts = torch.zeros(4, dtype=torch.int64, device=device)
    return torch.tensor(scale, device=device), torch.zeros((), device=device), counts


def the_fused_cast_is_the_cast_of_what_was_written() -> None:
    """Bit for bit: FP8, transpose, scale_inv, amax and counts; with values that clip and inf."""
    for kind, shape in itertools.product(("layer", "rms"), [*CHECKED[:6], (64, 96), (513, 4096)]):
        for dtype, out in ((FP32, FP32), (FP32, BF16), (BF16, BF16)):
            x, weight, bias, _ = operands(shape, dtype, kind)
            x[0, 3], x[-1, -1] = float("inf"), 1e30
            for scale, transpose in ((30.0, True), (400.0, True), (30.0, False)):
                a, b = slot(scale), slot(scale)
                found = fused.norm_quantize(
                    x, weight, bias, EPS, kind == "layer", False, out, *a, 448.0, True, transpose
                )
                want = quantize(found[0], *b, 448.0, False, False, True, transpose)
                pairs = zip((*want[:3], *b[1:]), (*found[3:], *a[1:]), strict=True)
                same = all(_same(p, q) for p, q in pairs)
                name = f"fused {kind} {shape[0]}x{shape[1]} {str(dtype)[6:]} -> {str(out)[6:]}"
                check(f"{name} scale {scale:g}{'' if transpose else ' -t'}", same, "bitwise")


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype == numerics.E4M3:
        nan = a.float().isnan() & b.float().isnan()
        return bool(((a.view(torch.uint8) == b.view(torch.uint8)) | nan).all())
    return bool(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))


def modules_return_the_stock_dtype() -> None:
    """Converted norms in a region, against their stock class, for every kind of call."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    made: tuple[nn.Module, ...] = (
        nn.LayerNorm(1024), nn.RMSNorm(1024, 1e-6), LlamaRMSNorm(1024), GemmaRMSNorm(1024),
        T5LayerNorm(1024),
    )  # fmt: skip
    for norm in made:
        model = nn.ModuleDict({"norm": norm, "up": nn.Linear(1024, 1024)}).cuda()
        for weights, dtype in itertools.product((FP32, BF16), (FP32, BF16)):
            model.to(weights)
            x = torch.randn(64, 1024, device="cuda", dtype=dtype)
            for autocast in (True, False):
                with torch.autocast("cuda", BF16, enabled=autocast):
                    try:
                        want = norm(x)
                    except RuntimeError:
                        continue
                    fp8patch.convert_model(model, include=("*",))
                    with fp8patch.autocast(backend="fp8"):
                        got = norm(x)
                    fp8patch.revert_model(model)
                ok = got.dtype == want.dtype and numerics.sqnr(want.detach(), got.detach()) > 44
                case = f"w {str(weights)[6:]} x {str(dtype)[6:]} autocast {autocast}"
                check(f"{type(norm).__name__} {case}", ok, f"{str(got.dtype)[6:]}")


# -- times ----------------------------------------------------------------------------------------


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    # Backward is run more than once over one graph.
    functorch_config.donated_buffer = False
    torch.manual_seed(0)
    begin = time.perf_counter()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    copy = copy_speed()
    print(f"copy {copy / 1e3:.0f} GB/s")
    if options.tune:
        from tune_norms import tune

        rows.extend(tune(copy))
    else:
        for group in (
            norms_are_near_fp64,
            the_fused_cast_is_the_cast_of_what_was_written,
            modules_return_the_stock_dtype,
        ):
            guarded(group)
        for timing in (lambda: times(copy), lambda: fused_times(copy), cpu_times):
            guarded(timing)
    print(f"{len(failures)} failures; {time.perf_counter() - begin:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
