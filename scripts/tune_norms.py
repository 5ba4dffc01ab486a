"""The tiles of the norm kernels: the best of each kernel, by shape and dtype.

`scripts/check_norms.py --tune [KERNEL ...]` runs it. Every tile is compiled first, by as many
processes as there are cores, into Triton's cache on disk: one after the other that takes minutes.
Beside the fused kernel there is the pair that it stands for: the norm, then the cast.
"""

import itertools
import os
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import triton

from fp8patch.ops.triton import norm as kernels
from fp8patch.ops.triton import norm_quantize as fused_kernels
from fp8patch.ops.triton.quantize import quantize

FP32, BF16 = torch.float32, torch.bfloat16
KERNELS = ("forward", "backward", "fused")
# (shape, dtype of x, dtype of y)
CASES = [
    ((12288, 1024), BF16, BF16),
    ((12288, 1024), FP32, BF16),
    ((25216, 1280), FP32, BF16),
    ((4096, 768), FP32, BF16),
    ((8192, 4096), BF16, BF16),
    ((4096, 8192), BF16, BF16),
]
# Programs of 2, 4, 8 and 16 warps, with 16 or 32 values a thread.
FUSED = [
    (16, 128, 2), (16, 128, 4), (16, 256, 4), (32, 128, 4), (16, 256, 8), (32, 128, 8),
    (16, 512, 8), (32, 256, 8), (16, 1024, 16), (32, 512, 16),
]  # fmt: skip
_Job = tuple[str, tuple[int, int], torch.dtype, torch.dtype, tuple[Any, ...]]


def jobs(names: Collection[str]) -> list[_Job]:
    """(kernel, shape, dtype of x, dtype of y, tile) of the kernels `names`."""
    found: list[_Job] = []
    for shape, dtype, out in CASES:
        width = kernels.width_of(shape[1])
        sizes = sorted({max(width, n) for n in (2048, 4096, 8192)})
        tiles: dict[str, list[tuple[Any, ...]]] = {
            "forward": list(itertools.product(sizes, (2, 4, 8))),
            "backward": list(itertools.product(sizes[:2], (4, 8), (1, 2, 4, 8))),
            "fused": [t for t in FUSED if t[1] <= 256 or shape[1] % t[1] == 0],
        }
        found += [(name, shape, dtype, out, t) for name in names for t in tiles[name]]
        if "fused" in names:
            found.append(("pair", shape, dtype, out, ()))
    return found


def prepared(job: _Job) -> Callable[[], object]:
    """What to call for one job."""
    name, shape, dtype, out, tile = job
    x = torch.randn(shape, device="cuda").to(dtype)
    weight, bias = torch.rand(shape[1], device="cuda"), torch.rand(shape[1], device="cuda")
    norm = x, weight, bias, 1e-5, True, False
    if name == "forward":
        return lambda: kernels.norm(*norm, out, tile=kernels.Tile(*tile))
    if name == "backward":
        grad = torch.randn(shape, device="cuda").to(out)
        _, mean, rstd = kernels.norm(*norm, out)
        given = grad, x, weight, mean, rstd, True, False, True
        return lambda: kernels.norm_backward(*given, tile=kernels.Tile(*tile))
    scale, amax = torch.tensor(30.0, device="cuda"), torch.zeros((), device="cuda")
    slot = scale, amax, torch.zeros(4, dtype=torch.int64, device="cuda")
    if name == "fused":
        given = *norm, out, *slot, True, True
        return lambda: fused_kernels.norm_quantize(*given, tile=fused_kernels.Tile(*tile))
    how = {"live": False, "observe": True, "transpose": True, "column_sums": False}
    fp8 = torch.float8_e4m3fn
    return lambda: quantize(kernels.norm(*norm, out)[0], *slot, 448.0, fp8, **how)


def compiled(job: _Job) -> str:
    """ "" once the kernel of a job is in the cache on disk, or why it can't be."""
    try:
        prepared(job)()
        torch.cuda.synchronize()
    except Exception as error:  # too much for the registers or the shared memory
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def timed(todo: list[_Job]) -> dict[Any, list[tuple[float, tuple[Any, ...]]]]:
    """(microseconds, tile), by everything else of a job; the best one first."""
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 14), get_context("spawn")) as pool:
        errors = list(pool.map(compiled, todo))
    print(f"{len(todo)} tiles compiled, {sum(map(bool, errors))} failed", flush=True)
    found: dict[Any, list[tuple[float, tuple[Any, ...]]]] = {}
    for job, error in zip(todo, errors, strict=True):
        if error:
            print(f"{job}: {error}")
            continue
        run = prepared(job)
        ms = triton.testing.do_bench(run, warmup=5, rep=30, return_mode="median")
        found.setdefault(job[:4], []).append((float(ms) * 1e3, job[4]))
    return {key: sorted(times) for key, times in found.items()}


def tune(copy: float, names: Collection[str]) -> list[dict[str, Any]]:
    """Print and return the best tiles of the kernels `names`; `copy` in bytes a microsecond."""
    found = timed(jobs(names or KERNELS))
    rows = []
    for (name, shape, dtype, out), times in found.items():
        if name == "pair":
            continue
        per_element = {
            "forward": dtype.itemsize + out.itemsize,
            "backward": 2 * dtype.itemsize + out.itemsize,
            "fused": dtype.itemsize + out.itemsize + 2,
        }[name]
        moved = shape[0] * shape[1] * per_element
        where = f"{name} {shape[0]}x{shape[1]} {str(dtype)[6:]} -> {str(out)[6:]}"
        shown = [f"{tile}: {us:.1f} us {moved / us / copy:.0%}" for us, tile in times[:5]]
        row: dict[str, Any] = {"tune": where, "best": times}
        if name == "fused" and ("pair", shape, dtype, out) in found:
            row["pair_us"] = found["pair", shape, dtype, out][0][0]
            default = fused_kernels.tile_of(shape[1])
            now = [us for us, tile in times if fused_kernels.Tile(*tile) == default]
            shown.insert(0, f"PAIR {row['pair_us']:.1f} us, NOW {now[0] if now else 0:.1f} us |")
        rows.append(row)
        print(f"{where:42s} {'  '.join(shown)}", flush=True)
    return rows
