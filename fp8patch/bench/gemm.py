"""Time of the GEMMs and casts of one Linear, by shape: what the plan's predictions rest on.

On a GPU each operation is captured into one graph, over several sets of operands that together
are much larger than the L2 cache, so that neither launches nor a warm cache are in the figures.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.bench.facts import commit, facts
from fp8patch.ops.gemm import fp8_gemm
from fp8patch.ops.quantize import quantize

__all__ = ["OPERATIONS", "SHAPES", "measure", "text"]

Shape = tuple[int, int, int]

# M tokens, N out_features, K in_features: of the named workloads, and two between.
SHAPES: tuple[Shape, ...] = (
    (4096, 768, 768),
    (4096, 3072, 768),
    (4096, 768, 3072),
    (12288, 1024, 1024),
    (12288, 4096, 1024),
    (12288, 1024, 4096),
    (25216, 3840, 1280),
    (25216, 5120, 1280),
    (8192, 2048, 2048),
    (8192, 1024, 4096),
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (8192, 16384, 4096),
)
_ROTATED_BYTES = 256 << 20
_MOST_SETS = 24
_REPLAYS = 5
_E4M3_MAX, _E5M2_MAX = 448.0, 57344.0


@dataclass(frozen=True, slots=True)
class _Operation:
    """`run(operands)` is timed; `flops` and `moved` bytes come from M, N, K."""

    run: Callable[[dict[str, Tensor]], Any]
    flops: Callable[[int, int, int], float]
    moved: Callable[[int, int, int], float]


def _gemm_flops(m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k


def _none(m: int, n: int, k: int) -> float:
    return 0.0


def _fp8(
    x: dict[str, Tensor], a: str, b: str, dtype: torch.dtype = torch.bfloat16, fast: bool = False
) -> Tensor:
    emulate = not x[a].is_cuda
    return fp8_gemm(x[a], x[b], x["one"], x["one"], dtype, fast_accum=fast, emulate=emulate)


def _quantize(x: dict[str, Tensor], name: str, e5m2: bool = False) -> Any:
    limit = _E5M2_MAX if e5m2 else _E4M3_MAX
    return quantize(x[name], x["one"], x["amax"], x["counts"], limit, e5m2, False, True, True)


# The weight is FP32 and gets an FP32 gradient, as in a stock script under autocast.
OPERATIONS: dict[str, _Operation] = {
    "bf16_fprop": _Operation(
        lambda x: x["input"] @ x["weight_bf16"].t(),
        _gemm_flops,
        lambda m, n, k: 2 * (m * k + n * k + m * n),
    ),
    "bf16_dgrad": _Operation(
        lambda x: x["grad"] @ x["weight_bf16"],
        _gemm_flops,
        lambda m, n, k: 2 * (m * k + n * k + m * n),
    ),
    "bf16_wgrad": _Operation(
        lambda x: x["grad"].t() @ x["input"],
        _gemm_flops,
        lambda m, n, k: 2 * (m * k + n * k + m * n),
    ),
    "fp8_fprop": _Operation(
        lambda x: _fp8(x, "input_fp8", "weight_fp8", fast=True),
        _gemm_flops,
        lambda m, n, k: m * k + n * k + 2 * m * n,
    ),
    "fp8_dgrad": _Operation(
        lambda x: _fp8(x, "grad_fp8", "weight_fp8_t"),
        _gemm_flops,
        lambda m, n, k: m * n + n * k + 2 * m * k,
    ),
    "fp8_wgrad": _Operation(
        lambda x: _fp8(x, "grad_fp8_t", "input_fp8_t", torch.float32),
        _gemm_flops,
        lambda m, n, k: m * n + m * k + 4 * n * k,
    ),
    "cast_input": _Operation(lambda x: _quantize(x, "input"), _none, lambda m, n, k: 4 * m * k),
    "cast_grad": _Operation(lambda x: _quantize(x, "grad", True), _none, lambda m, n, k: 4 * m * n),
    "cast_weight": _Operation(lambda x: _quantize(x, "weight"), _none, lambda m, n, k: 6 * n * k),
    "weight_to_bf16": _Operation(
        lambda x: x["weight"].to(torch.bfloat16), _none, lambda m, n, k: 6 * n * k
    ),
    "copy": _Operation(
        lambda x: torch.empty_like(x["input"]).copy_(x["input"]), _none, lambda m, n, k: 4 * m * k
    ),
}


def measure(
    shapes: Sequence[Shape] = SHAPES,
    device: str = "cuda",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Microseconds of every operation at every shape; JSON-safe.

    Returns:
        What it was measured with, and `rows`: `op`, `m`, `n`, `k`, `us`, `tflops`, `tbps`.
    """
    rows = []
    for m, n, k in shapes:
        say(f"{m} x {n} x {k}")
        operands = _operands(m, n, k, device)
        for name, operation in OPERATIONS.items():
            seconds = _seconds(operation.run, operands, device)
            rows.append(
                {
                    "op": name,
                    "m": m,
                    "n": n,
                    "k": k,
                    "us": 1e6 * seconds,
                    "tflops": operation.flops(m, n, k) / seconds / 1e12,
                    "tbps": operation.moved(m, n, k) / seconds / 1e12,
                }
            )
    date = time.strftime("%Y-%m-%d")
    return {**facts(device), "commit": commit(), "date": date, "rows": rows}


def _operands(m: int, n: int, k: int, device: str) -> list[dict[str, Tensor]]:
    """Sets of everything that an operation may take, enough of them to leave the cache behind."""
    sets = 1
    if device == "cuda":
        smallest = 2 * min(m * k, m * n, n * k)
        sets = max(2, min(_MOST_SETS, _ROTATED_BYTES // smallest))
    return [_one_set(m, n, k, device) for _ in range(sets)]


def _one_set(m: int, n: int, k: int, device: str) -> dict[str, Tensor]:
    x: dict[str, Tensor] = {
        "input": torch.randn(m, k, device=device, dtype=torch.bfloat16),
        "grad": torch.randn(m, n, device=device, dtype=torch.bfloat16),
        "weight": torch.randn(n, k, device=device),
        "one": torch.ones((), device=device),
        "amax": torch.zeros((), device=device),
        "counts": torch.zeros(4, dtype=torch.int64, device=device),
    }
    x["weight_bf16"] = x["weight"].to(torch.bfloat16)
    for name in ("input", "grad", "weight"):
        values = x[name].float()
        rows = numerics.quantize(
            values, x["one"], numerics.E5M2 if name == "grad" else numerics.E4M3
        )
        x[f"{name}_fp8"] = rows.contiguous()
        columns = rows.view(torch.uint8).t().contiguous()
        x[f"{name}_fp8_t"] = columns.view(rows.dtype)
    return x


def _seconds(
    run: Callable[[dict[str, Tensor]], Any], operands: list[dict[str, Tensor]], device: str
) -> float:
    for each in operands[:2]:
        run(each)
    if device != "cuda":
        began = time.perf_counter()
        run(operands[0])
        return time.perf_counter() - began
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in operands:
            run(each)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    taken: list[float] = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))
    return taken[len(taken) // 2] / 1e3 / len(operands)


def text(found: dict[str, Any]) -> str:
    """A Markdown table: a row a shape, microseconds; and what it was measured with."""
    lines = [
        "| M x N x K | " + " | ".join(OPERATIONS) + " |",
        "|---|" + "---:|" * len(OPERATIONS),
    ]
    shapes = list(dict.fromkeys((row["m"], row["n"], row["k"]) for row in found["rows"]))
    by_shape = {(r["m"], r["n"], r["k"], r["op"]): r["us"] for r in found["rows"]}
    for shape in shapes:
        cells = [f"{by_shape[*shape, op]:.1f}" for op in OPERATIONS]
        lines.append(f"| {' x '.join(map(str, shape))} | " + " | ".join(cells) + " |")
    what = f"Microseconds. {found['gpu']}, torch {found['torch']}, commit {found['commit']}"
    return "\n".join([*lines, "", what])
