"""The tiles of the norm kernels: the best of each kernel, by shape and dtype.

`scripts/check_norms.py --tune` runs it. Every tile is compiled first, by as many processes as there
are cores, into Triton's cache on disk: one after the other that takes a quarter of an hour.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import triton

from fp8patch.ops.triton import norm as kernels
from fp8patch.ops.triton import norm_quantize as fused_kernels

FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(12288, 1024), (8192, 4096), (32768, 1280)]
DTYPES = [(FP32, FP32), (FP32, BF16), (BF16, BF16)]
_Job = tuple[str, tuple[int, int], torch.dtype, torch.dtype, tuple[int, ...]]


def jobs() -> list[_Job]:
    """(kernel, shape, dtype of x, dtype of y, tile)"""
    found: list[_Job] = []
    for shape, (dtype, out) in itertools.product(SHAPES, DTYPES):
        width = kernels.width_of(shape[1])
        sizes = sorted({max(width, n) for n in (2048, 4096, 8192)})
        tiles: dict[str, list[tuple[int, ...]]] = {
            "forward": list(itertools.product(sizes, (2, 4, 8))),
            "backward": list(itertools.product(sizes[:2], (4, 8), (1, 2, 4, 8))),
            "fused": [
                tile
                for tile in itertools.product((16, 32, 64), (64, 128, 256, 512), (4, 8))
                if 2048 <= tile[0] * tile[1] <= 8192
            ],
        }
        found += [(name, shape, dtype, out, t) for name, many in tiles.items() for t in many]
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
    counts = torch.zeros(4, dtype=torch.int64, device="cuda")
    given = *norm, out, scale, amax, counts, True, True
    return lambda: fused_kernels.norm_quantize(*given, tile=fused_kernels.Tile(*tile))


def compiled(job: _Job) -> str:
    """ "" once the kernel of a job is in the cache on disk, or why it can't be."""
    try:
        prepared(job)()
        torch.cuda.synchronize()
    except Exception as error:  # too much for the registers or the shared memory
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def tune(copy: float) -> list[dict[str, Any]]:
    """Print and return the best tiles; `copy` in bytes a microsecond."""
    todo = jobs()
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 14), get_context("spawn")) as pool:
        errors = list(pool.map(compiled, todo, chunksize=4))
    print(f"{len(todo)} tiles compiled, {sum(map(bool, errors))} failed", flush=True)
    found: dict[Any, list[tuple[float, tuple[int, ...]]]] = {}
    for job, error in zip(todo, errors, strict=True):
        if error:
            print(f"{job}: {error}")
            continue
        run = prepared(job)
        ms = triton.testing.do_bench(run, warmup=5, rep=30, return_mode="median")
        found.setdefault(job[:4], []).append((float(ms) * 1e3, job[4]))
    rows = []
    for (name, shape, dtype, out), timed in found.items():
        per_element = {
            "forward": dtype.itemsize + out.itemsize,
            "backward": 2 * dtype.itemsize + out.itemsize,
            "fused": dtype.itemsize + out.itemsize + 2,
        }[name]
        moved = shape[0] * shape[1] * per_element
        best = sorted(timed)[:6]
        where = f"{name} {shape[0]}x{shape[1]} {str(dtype)[6:]} -> {str(out)[6:]}"
        shown = "  ".join(f"{t}: {us:.1f} us {moved / us / copy:.0%}" for us, t in best[:4])
        rows.append({"tune": where, "best": best})
        print(f"{where:42s} {shown}", flush=True)
    return rows
