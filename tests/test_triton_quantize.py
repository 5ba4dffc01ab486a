"""The cast kernel under Triton's CPU interpreter, as far as the interpreter is right.

It does not round FP8 to nearest even: some percent of the values are one step off, and one that
rounds up to a power of two loses the carry and comes out half; nan comes out as a number. So
addressing, masks, padding,
transposes, amax and scales are checked exactly here and values as far as that; bit equality is
proven on a GPU, by scripts/check_gpu.py and by the tests marked `gpu`.
"""

import pytest
import torch
from interpreted import check_interpreted
from shapes import DTYPES, TENSORS, params

from fp8patch import numerics
from fp8patch.ops import quantize as ops

pytest.importorskip("triton")

# The interpreter is chosen when Triton is imported, so it gets a process of its own.
SCRIPT = """
import torch
from fp8patch import numerics
from fp8patch.ops.triton import column_sums
from fp8patch.ops.triton.quantize import quantize as kernel
from fp8patch.ops.quantize import quantize as oracle

def ordinal(x):
    # Neighbouring FP8 numbers are neighbouring integers in this order; nan far away from all.
    code = x.view(torch.uint8).int()
    order = torch.where(code < 128, code, 128 - code)
    return torch.where(x.float().isnan(), 1000, order)

torch.manual_seed(0)
for shape in ((1, 1), (1, 16), (2, 64), (13, 48), (33, 130), (197, 77)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for e5m2 in (False, True):
            for live in (False, True):
                for transpose in (False, True):
                    x = (torch.randn(shape) * 3).to(dtype)
                    x = x.t().contiguous().t() if shape[0] % 2 else x
                    slots = [(torch.zeros(()), torch.zeros(4, dtype=torch.int64)) for _ in "ab"]
                    scale = torch.tensor(20.0)
                    fp8 = numerics.E5M2 if e5m2 else numerics.E4M3
                    sums = transpose
                    # One tile a program, or many.
                    column_sums.PROGRAMS = 3 if live else 528
                    want = oracle(x, scale, *slots[0], 448.0, e5m2, live, True, transpose, sums)
                    got = kernel(x, scale, *slots[1], 448.0, fp8, live=live, observe=True,
                                 transpose=transpose, column_sums=sums)
                    where = (shape, dtype, e5m2, live, transpose)
                    assert [t.shape for t in want[:3]] == [t.shape for t in got[:3]], where
                    assert torch.equal(want[2], got[2]), where
                    if sums:
                        torch.testing.assert_close(want[3], got[3], rtol=1e-5, atol=1e-5)
                    assert torch.equal(slots[0][0], slots[1][0]), where
                    assert slots[0][1][3] == slots[1][1][3] == x.numel(), where
                    for a, b in zip(want[:2], got[:2]):
                        apart = (ordinal(a) - ordinal(b)).abs() > 1
                        lost_carry = b.float() * 2 == a.float()
                        assert not (apart & ~lost_carry).any(), where
                        assert a.numel() < 1000 or apart.float().mean() < 0.1, where
                    if transpose:
                        rows, cols = shape
                        assert torch.equal(got[1][:cols, :rows].float(),
                                           got[0].float()[:, :cols].t())
                        assert not got[1][cols:].float().any()
                        assert not got[1][:, rows:].float().any()
                    assert not got[0].float()[:, shape[1]:].any(), where

x = torch.tensor([[1.0, float("inf"), float("nan"), -float("inf"), 1e30, -1e30, 0.0, 1e-30]])
slot = torch.zeros(()), torch.zeros(4, dtype=torch.int64)
q = kernel(x, torch.tensor(2.0), *slot, 448.0, numerics.E4M3, live=False, observe=True,
           transpose=False, column_sums=False)[0].float()[0, :8]
assert q[[0, 4, 5, 6, 7]].tolist() == [2.0, 448.0, -448.0, 0.0, 0.0], q
assert slot[0].isnan()
assert slot[1].tolist() == [2, 1, 3, 8], slot[1]

# Outliers in some of the tiles that a program walks through, the last of them not whole.
x = (torch.randn(197, 77) * 3).bfloat16()
x[5, 3], x[70, 76], x[71, 2], x[130, 40], x[131, 40] = 1e9, -1e9, 1e-9, float("inf"), 1e30
slots = [(torch.zeros(()), torch.zeros(4, dtype=torch.int64)) for _ in "ab"]
column_sums.PROGRAMS = 4
scale = torch.tensor(2.0)
want = oracle(x, scale, *slots[0], 448.0, False, False, True, True, True)
got = kernel(x, scale, *slots[1], 448.0, numerics.E4M3, live=False, observe=True, transpose=True,
             column_sums=True)
assert slots[0][0] == slots[1][0] == float("inf")
assert slots[0][1].tolist() == slots[1][1].tolist(), slots
assert slots[1][1][[0, 2, 3]].tolist() == [3, 1, x.numel()], slots
assert slots[1][1][1] >= 1, slots
torch.testing.assert_close(want[3], got[3], rtol=1e-5, atol=1e-4)
for i, j, value in ((5, 3, 448.0), (70, 76, -448.0), (131, 40, 448.0), (71, 2, 0.0)):
    assert got[0].float()[i, j] == got[1].float()[j, i] == value, (i, j)
print("done")
"""


def test_kernel_under_the_interpreter() -> None:
    check_interpreted(SCRIPT)


def _cast(x: torch.Tensor, e5m2: bool, live: bool) -> list[torch.Tensor]:
    slot = torch.zeros((), device=x.device), torch.zeros(4, dtype=torch.int64, device=x.device)
    scale = torch.tensor(3.7, device=x.device)
    limit = numerics.FP8_MAX[numerics.E5M2 if e5m2 else numerics.E4M3]
    *cast, _ = ops.quantize(x, scale, *slot, limit, e5m2, live, True, True)
    return [*cast, *slot]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(TENSORS))
def test_kernel_equals_the_oracle_bit_for_bit(case, dtype) -> None:  # type: ignore[no-untyped-def]
    x = case.build(dtype, "cpu")
    for e5m2 in (False, True):
        for live in (False, True):
            for a, b in zip(_cast(x, e5m2, live), _cast(x.cuda(), e5m2, live), strict=True):
                b = b.cpu()
                if a.dtype in (numerics.E4M3, numerics.E5M2):
                    both_nan = a.float().isnan() & b.float().isnan()
                    assert ((a.view(torch.uint8) == b.view(torch.uint8)) | both_nan).all()
                else:
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# One row of tiles, one tile a program, many, and many of which the last program has fewer.
SUMMED = [(1, 16), (37, 130), (4096, 1024), (3000, 48), (12345, 1031), (50001, 33)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SUMMED, ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_column_sums(shape: tuple[int, int], dtype: torch.dtype, turned: bool) -> None:
    x = torch.randn(shape[::-1] if turned else shape, device="cuda").to(dtype)
    x = x.t() if turned else x
    for outlier in (False, True):
        if outlier:
            x[shape[0] // 2, shape[1] // 2] = 3e4
        found = []
        for sums in (True, True, False):
            slot = torch.zeros((), device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
            scale = torch.tensor(3.7, device="cuda")
            cast = ops.quantize(x, scale, *slot, 448.0, False, False, True, True, sums)
            found.append([*(t.float() for t in cast[:3]), *slot, cast[3]])
        once, again, without = found
        assert numerics.sqnr(x.double().sum(0), once[-1]) > 110
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(once[:-1], without[:-1], strict=True))
