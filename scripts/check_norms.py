"""LayerNorm and RMSNorm on a GPU: correctness first, then times; with --tune, tiles instead.

    python scripts/check_norms.py [--json FILE] [--tune [{forward,backward,fused} ...]]

Exits non-zero if a check fails. Times are medians with a cold L2 cache; a percentage is the traffic
that the operation needs at least, as a part of what a plain copy moves in that time.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch
import triton
from checks import check, failures, guarded, rows
from time_norms import copy_speed, operands, run, slot
from torch import Tensor, nn
from torch.nn import functional as F

import fp8patch
from fp8patch import numerics
from fp8patch.modules import norm as norms
from fp8patch.modules.norm_function import Normalize, NormSpec
from fp8patch.ops import norm_quantize as fused
from fp8patch.ops.quantize import quantize

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BARS = {BF16: 53.0, FP16: 69.0, FP32: 110.0}
EPS = 1e-5
CHECKED = [(1, 16), (5, 48), (197, 768), (33, 1000), (12288, 1024), (65, 16384), (7, 32768)]


# -- correctness ----------------------------------------------------------------------------------


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


class Block(nn.Module):
    """Two norms, each with GEMMs that read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(256), nn.RMSNorm(256, 1e-6)
        self.q, self.k, self.up, self.down = (nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        x = x + self.q(h) * torch.sigmoid(self.k(h))
        return x + self.down(torch.relu(self.up(self.second(x))))


def a_block_trains_as_with_casts_of_its_own() -> None:
    """Ten steps with the norms' casts and ten without: outputs, gradients, what the slots saw."""
    made = norms.cast_for_reader
    results = []
    for fused_casts in (True, False):
        norms.cast_for_reader = made if fused_casts else lambda *args: None
        torch.manual_seed(0)
        model = fp8patch.convert_model(Block().cuda(), include=("*",))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(10):
            torch.manual_seed(step)
            x = torch.randn(4, 100, 256, device="cuda") * (step + 1)
            with torch.autocast("cuda", BF16), fp8patch.autocast(backend="fp8"):
                y = model(x)
            optimizer.zero_grad()
            y.float().square().mean().backward()
            optimizer.step()
        slots = [state.history for _, state in model._fp8_bank.state()]
        results.append([y.detach(), *(p.grad for p in model.parameters()), *slots])
        noted = model.first._fp8_ready, model.second._fp8_ready
        used = all(n is not None and (n.spec[1] is not None) == fused_casts for n in noted)
        check(f"short way, casts by norms {fused_casts}", used, "as noted")
    norms.cast_for_reader = made
    db = [numerics.sqnr(a, b) for a, b in zip(*results, strict=True)]
    check("a block, with and without", min(db) > 25, f"at least {min(db):.1f} dB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", nargs="*", choices=("forward", "backward", "fused"))
    options = parser.parse_args()
    torch.manual_seed(0)
    begin = time.perf_counter()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    copy = copy_speed()
    print(f"copy {copy / 1e3:.0f} GB/s")
    if options.tune is not None:
        from tune_norms import tune

        rows.extend(tune(copy, options.tune))
    else:
        for group in (
            norms_are_near_fp64,
            the_fused_cast_is_the_cast_of_what_was_written,
            modules_return_the_stock_dtype,
            a_block_trains_as_with_casts_of_its_own,
        ):
            guarded(group)
        guarded(lambda: rows.extend(run(copy)))
    print(f"{len(failures)} failures; {time.perf_counter() - begin:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
