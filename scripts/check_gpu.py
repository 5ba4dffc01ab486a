"""Everything that needs a GPU, in one run: correctness first, then times, then one table.

    python scripts/check_gpu.py [--json FILE]

Exits non-zero if a check fails. Times are of the eager path: the public scaled GEMM of PyTorch and
plain PyTorch casts (no kernels of ours yet): they are there to be beaten, not to be quoted.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checks import check, failures, guarded, rows
from torch import nn

import fp8patch
from fp8patch import numerics
from fp8patch.ops.gemm import fp8_gemm
from fp8patch.ops.quantize import quantize, quantize_rowwise

RECIPES = ("delayed", "current", "rowwise", "rowwise_bf16_wgrad")
SHAPES = [(1, 64, 32), (2, 64, 64), (13, 128, 48), (197, 768, 3072), (2048, 4096, 4096)]


def casts_equal_the_oracle() -> None:
    """Casts on the GPU equal the same functions on the CPU, bit for bit, every BF16 pattern too."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    inputs = {
        "bf16 patterns": patterns.reshape(256, 256),
        "fp16 patterns": patterns.view(torch.float16).reshape(256, 256),
        "fp32 random": torch.randn(197, 333) * torch.logspace(-12, 6, 333),
    }
    for name, x in inputs.items():
        for e5m2 in (False, True):
            for rowwise in (False, True):
                on_cpu, on_gpu = (_cast(x.to(d), e5m2, rowwise) for d in ("cpu", "cuda"))
                same = all(_same(a, b.cpu()) for a, b in zip(on_cpu, on_gpu, strict=True))
                kind = f"{'e5m2' if e5m2 else 'e4m3'}{' rowwise' if rowwise else ''}"
                check(f"cast {kind}, {name}", same, "bitwise equal to the CPU oracle")


def _cast(x: torch.Tensor, e5m2: bool, rowwise: bool) -> list[torch.Tensor]:
    amax = torch.zeros((), device=x.device)
    counts = torch.zeros(4, dtype=torch.int64, device=x.device)
    if rowwise:
        result = quantize_rowwise(x, amax, counts, 448.0, e5m2, True, True)
    else:
        scale = torch.tensor(3.7, device=x.device)
        result = quantize(x, scale, amax, counts, 448.0, e5m2, False, True, True)[:3]
    return [*result, amax, counts]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype in (numerics.E4M3, numerics.E5M2):
        nan = a.float().isnan() & b.float().isnan()
        return bool(((a.view(torch.uint8) == b.view(torch.uint8)) | nan).all())
    return bool(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))


def gemms_equal_the_emulation() -> None:
    """The scaled GEMM against FP32 arithmetic on the same FP8 operands, fast and precise."""
    for m, k, n in SHAPES:
        for rowwise in (False, True):
            for fast in (True, False):
                a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
                qa, qb = (_operand(x, rowwise) for x in (a, b))
                args = (qa[0], qb[0], qa[1], qb[1], torch.bfloat16)
                got = fp8_gemm(*args, fast_accum=fast, emulate=False)
                want = fp8_gemm(*args[:4], torch.float32, fast_accum=fast, emulate=True)
                db = numerics.sqnr(want, got)
                kind = f"{'rowwise' if rowwise else 'tensor'}, {'fast' if fast else 'precise'}"
                check(f"gemm {m}x{k}x{n} {kind}", db >= (48 if fast else 52), f"{db:.1f} dB")


def _operand(x: torch.Tensor, rowwise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    amax = torch.zeros((), device=x.device)
    counts = torch.zeros(4, dtype=torch.int64, device=x.device)
    if rowwise:
        q, _, inv, _ = quantize_rowwise(x, amax, counts, 448.0, False, False, False)
        return q, inv
    scale = torch.ones((), device=x.device)
    q, _, inv, _ = quantize(x, scale, amax, counts, 448.0, False, True, False, False)
    return q, inv


def linears_against_bf16() -> None:
    """Forward and backward of a converted layer against BF16, and against its own emulation."""
    for recipe in RECIPES:
        for m, k, n in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                results = {b: _linear(recipe, m, k, n, dtype, b) for b in ("fp8", "emulate", "off")}
                for i, name in enumerate(("fprop", "dgrad", "wgrad")):
                    reference = numerics.sqnr(results["off"][i], results["fp8"][i])
                    oracle = numerics.sqnr(results["emulate"][i], results["fp8"][i])
                    bar = 27.5 if name == "fprop" else 24.0
                    ok = reference >= bar and oracle >= 45
                    where = f"{recipe} {name} {m}x{k}x{n} {str(dtype)[6:]}"
                    check(where, ok, f"{reference:.1f} dB to bf16, {oracle:.1f} dB to emulation")


def _linear(
    recipe: str, m: int, k: int, n: int, dtype: torch.dtype, backend: Any
) -> list[torch.Tensor]:
    torch.manual_seed(m + k + n)
    layer = nn.Linear(k, n, device="cuda", dtype=dtype)
    model = fp8patch.convert_model(nn.Sequential(layer), recipe, include=("*",))
    x = torch.randn(m, k, device="cuda", dtype=dtype, requires_grad=True)
    grad = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast(backend=backend):
        y = model(x)
    y.backward(grad)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert x.grad.dtype == dtype
    assert layer.weight.grad.dtype == dtype
    return [y.detach(), x.grad, layer.weight.grad]


def odd_calls() -> None:
    """What the hardware refuses unless somebody pads, converts or skips: all must just run."""
    cases: dict[str, dict[str, Any]] = {
        "fp16 autocast": {"autocast": torch.float16},
        "no autocast, bf16 model": {"dtype": torch.bfloat16, "autocast": None},
        "no autocast, fp32 model": {"autocast": None},
        "misaligned, padded": {"recipe": fp8patch.Recipe(misaligned="pad"), "k": 72, "n": 101},
        "bf16 fprop": {"recipe": fp8patch.Recipe(fprop="bf16")},
        "bf16 dgrad": {"recipe": fp8patch.Recipe(dgrad="bf16")},
        "bf16 wgrad": {"recipe": fp8patch.Recipe(wgrad="bf16")},
        "e4m3 gradients": {"recipe": fp8patch.Recipe(fp8_format="e4m3")},
        "frozen weight": {"train_weight": False},
        "frozen input": {"train_input": False},
        "empty batch": {"m": 0},
        "expanded gradient": {"expand": True},
    }
    for name, case in cases.items():
        by_backend = [_odd(backend, **case) for backend in ("fp8", "emulate")]
        worst = min(
            numerics.sqnr(b, a) if b.numel() else float("inf")
            for a, b in zip(*by_backend, strict=True)
        )
        check(f"odd: {name}", worst >= 45, f"{worst:.1f} dB to emulation at worst")


def _odd(
    backend: Any,
    *,
    m: int = 33,
    k: int = 64,
    n: int = 96,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = torch.bfloat16,
    recipe: Any = None,
    train_weight: bool = True,
    train_input: bool = True,
    expand: bool = False,
) -> list[torch.Tensor]:
    torch.manual_seed(5)
    layer = nn.Linear(k, n, device="cuda", dtype=dtype)
    layer.weight.requires_grad_(train_weight)
    fp8patch.convert_model(nn.Sequential(layer), recipe, include=("*",))
    x = torch.randn(3, m, k, device="cuda", dtype=dtype, requires_grad=train_input)
    region = torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None)
    with region, fp8patch.autocast(backend=backend):
        y = layer(x)
    grad = torch.randn(1 if expand else m, n, device="cuda", dtype=y.dtype).expand(3, m, n)
    y.backward(grad)
    tensors = [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]
    return [t for t in tensors if t is not None]


def backends() -> None:
    """The hardware rule on a machine that has FP8."""
    model = nn.Sequential(nn.Linear(64, 64, device="cuda"))
    x = torch.randn(16, 64, device="cuda")
    with torch.no_grad():
        stock = model(x)
        with torch.autocast("cuda", torch.bfloat16):
            bf16 = model(x)
        fp8patch.convert_model(model)
        results = {}
        for backend in ("auto", "fp8", "emulate", "bf16", "off"):
            with fp8patch.autocast(backend=backend):
                results[backend] = model(x)
    check("backend off", torch.equal(results["off"], stock), "equals the stock model")
    check("backend bf16", torch.equal(results["bf16"], bf16), "equals BF16 autocast")
    check("backend auto", torch.equal(results["auto"], results["fp8"]), "is fp8 here")
    close = numerics.sqnr(results["emulate"], results["fp8"])
    check("backend emulate", close > 45, f"{close:.1f} dB to fp8")
    on_cpu = model.cpu()
    try:
        with fp8patch.autocast(backend="fp8"):
            on_cpu(x.cpu())
    except fp8patch.HardwareError as error:
        check("backend fp8, module on the CPU", True, str(error))
    else:
        check("backend fp8, module on the CPU", False, "was not refused")


def models() -> dict[str, nn.Module]:
    """Small models of the three families: Linear and RMSNorm, LayerNorm, Conv1D."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    llama = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    bert = BertConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    gpt2 = GPT2Config(
        vocab_size=512, n_embd=256, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    made: dict[str, nn.Module] = {}
    for name, build in (
        ("llama", lambda: LlamaForCausalLM(llama)),
        ("bert", lambda: BertForMaskedLM(bert)),
        ("gpt2", lambda: GPT2LMHeadModel(gpt2)),
    ):
        torch.manual_seed(0)
        made[name] = build().cuda()
    return made


def training_follows_bf16() -> None:
    """Forty steps on arithmetic sequences: FP8, its emulation and BF16 end at one loss."""
    finals: dict[str, dict[str, float]] = {}
    for backend in ("bf16", "fp8", "emulate"):
        for name, model in models().items():
            losses = _train(model, backend)
            finals.setdefault(name, {})[backend] = sum(losses[-5:]) / 5
    for name, by_backend in finals.items():
        apart = abs(by_backend["fp8"] - by_backend["bf16"])
        shown = ", ".join(f"{k} {v:.4f}" for k, v in by_backend.items())
        check(f"training {name}", apart < 0.1, f"mean of the last 5 losses: {shown}")


def _train(model: nn.Module, backend: Any, steps: int = 40) -> list[float]:
    fp8patch.convert_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator(device="cuda").manual_seed(1)
    losses = []
    for _ in range(steps):
        start = torch.randint(0, 512, (16, 1), device="cuda", generator=generator)
        step = torch.randint(1, 8, (16, 1), device="cuda", generator=generator)
        ids = (start + step * torch.arange(61, device="cuda")) % 512
        with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast(backend=backend):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reload_is_bitwise() -> None:
    """Save, load on the GPU, and compare logits bit for bit; move to the CPU and back."""
    import tempfile

    for name, model in models().items():
        _train(model, "fp8", steps=5)
        ids = torch.arange(48, device="cuda").reshape(2, 24)
        with tempfile.TemporaryDirectory() as directory:
            fp8patch.save(model, directory)
            again = fp8patch.load(directory, device="cuda", backend="fp8")
        logits = [_logits(m, ids) for m in (model, again)]
        check(f"reload {name}", torch.equal(*logits), "logits after save and load")
        moved = _logits(model.cpu().cuda(), ids)
        check(f"moves {name}", torch.equal(moved, logits[0]), "logits after .cpu().cuda()")


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16), fp8patch.autocast(backend="fp8"):
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def checkpointing_recomputes_in_fp8() -> None:
    """Gradients with checkpointing, reentrant and not, equal those without, bit for bit."""
    for reentrant in (None, False, True):
        model = models()["llama"]
        fp8patch.convert_model(model)
        if reentrant is not None:
            kwargs = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        model.train()
        ids = torch.arange(96, device="cuda").reshape(2, 48)
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast(backend="fp8"):
                model(input_ids=ids, labels=ids).loss.backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        if reentrant is None:
            expected = grads
        else:
            label = "reentrant" if reentrant else "not reentrant"
            same = torch.equal(grads, expected)
            check(f"checkpointing, {label}", same, "gradients equal those without it")


def no_sync_per_call() -> None:
    """After the first steps a training step reads nothing back from the device."""
    model = models()["llama"]
    _train(model, "fp8", steps=3)
    ids = torch.arange(96, device="cuda").reshape(2, 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(3):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast(backend="fp8"):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    check("no sync", True, "forward, backward, step and update run without one")


def eager_times() -> None:
    """Forward and backward of one layer, FP8 against BF16: median of 20, milliseconds."""
    for m, k, n in ((8192, 1024, 4096), (8192, 4096, 4096), (8192, 4096, 14336)):
        times = {}
        for backend in ("bf16", "fp8"):
            model = fp8patch.convert_model(nn.Sequential(nn.Linear(k, n, device="cuda")))
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            grad = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
            times[backend] = _median_ms(lambda m=model, b=backend, x=x, g=grad: _once(m, b, x, g))
        ratio = times["bf16"] / times["fp8"]
        shown = f"bf16 {times['bf16']:.3f} ms, fp8 {times['fp8']:.3f} ms, {ratio:.2f}x"
        check(f"time {m}x{k}x{n}", True, shown)


def _once(model: nn.Module, backend: Any, x: torch.Tensor, grad: torch.Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast(backend=backend):
        y = model(x)
    y.backward(grad)


def _median_ms(function: Callable[[], None], repeats: int = 20) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


GROUPS = (
    casts_equal_the_oracle,
    gemms_equal_the_emulation,
    linears_against_bf16,
    odd_calls,
    backends,
    training_follows_bf16,
    reload_is_bitwise,
    checkpointing_recomputes_in_fp8,
    no_sync_per_call,
    eager_times,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--only", nargs="*", default=[], help="names of groups")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {platform.python_version()}")
    for group in GROUPS:
        if not options.only or group.__name__ in options.only:
            began = time.perf_counter()
            guarded(group)
            print(f"     {group.__name__}: {time.perf_counter() - began:.1f} s", flush=True)
    if options.json:
        device = torch.cuda.get_device_name()
        facts = {"device": device, "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1))
    print(f"{len(rows) - len(failures)} passed, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
