"""Casts that round a gradient, or mask it by dropout: times by tile, against what they replace.

python scripts/tune_grad_forms.py

That is the kernel which Inductor writes in front of the cast, and the cast. The two are compared
first, bit by bit. With column sums, also by how many programs are aimed at; the share of a copy's
speed counts every byte that has to move.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import triton
from tune_quantize import copying, milliseconds

from fp8patch import numerics
from fp8patch.ops.triton import column_sums
from fp8patch.ops.triton.quantize import Tile, quantize

FACTOR = 1 / 0.9
SHAPES = ((12288, 1024), (8192, 4096), (25216, 1280))
TILES = ((32, 64, 2), (32, 64, 4), (64, 64, 4), (64, 64, 2), (16, 64, 1))
PROGRAMS = (396, 528, 660, 792, 1056, 1584, 2112)


def compiled_form(form: str) -> Callable[..., torch.Tensor]:
    """What Inductor writes for the cast, of x and a mask."""

    def compute(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rounded = x.bfloat16()
        if form == "to_bf16":
            return rounded
        result: torch.Tensor = torch.ops.aten.native_dropout_backward(rounded, mask, FACTOR)
        return result

    return torch.compile(compute, dynamic=False)


def tune(form: str, shape: tuple[int, int], sums: bool) -> None:
    """Print tiles and numbers of programs for one form with its cast, and what it replaces."""
    torch._dynamo.reset()
    x = torch.randn(shape, device="cuda")
    x = x.bfloat16() if form == "dropout" else x
    mask = torch.rand(shape, device="cuda") > 0.1
    masked = form != "to_bf16"
    flags = {"live": False, "observe": True, "transpose": True, "column_sums": sums}
    slot = torch.tensor(3.0, device="cuda"), torch.tensor(100.0, device="cuda")
    place = *slot, torch.zeros(4, dtype=torch.int64, device="cuda")
    compute = compiled_form(form)

    def apart(place: Any = place) -> Any:
        return quantize(compute(x, mask), *place, 57344.0, numerics.E5M2, **flags)

    def together(tile: Tile | None = None, place: Any = place) -> Any:
        more: dict[str, Any] = {"form": form, "factor": FACTOR, "tile": tile, **flags}
        y = mask if masked else None
        return quantize(x, *place, 57344.0, numerics.E5M2, y=y, **more)

    value = compute(x, mask)
    times = [
        1e3 * milliseconds(f)
        for f in (
            lambda: compute(x, mask),
            lambda: quantize(value, *place, 57344.0, numerics.E5M2, **flags),
            apart,
        )
    ]
    size = x.numel() * (x.element_size() + masked + 2)
    copy = copying(size)
    print(
        f"{form} {shape} sums={sums}: copy {size / copy / 1e3:.1f}us; compiled {times[0]:.1f}us + "
        f"cast {times[1]:.1f}us, apart {times[2]:.1f}us",
        flush=True,
    )
    chosen = column_sums.PROGRAMS_STORED
    for tile in TILES:
        shown = [same_casts(apart, functools.partial(together, tile))]
        for column_sums.PROGRAMS_STORED in PROGRAMS if sums else (chosen,):
            us = 1e3 * milliseconds(lambda tile=tile: together(tile))
            name = f"{column_sums.PROGRAMS_STORED}: " if sums else ""
            shown.append(f"{name}{us:.1f}us {size / us / 1e3 / copy:.0%}")
        print(f"  {tile} " + "  ".join(shown), flush=True)
    column_sums.PROGRAMS_STORED = chosen


def same_casts(apart: Callable[..., Any], together: Callable[..., Any]) -> str:
    """Whether the two return the same bits and observe the same (sums are added in any order)."""
    results = []
    for cast in (apart, together):
        place = torch.tensor(3.0, device="cuda"), torch.zeros((), device="cuda")
        counts = torch.zeros(4, dtype=torch.int64, device="cuda")
        rows, rows_t, scale_inv, sums = cast(place=(*place, counts))
        bits = [rows.view(torch.uint8), rows_t.view(torch.uint8), scale_inv, place[1], counts]
        results.append((bits, sums))
    (bits, sums), (more_bits, more_sums) = results
    same = all(map(torch.equal, bits, more_bits))
    close = sums is None or torch.allclose(sums, more_sums, rtol=1e-4, atol=1e-2)
    return "equal" if same and close else "NOT EQUAL"


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    print(f"copy of 1 GB: {copying(1 << 30):.0f} GB/s")
    for form, shape in itertools.product(("to_bf16", "dropout_to_bf16", "dropout"), SHAPES):
        tune(form, shape, sums=False)
        tune(form, shape, sums=True)


if __name__ == "__main__":
    main()
