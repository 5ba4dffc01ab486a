"""A norm that casts its output: equal, bit for bit, to the cast of the output that it wrote."""

from typing import Any

import pytest
import torch
from interpreted import check_interpreted
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops import norm as plain
from fp8patch.ops import norm_quantize as ops
from fp8patch.ops import quantize as casts

EPS = 1e-5
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(1, 16), (13, 48), (33, 130), (64, 1024), (197, 768)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def slot(device: str, scale: float = 30.0) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, amax, counts)"""
    return (
        torch.tensor(scale, device=device),
        torch.zeros((), device=device),
        torch.zeros(4, dtype=torch.int64, device=device),
    )


def build(shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight, bias)"""
    g = torch.Generator().manual_seed(shape[0])
    x, weight = torch.randn(shape, generator=g) * 3 + 1, torch.randn(shape[1], generator=g)
    bias = torch.randn(shape[1], generator=g)
    return x.to(dtype).to(device), weight.to(device), bias.to(device)


def check(x: Tensor, weight: Any, bias: Any, center: bool, dtype: torch.dtype, scale: float) -> Any:
    """Both forms; asserts that they agree, and returns the slot."""
    for observe, transpose in ((True, True), (False, False), (True, False)):
        ours, apart = slot(x.device.type, scale), slot(x.device.type, scale)
        arguments = x, weight, bias if center else None, EPS, center, not center, dtype
        found = ops.norm_quantize(*arguments, *ours, 448.0, observe, transpose)
        y, mean, rstd = plain.norm(*arguments)
        bar = {BF16: 50, FP16: 65, FP32: 110}[dtype]
        finite = y.isfinite()
        assert torch.equal(finite, found[0].isfinite())
        assert numerics.sqnr(y[finite], found[0][finite]) > bar
        for a, b in ((mean, found[1]), (rstd, found[2])):
            # Which of inf and nan a row with an inf has as its mean is nobody's business.
            a, b = (statistic.where(statistic.isfinite(), torch.nan) for statistic in (a, b))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
        # From the y that was written, so that every bit has to agree.
        cast = casts.quantize(found[0], *apart, 448.0, False, False, observe, transpose)
        for a, b in zip((*cast[:3], *apart[1:]), (*found[3:], *ours[1:]), strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            if a.dtype == numerics.E4M3:
                nan = a.float().isnan() & b.float().isnan()
                assert ((a.view(torch.uint8) == b.view(torch.uint8)) | nan).all()
            else:
                assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        assert int(ours[2][3]) == x.numel() * observe
    return ours


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_cast_of_what_was_written(shape: tuple[int, int], device: str) -> None:
    for dtype in (FP32, BF16):
        x, weight, bias = build(shape, dtype, device)
        for center in (True, False):
            for out in {dtype, BF16}:
                for scale in (30.0, 400.0):  # the second one clips
                    check(x, weight, bias, center, out, scale)
    _, _, counts = check(x, None, None, True, FP16, 400.0)
    assert counts[0] > 0 or shape[0] == 1


@pytest.mark.parametrize("device", DEVICES)
def test_odd_values_and_layouts(device: str) -> None:
    x, weight, bias = build((64, 96), FP32, device)
    x[3, 4], x[20, 1], x[21, 1] = float("inf"), float("nan"), 1e30
    for center in (True, False):
        _, amax, counts = check(x, weight, bias, center, FP32, 30.0)
        assert amax.isnan()
        assert counts[2] > 0
        check(x[:, 32:64], weight[:32], bias[:32], center, BF16, 30.0)
        check(x[::3, :48], weight[:48], bias[:48], center, BF16, 30.0)
        check(x.t(), torch.ones(64, device=device), bias[:64], center, FP32, 30.0)
        check(x[:0], weight, bias, center, BF16, 30.0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_that_was_never_set_is_scaled_by_what_comes(device: str) -> None:
    x, weight, bias = build((33, 130), BF16, device)
    scale, amax, counts = slot(device, 0.0)
    casts.mark_cold([scale])
    try:
        arguments = x, weight, bias, EPS, True, False, BF16
        y, *_, scale_inv = ops.norm_quantize(*arguments, scale, amax, counts, 448.0, True, True)
        assert casts.cold_was_used([scale])
    finally:
        casts.mark_warm([scale])
    live = numerics.scale_from_amax(numerics.amax(y), 448.0)
    assert torch.equal(scale_inv, live.reciprocal())


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_is_what_it_says(device: str) -> None:
    x, weight, bias = build((13, 48), BF16, device)
    for center in (True, False):
        for flag in (True, False):
            arguments = (x, weight, bias if center else None, EPS, center, False, FP32)
            torch.library.opcheck(
                torch.ops.fp8patch.norm_quantize.default,
                (*arguments, *slot(device), 448.0, flag, flag),
                test_utils=("test_schema", "test_faketensor") if not flag else "test_faketensor",
            )


# In a process of its own, and as far as the interpreter is right: tests/test_triton_quantize.py.
SCRIPT = """
import torch
from fp8patch import numerics
from fp8patch.ops.norm_quantize import norm_quantize as oracle
from fp8patch.ops.triton.norm_quantize import Tile, norm_quantize as kernel
from fp8patch.ops.triton.quantize import quantize as cast

def slot():
    return torch.tensor(200.0), torch.zeros(()), torch.zeros(4, dtype=torch.int64)

how = dict(live=False, observe=True, transpose=True, column_sums=False)
torch.manual_seed(0)
for (rows, cols), tile in (
    ((1, 16), Tile(16, 128, 4)), ((13, 48), Tile(32, 32, 4)), ((33, 130), Tile(16, 64, 4)),
    ((16, 256), Tile(16, 128, 4)),
):
    for center, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        where = rows, cols, center
        x = (torch.randn(rows, cols + 3) * 3 + 100).to(dtype)[:, :cols]
        x[:, :16] += 1000.0 * (rows == 33)  # the first part lies far from the mean
        bias = torch.randn(cols) if center else None
        weight = torch.randn(cols)
        weight[[1, 3, -2]] = torch.tensor([0.0, 1e-7, 1e-7]) - float(not center)
        if center:
            bias[[1, 3, -2]] = 0
        arguments = x, weight, bias, 1e-5, center, not center, torch.float32
        a, b = slot(), slot()
        want = oracle(*arguments, *a, 448.0, True, True)
        got = kernel(*arguments, *b, True, True, tile=tile)
        for e, g in zip(want, got):
            assert e.shape == g.shape and e.dtype == g.dtype, where
        for e, g in zip(want[:3], got[:3]):
            assert not e.numel() or numerics.sqnr(e, g) > 100, (where, numerics.sqnr(e, g))
        assert torch.allclose(a[1], b[1], rtol=1e-5), where
        assert a[2][3] == b[2][3] == x.numel(), where
        # Bit for bit what the other kernel makes of the y that was written; many elements clip.
        c = slot()
        apart = cast(got[0], *c, 448.0, numerics.E4M3, **how)
        for e, g in zip((*apart[:3], *c[1:]), (*got[3:], *b[1:])):
            assert torch.equal(e.float(), g.float()), where
        assert b[2][0] > 0 and b[2][1] > 0 or rows == 1, where
        assert torch.equal(got[4][:cols, :rows].float(), got[3].float()[:, :cols].t()), where
        assert not got[4][cols:].float().any() and not got[4][:, rows:].float().any(), where
        assert not got[3].float()[:, cols:].any(), where
print("done")
"""


def test_the_kernel_under_the_interpreter() -> None:
    check_interpreted(SCRIPT)
