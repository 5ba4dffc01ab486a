"""The fused cross entropy beside PyTorch's, and over tiles. Wants a GPU.

    python scripts/time_cross_entropy.py            # --tiles: the sweep that the tiles come from

Times are of the loss and of the gradient of BF16 logits, by PyTorch as transformers has it (of
`logits.float()`), and by ours; memory is the peak beside the logits.
"""

import argparse
import itertools
from functools import partial

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from fp8patch.fused_loss import _CrossEntropy
from fp8patch.ops import cross_entropy as ops
from fp8patch.ops.triton import cross_entropy as kernels

# Rows, classes, and how many of 100 rows have a label.
SHAPES = ((8192, 32000, 100), (12288, 28996, 15), (8192, 128256, 100), (4096, 50257, 100))
TILES = tuple(itertools.product((1024, 2048, 4096, 8192), (2, 4, 8)))


def microseconds(function: object) -> float:
    """Median of one call, with a cold cache."""
    ms = triton.testing.do_bench(function, warmup=5, rep=40, return_mode="median")
    return float(ms) * 1e3


def build(rows: int, classes: int, labelled: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, classes, (rows,), device="cuda")
    return logits, labels.where(torch.rand(rows, device="cuda") * 100 < labelled, -100)


def whole(logits: Tensor, labels: Tensor, fused: bool) -> None:
    """Loss and gradient."""
    if fused:
        loss = _CrossEntropy.apply(logits, labels, -100, "mean")  # type: ignore[no-untyped-call]
    else:
        loss = F.cross_entropy(logits.float(), labels)
    torch.autograd.grad(loss, logits)


def compare(copy: float, shape: tuple[int, int, int]) -> None:
    """Ours against PyTorch's: time and memory."""
    logits, labels = build(*shape)
    found = []
    for fused in (False, True):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        whole(logits, labels, fused)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        took = microseconds(lambda f=fused: whole(logits, labels, f))
        found.append(f"{took:.0f} us, {peak:.2f} GiB")
    losses, lse, _ = kernels.cross_entropy(logits.detach(), labels, -100)
    forward = microseconds(lambda: kernels.cross_entropy(logits.detach(), labels, -100))
    backward = microseconds(
        lambda: ops.cross_entropy_backward(logits.detach(), labels, lse, losses[0], -100)
    )
    read = logits.numel() * 2 * shape[2] / 100
    written = logits.numel() * 2
    print(
        f"{shape}: PyTorch {found[0]}; ours {found[1]}; forward {forward:.0f} us "
        f"{read / copy / forward:.0%} of a copy, backward {backward:.0f} us "
        f"{(read + written) / copy / backward:.0%}",
        flush=True,
    )


def sweep(copy: float, shape: tuple[int, int, int]) -> None:
    """Forward and backward over tiles."""
    logits, labels = build(*shape)
    x = logits.detach()
    losses, lse, _ = kernels.cross_entropy(x, labels, -100)
    width = ops.width_of(x)
    parts = []
    for tile in TILES:
        forward = microseconds(lambda t=tile: kernels.cross_entropy(x, labels, -100, t))
        backward = microseconds(
            lambda t=tile: kernels.cross_entropy_backward(x, labels, lse, losses[0], -100, width, t)
        )
        parts.append(f"{tile} {forward:.0f} {backward:.0f}")
    print(f"{shape}, (block, warps) forward backward us: {'; '.join(parts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiles", action="store_true", help="The sweep over tiles too.")
    options = parser.parse_args()
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / microseconds(partial(target.copy_, source))
    print(torch.cuda.get_device_name(), torch.__version__, f"copy {copy / 1e3:.0f} GB/s")
    del source, target
    for shape in SHAPES:
        compare(copy, shape)
    for shape in SHAPES[:2] if options.tiles else ():
        sweep(copy, shape)


if __name__ == "__main__":
    main()
