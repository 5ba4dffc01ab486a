"""Find the tile of the cast kernel: achieved bandwidth by shape and tile, against a plain copy.

python scripts/tune_quantize.py
"""

import itertools

import torch
import triton

from fp8patch import numerics
from fp8patch.ops.triton.quantize import quantize

SHAPES = ((8192, 1024), (12288, 1024), (12288, 4096), (8192, 4096), (8192, 14336), (4096, 4096))
TILES = tuple(
    (bm, bk, warps)
    for bm, bk, warps in itertools.product((32, 64, 128, 256), (64, 128, 256), (4, 8))
    if 4096 <= bm * bk <= 32768
)


def milliseconds(function: object) -> float:
    """Median time of one call; do_bench flushes the L2 cache in between."""
    return float(triton.testing.do_bench(function, warmup=10, rep=60, return_mode="median"))


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e6
    print(f"copy {copy:.0f} GB/s")
    scale, amax = torch.tensor(3.0, device="cuda"), torch.zeros((), device="cuda")
    counts = torch.zeros(4, dtype=torch.int64, device="cuda")
    for dtype, (rows, cols) in itertools.product((torch.bfloat16, torch.float32), SHAPES):
        x = torch.randn(rows, cols, device="cuda").to(dtype)
        for transpose in (True, False):
            moved = x.numel() * (x.element_size() + (2 if transpose else 1))
            results = []
            for tile in TILES:
                ms = milliseconds(
                    lambda x=x, t=transpose, tile=tile: quantize(
                        x,
                        scale,
                        amax,
                        counts,
                        448.0,
                        numerics.E4M3,
                        live=False,
                        observe=True,
                        transpose=t,
                        tile=tile,
                    )
                )
                results.append((moved / ms / 1e6, ms * 1e3, tile))
            best = sorted(results, reverse=True)[:4]
            shown = "  ".join(f"{t}: {us:.1f}us {bw / copy:.0%}" for bw, us, t in best)
            name = f"{str(dtype)[6:]} {rows}x{cols} {'+t' if transpose else '  '}"
            print(f"{name:28s} {shown}", flush=True)


if __name__ == "__main__":
    main()
