"""The cast kernel under Triton's CPU interpreter, as far as the interpreter is right.

It does not round FP8 to nearest even: some percent of the values are one step off, and one that
rounds up to a power of two loses the carry and comes out half; nan comes out as a number. So
addressing, masks, padding,
transposes, amax and scales are checked exactly here and values as far as that; bit equality is
proven on a GPU, by scripts/check_gpu.py and by the tests marked `gpu`.
"""

import itertools

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

# Outliers in some of the tiles that a program walks through, the last of them not whole; and in
# programs of one tile each.
column_sums.PROGRAMS = 4
scale = torch.tensor(2.0)
for dtype in (torch.float32, torch.bfloat16):
    x = (torch.randn(197, 77) * 3).to(dtype)
    x[5, 3], x[70, 76], x[71, 2], x[130, 40], x[131, 40] = 1e9, -1e9, 1e-9, float("inf"), 1e30
    slots = [(torch.zeros(()), torch.zeros(4, dtype=torch.int64)) for _ in "ab"]
    want = oracle(x, scale, *slots[0], 448.0, False, False, True, True, True)
    got = kernel(x, scale, *slots[1], 448.0, numerics.E4M3, live=False, observe=True,
                 transpose=True, column_sums=True)
    assert slots[0][0] == slots[1][0] == float("inf")
    assert slots[0][1].tolist() == slots[1][1].tolist(), slots
    assert slots[1][1][[0, 2, 3]].tolist() == [3, 1, x.numel()], slots
    assert slots[1][1][1] >= 1, slots
    torch.testing.assert_close(want[3], got[3], rtol=1e-5, atol=1e-4)
    for i, j, value in ((5, 3, 448.0), (70, 76, -448.0), (131, 40, 448.0), (71, 2, 0.0)):
        assert got[0].float()[i, j] == got[1].float()[j, i] == value, (i, j)

# What becomes zero, of all BF16 values but subnormal ones (it reads some of those as zero).
x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
x = x[x.isfinite() & ((x == 0) | (x.abs() >= 2.0**-126))].view(1066, 61)
found = set()
for value in (3.7, 0.99999994, 1e-3, 1e30, 2.0**-126):
    slot = torch.zeros(()), torch.zeros(4, dtype=torch.int64)
    kernel(x, torch.tensor(value), *slot, 448.0, numerics.E4M3, live=False, observe=True,
           transpose=False, column_sums=False)
    small = (x != 0) & ((x.float() * value).abs() <= numerics.FLUSHES_TO[numerics.E4M3])
    assert slot[1][1] == small.sum(), (value, slot[1], small.sum())
    found.add(int(slot[1][1]))
assert len(found) > 4
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


# The last three are a normal number as small as can be, and what no slot should ever hold.
SCALES = (3.7, 1.0, 0.99999994, 1e-3, 6e-8, 3e4, 1e30, 3e38, 2.0**-126, float("inf"), 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("e5m2", [False, True])
def test_every_bf16_value_is_counted_as_the_oracle_does(e5m2: bool) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()].view(255, 256)
    subnormal = every[(every != 0) & (every.abs() < 2.0**-126)].view(2, 127)
    limit = numerics.FP8_MAX[numerics.E5M2 if e5m2 else numerics.E4M3]
    flushed = set()
    for x, value in itertools.product((every.view(256, 256), finite, subnormal), SCALES):
        slots = []
        for device in ("cpu", "cuda"):
            slot = torch.zeros((), device=device), torch.zeros(4, dtype=torch.int64, device=device)
            scale = torch.tensor(value, device=device)
            ops.quantize(x.to(device), scale, *slot, limit, e5m2, False, True, True)
            slots.append([t.cpu() for t in slot])
        for a, b in zip(*slots, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=f"scale {value}")
        flushed.add(int(slots[0][1][1]))
    # The scales are apart enough for each to have numbers of its own.
    assert len(flushed) > 6


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
        if shape[0] > 1:
            assert numerics.sqnr(x[1:].double().sum(0), once[-1]) < 100
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(once[:-1], without[:-1], strict=True))


@pytest.mark.gpu
def test_column_sums_in_a_cuda_graph() -> None:
    """The second kernel may be launched before the first has ended, and has to wait for it."""
    x = torch.randn(12288, 1024, device="cuda").bfloat16()
    scale, amax = torch.tensor(3.7, device="cuda"), torch.zeros((), device="cuda")
    counts = torch.zeros(4, dtype=torch.int64, device="cuda")

    def sums() -> torch.Tensor:
        found = ops.quantize(x, scale, amax, counts, 448.0, False, False, True, True, True)[3]
        assert found is not None
        return found

    sums()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [sums() for _ in range(4)]
    for _ in range(20):
        x.normal_()
        graph.replay()
        want = x.double().sum(0)
        assert all(numerics.sqnr(want, each) > 110 for each in found)
