"""CPU microseconds of one Linear, forward and backward, where the GPU has next to nothing to do.

    python scripts/bench_launch.py [--json FILE] [--profile]

A chain of Linears (256 x 256, 32 tokens) in BF16, in FP8 by this package, and by Transformer
Engine and torchao (eager) where they are installed. Time until Python returns, median of the steps.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

LAYERS, WIDTH, TOKENS = 24, 256, 32
WARM_UP, STEPS = 8, 60

Context = Callable[[], AbstractContextManager[Any]]


def chain(bias: bool) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(LAYERS))).cuda()


def ours(bias: bool) -> tuple[nn.Module, Context]:
    import fp8patch

    return fp8patch.convert_model(chain(bias)), lambda: fp8patch.autocast(backend="fp8")


def transformer_engine(bias: bool) -> tuple[nn.Module, Context]:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    layers = [
        te.Linear(WIDTH, WIDTH, bias=bias, params_dtype=torch.float32, device="cuda")
        for _ in range(LAYERS)
    ]
    recipe = DelayedScaling()
    return nn.Sequential(*layers), lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def torchao(bias: bool) -> tuple[nn.Module, Context]:
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(chain(bias)), nullcontext


def bf16(bias: bool) -> tuple[nn.Module, Context]:
    return chain(bias), nullcontext


def measure(model: nn.Module, context: Context, profile: bool = False) -> dict[str, float]:
    """Microseconds a Linear: forward, backward, and a step's start and optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    x = torch.randn(TOKENS, WIDTH, device="cuda")
    times: list[tuple[float, float]] = []
    for step in range(WARM_UP + STEPS):
        torch.cuda.synchronize()
        with torch.autocast("cuda", torch.bfloat16), context():
            # Twice: the first forward of a step also casts weights and moves scales.
            model(x)
            torch.cuda.synchronize()
            started = time.perf_counter()
            output = model(x)
            forward = time.perf_counter() - started
        loss = output.float().sum()
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss.backward()
        backward = time.perf_counter() - started
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARM_UP:
            times.append((forward, backward))
    if profile:
        _profile(model, context, x)
    forward, backward = (statistics.median(t) * 1e6 / LAYERS for t in zip(*times, strict=True))
    return {"forward_us": forward, "backward_us": backward, "total_us": forward + backward}


def _profile(model: nn.Module, context: Context, x: torch.Tensor) -> None:
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    with torch.autocast("cuda", torch.bfloat16), context():
        model(x)
        profiler.enable()
        for _ in range(10):
            model(x)
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    profiler = cProfile.Profile()
    with torch.autocast("cuda", torch.bfloat16), context():
        loss = model(x).float().sum()
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        loss.backward()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="where our time goes")
    options = parser.parse_args()
    contenders = {"bf16": bf16, "fp8": ours, "te": transformer_engine, "torchao": torchao}
    rows = []
    for bias in (True, False):
        for name, build in contenders.items():
            try:
                model, context = build(bias)
                found = measure(model, context, options.profile and name == "fp8" and bias)
            except ImportError as error:
                print(f"{name}: {error}")
                continue
            rows.append({"contender": name, "bias": bias, **found})
            print(
                f"{name:8s} bias={bias!s:5s} " + " ".join(f"{k}={v:.1f}" for k, v in found.items())
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
