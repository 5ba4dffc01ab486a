"""Find the tiles of the cast kernels: achieved bandwidth by shape and tile, against a plain copy.

python scripts/tune_quantize.py [--quick | --sums | --gelu | --grads | --weights]

With --sums only the casts with column sums, by tile, from BF16 also by the tile of the kernel that
adds up, else by how many programs are aimed at; the time is that of both kernels. With --gelu only
those that compute GELU, or its gradient, first. With --grads only those that make an activation's
transpose along with its gradients, against the casts that they replace, in forward and backward
together. With --weights only many weights in a launch.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton

from fp8patch import numerics
from fp8patch.ops.activation_grads import GRADS
from fp8patch.ops.triton import activation_grads, column_sums, quantize_many
from fp8patch.ops.triton.packed import packs
from fp8patch.ops.triton.quantize import quantize

SHAPES = ((8192, 1024), (12288, 1024), (12288, 4096), (8192, 4096), (8192, 14336), (4096, 4096))
TILES = (
    (32, 64, 2),
    (32, 128, 2),
    (32, 128, 4),
    (64, 64, 2),
    (64, 64, 4),
    (64, 128, 4),
    (64, 128, 8),
    (128, 64, 4),
    (128, 64, 8),
    (128, 128, 8),
)

SUMMED = {
    torch.bfloat16: (
        (8192, 1024),
        (12288, 1024),
        (12288, 4096),
        (8192, 4096),
        (8192, 14336),
        (25728, 1280),
        (25728, 5120),
    ),
    torch.float32: ((12288, 1024), (12288, 4096)),
}
SUMMED_TILES = ((32, 64, 2), (32, 64, 4), (64, 64, 4), (16, 64, 1), (32, 128, 4))
PACKED_TILES = ((64, 64, 2), (128, 64, 4), (64, 64, 4), (64, 128, 4), (128, 128, 8))
ADDED_TILES = ((256, 8, 4), (256, 16, 8), (512, 8, 8), (128, 16, 4), (64, 32, 4))
FORMED = ((12288, 4096), (25216, 5120), (8192, 16384))
FORMED_TILES = ((64, 64, 4), (32, 64, 2), (32, 128, 4), (32, 64, 1))
FORMED_SUMS_TILES = ((32, 64, 4), (32, 64, 2), (16, 64, 1))
FORMED_PROGRAMS = (528, 660, 792, 1056, 2112, 1 << 20)
GRADS_TILES = ((32, 64, 4), (16, 64, 2), (32, 64, 2), (64, 64, 4))
GRADS_PROGRAMS = (264, 396, 528, 660, 1056)
GRADS_SHAPES = {
    "gelu": FORMED,
    "gelu_tanh": ((8192, 16384),),
    "silu_mul": ((8192, 14336),),
}
WEIGHTS = {
    "BERT-large": [(1024, 1024)] * 96 + [(4096, 1024), (1024, 4096)] * 24,
    "gpt-4096": [(4096, 4096)] * 4 + [(16384, 4096), (4096, 16384)],
}
PROGRAMS = (528, 792, 1056, 2112, 4224, 1 << 20)


def milliseconds(function: Callable[[], object]) -> float:
    """Median time of one call; do_bench flushes the L2 cache in between."""
    return float(triton.testing.do_bench(function, warmup=5, rep=30, return_mode="median"))


def copying(size: int) -> float:
    """GB/s of a copy that moves as many bytes: small tensors can't reach what large ones do."""
    source = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return size / milliseconds(lambda: target.copy_(source)) / 1e6


def moved(x: torch.Tensor, transpose: bool) -> int:
    """Bytes that a cast has to read and write."""
    return x.numel() * (x.element_size() + (2 if transpose else 1))


def tune_one(x: torch.Tensor, **flags: bool) -> None:
    """Print the best tiles for one cast."""
    scale, amax = torch.tensor(3.0, device="cuda"), torch.zeros((), device="cuda")
    counts = torch.zeros(4, dtype=torch.int64, device="cuda")
    size = moved(x, flags["transpose"])
    copy = copying(size)
    results = []
    for tile in TILES:

        def cast(tile: tuple[int, int, int] = tile) -> None:
            quantize(x, scale, amax, counts, 448.0, numerics.E4M3, live=False, tile=tile, **flags)

        ms = milliseconds(cast)
        results.append((size / ms / 1e6, ms * 1e3, tile))
    best = sorted(results, reverse=True)[:4]
    shown = "  ".join(f"{t}: {us:.1f}us {bw / copy:.0%}" for bw, us, t in best)
    on = "+".join(name for name, value in flags.items() if value)
    name = f"{str(x.dtype)[6:]} {tuple(x.shape)} {on}"
    print(f"{name}, copy {size / copy / 1e3:.1f}us: {shown}", flush=True)


def tune_sums(x: torch.Tensor) -> None:
    """Print all tiles and numbers of programs for one cast with column sums."""
    scale, amax = torch.tensor(3.0, device="cuda"), torch.tensor(100.0, device="cuda")
    counts = torch.zeros(4, dtype=torch.int64, device="cuda")
    size = moved(x, True)
    copy = copying(size)
    print(f"{str(x.dtype)[6:]} {tuple(x.shape)} copy {size / copy / 1e3:.1f}us", flush=True)

    def timed(sums: bool, tile: tuple[int, int, int] | None = None) -> str:
        flags = {"live": False, "observe": True, "transpose": True, "column_sums": sums}
        us = 1e3 * milliseconds(
            lambda: quantize(x, scale, amax, counts, 448.0, numerics.E4M3, tile=tile, **flags)
        )
        return f"{us:.1f}us {size / us / 1e3 / copy:.0%}"

    print(f"  without column sums: {timed(False)}")
    if packs(x.dtype, x.device, column_sums=True):
        added = column_sums.ADDED
        for tile in PACKED_TILES:
            shown = []
            for column_sums.ADDED in ADDED_TILES:
                shown.append(f"{column_sums.ADDED}: {timed(True, tile)}")
            print(f"  {tile} " + "  ".join(shown), flush=True)
        column_sums.ADDED = added
        return
    chosen = column_sums.PROGRAMS
    for tile in SUMMED_TILES:
        shown = []
        for column_sums.PROGRAMS in PROGRAMS:
            shown.append(f"{column_sums.PROGRAMS}: {timed(True, tile)}")
        print(f"  {tile} " + "  ".join(shown), flush=True)
    column_sums.PROGRAMS = chosen


def tune_gelu(x: torch.Tensor) -> None:
    """Print tiles for GELU and cast, and for its gradient and cast with column sums."""
    slot = torch.tensor(3.0, device="cuda"), torch.tensor(100.0, device="cuda")
    counts = torch.zeros(4, dtype=torch.int64, device="cuda")
    grad = torch.randn_like(x)
    forward = moved(x, True)
    # The gradient reads two tensors.
    sizes = [(size, copying(size)) for size in (forward, forward + 2 * x.numel())]

    def timed(form: str, back: bool, tile: tuple[int, int, int] | None = None) -> str:
        fp8 = numerics.E5M2 if back else numerics.E4M3
        flags = {"live": False, "observe": True, "transpose": True, "column_sums": back}
        more: dict[str, Any] = {"form": form, "y": grad, "tile": tile, **flags}
        ms = milliseconds(lambda: quantize(x, *slot, counts, 448.0, fp8, **more))
        size, copy = sizes[form.endswith("backward")]
        return f"{ms * 1e3:.1f}us {size / ms / 1e6 / copy:.0%}"

    print(f"bfloat16 {tuple(x.shape)}: casts alone {timed('', False)}, {timed('', True)}")
    for form, tiles in (("gelu", FORMED_TILES), ("gelu_tanh", FORMED_TILES[:1])):
        shown = [f"{tile}: {timed(form, False, tile)}" for tile in tiles]
        print(f"  {form} " + "  ".join(shown), flush=True)
    chosen = column_sums.PROGRAMS_FORMED
    backward = [("gelu_backward", tile) for tile in FORMED_SUMS_TILES]
    for form, tile in (*backward, ("gelu_tanh_backward", FORMED_SUMS_TILES[0])):
        shown = []
        for column_sums.PROGRAMS_FORMED in FORMED_PROGRAMS:
            shown.append(f"{column_sums.PROGRAMS_FORMED}: {timed(form, True, tile)}")
        print(f"  {form} {tile} " + "  ".join(shown), flush=True)
    column_sums.PROGRAMS_FORMED = chosen


def tune_grads(form: str, shape: tuple[int, int]) -> None:
    """Print tiles for an activation's gradients with its transpose, and what they replace."""
    x, y, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    gated = form == "silu_mul"
    slot = torch.tensor(3.0, device="cuda"), torch.tensor(100.0, device="cuda")
    place = *slot, torch.zeros(4, dtype=torch.int64, device="cuda")
    flags = {"live": False, "observe": True}

    def forward(transpose: bool) -> None:
        more: dict[str, Any] = {"form": form, "y": y, "transpose": transpose, **flags}
        quantize(x, *place, 448.0, numerics.E4M3, column_sums=False, **more)

    pointwise = torch.compile(GRADS[form], dynamic=False)

    def backward() -> None:
        more: dict[str, Any] = {"transpose": True, **flags}
        if not gated:
            more.update(form=f"{form}_backward", y=grad, column_sums=True)
            quantize(x, *place, 448.0, numerics.E5M2, **more)
            return
        for by in pointwise(x, y, grad):
            quantize(by, *place, 448.0, numerics.E5M2, column_sums=False, **more)

    def together(tile: tuple[int, int, int]) -> None:
        activation_grads.activation_grads(
            x, y if gated else None, grad, form, slot[0], [place] * (2 if gated else 1),
            numerics.E5M2, observe=True, column_sums=not gated, tile=tile,
        )  # fmt: skip

    parts = [1e3 * milliseconds(f) for f in (lambda: forward(True), lambda: forward(False))]
    before = 1e3 * milliseconds(backward)
    size = x.numel() * (11 if gated else 7)
    copy = copying(size)
    print(
        f"{form} {shape}: forward {parts[0]:.1f}us, without transpose {parts[1]:.1f}us; backward "
        f"{before:.1f}us; apart {parts[0] + before:.1f}us",
        flush=True,
    )
    chosen = activation_grads.PROGRAMS
    for tile in GRADS_TILES:
        shown = []
        for activation_grads.PROGRAMS in (chosen,) if gated else GRADS_PROGRAMS:
            us = 1e3 * milliseconds(lambda tile=tile: together(tile))
            share = size / us / 1e3 / copy
            name = f"{activation_grads.PROGRAMS}: "
            shown.append(f"{name}{us:.1f}us {share:.0%}, in all {us + parts[1]:.1f}us")
        print(f"  {tile} " + "  ".join(shown), flush=True)
    activation_grads.PROGRAMS = chosen


def tune_many(dtype: torch.dtype, name: str) -> None:
    """The same for all weights of a model in one launch."""
    jobs = []
    for rows, cols in WEIGHTS[name]:
        e4m3 = {"dtype": numerics.E4M3, "device": "cuda"}
        jobs.append(
            quantize_many.Job(
                torch.randn(rows, cols, device="cuda", dtype=dtype),
                torch.empty(rows, cols, **e4m3),
                torch.empty(cols, rows, **e4m3),
                torch.ones((), device="cuda"),
                torch.tensor(30.0, device="cuda"),
                torch.zeros((), device="cuda"),
                torch.zeros(4, dtype=torch.int64, device="cuda"),
            )
        )
    size = sum(moved(job.weight, True) for job in jobs)
    chosen, copy = (quantize_many.TILE, quantize_many.TILE_PACKED), copying(size)
    results = []
    for tile in TILES:
        quantize_many.TILE = quantize_many.TILE_PACKED = tile
        casts = quantize_many.ManyCasts(jobs)
        ms = milliseconds(lambda casts=casts: casts.run(448.0, live=False, observe=True))
        results.append((size / ms / 1e6, ms * 1e3, tile))
    quantize_many.TILE, quantize_many.TILE_PACKED = chosen
    shown = [f"{t}: {us:.1f}us {bw / copy:.0%}" for bw, us, t in sorted(results, reverse=True)[:5]]
    print(f"{name}'s weights in {dtype}, {size / 1e9:.2f} GB: " + "  ".join(shown), flush=True)


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    print(f"copy of 1 GB: {copying(1 << 30):.0f} GB/s")
    if "--sums" in sys.argv:
        for dtype, summed in SUMMED.items():
            for shape in summed:
                tune_sums(torch.randn(shape, device="cuda").to(dtype))
        return
    if "--gelu" in sys.argv:
        for shape in FORMED:
            tune_gelu(torch.randn(shape, device="cuda", dtype=torch.bfloat16))
        return
    if "--grads" in sys.argv:
        for form, grads_shapes in GRADS_SHAPES.items():
            for shape in grads_shapes:
                tune_grads(form, shape)
        return
    if "--weights" in sys.argv:
        for dtype, name in itertools.product((torch.float32, torch.bfloat16), WEIGHTS):
            tune_many(dtype, name)
        return
    shapes = SHAPES[:3] if "--quick" in sys.argv else SHAPES
    for dtype, shape in itertools.product((torch.bfloat16, torch.float32), shapes):
        x = torch.randn(shape, device="cuda").to(dtype)
        tune_one(x, observe=True, transpose=True, column_sums=False)
        tune_one(x, observe=True, transpose=True, column_sums=True)
        if "--quick" not in sys.argv:
            tune_one(x, observe=True, transpose=False, column_sums=False)
            tune_one(x, observe=False, transpose=True, column_sums=False)
    for dtype, name in itertools.product((torch.float32, torch.bfloat16), WEIGHTS):
        tune_many(dtype, name)


if __name__ == "__main__":
    main()
