"""Many casts in one launch, and the update of a whole bank: bit-equal to the oracle.

Under Triton's interpreter on a CPU as far as that is right (test_triton_quantize.py says how far).
"""

import pytest
import torch
from interpreted import check_interpreted
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops import fused

pytest.importorskip("triton")

SCRIPT = """
import torch
from fp8patch import numerics
from fp8patch.ops.triton.update import delayed_update
from fp8patch.ops.triton.quantize_many import Job, ManyCasts

torch.manual_seed(0)
for length in (1, 5, 1024):
    for algo in ("max", "most_recent"):
        a, b = ([torch.zeros(7, length), torch.zeros(7, dtype=torch.int64), torch.zeros(7, 4),
                 torch.zeros(7, 4), torch.full((7,), 448.0)] for _ in "ab")
        for step in range(8):
            seen = torch.rand(7) * 10 ** (step % 3)
            seen[step % 7], seen[(step + 1) % 7], seen[(step + 2) % 7] = 0, torch.inf, torch.nan
            seen[(step + 3) % 7] = 1e-38
            for update, bank in ((numerics.delayed_update, a), (delayed_update, b)):
                bank[2][:, 0] = seen
                update(bank[0], bank[1], bank[2][:, 0], bank[3][:, 0], bank[4], algo)
            for left, right in zip(a, b):
                assert torch.equal(left, right), (length, algo, step, left, right)

lengths = torch.tensor([1, 5, 12, 3, 12, 2, 1])
a, b = ([torch.zeros(7, 12), torch.zeros(7, dtype=torch.int64), torch.zeros(7), torch.zeros(7),
         torch.full((7,), 448.0)] for _ in "ab")
for step in range(14):
    for update, bank in ((numerics.delayed_update, a), (delayed_update, b)):
        bank[2].copy_(torch.rand(7, generator=torch.Generator().manual_seed(step)))
        update(*bank, "max", lengths)
    for left, right in zip(a, b):
        assert torch.equal(left, right), ("mixed", step, left, right)

def job(rows, cols):
    weight = torch.randn(rows, cols)
    return Job(weight, torch.empty(rows, cols, dtype=numerics.E4M3),
               torch.empty(cols, rows, dtype=numerics.E4M3), torch.zeros(()), torch.tensor(30.0),
               torch.zeros(()), torch.zeros(4, dtype=torch.int64))

for live in (False, True):
    jobs = [job(16, 16), job(80, 144), job(192, 32)]
    casts = ManyCasts(jobs)
    casts.run(448.0, live=live, observe=True)
    for one in jobs:
        amax = one.weight.abs().max()
        scale = numerics.scale_from_amax(amax, 448.0) if live else one.scale
        want = numerics.quantize(one.weight, scale, numerics.E4M3).float()
        got = one.rows.float()
        assert torch.equal(one.amax, amax) and one.counts[3] == one.weight.numel()
        assert torch.equal(one.scale_inv, 1 / scale)
        assert torch.equal(one.rows_t.float(), got.t())
        lost_carry = got * 2 == want
        assert ((got - want).abs() <= want.abs() / 8 + 2**-9)[~lost_carry].all()
        assert one.rows._version > 0 and one.rows_t._version > 0

# Into new tensors each time, with scales that fit. Which ones do is said here, not computed.
largest, inf, nan = 448.0, float("inf"), float("nan")
cases = [(1.0, 30.0, True), (29.0, 30.0, True), (30.0, 30.0, False), (1000.0, 30.0, False),
         (1.0, 0.0, False), (1.0, -1.0, False), (1.0, nan, False), (1.0, inf, False),
         (inf, 30.0, False), (nan, 30.0, False), (0.0, 30.0, True), (2 * 448.0 / 64, 64.0, True)]
jobs, later = [], torch.empty(0)
for top, scale, _ in cases:
    weight = torch.rand(48, 80) * (top if 0 < top < inf else 1.0) / 2 * (top != 0)
    weight[5, 7] = -top
    weight[6, :3] = 1e-7 * (top != 0)  # Becomes zero.
    jobs.append(Job(weight, later, later, later, torch.tensor(scale), torch.zeros(()),
                    torch.zeros(4, dtype=torch.int64)))
casts, kept = ManyCasts(jobs), []
for observe in (True, False):
    made = [(torch.empty(48, 80, dtype=numerics.E4M3), torch.empty(80, 48, dtype=numerics.E4M3),
             torch.zeros(())) for _ in cases]
    casts.run_into(made, largest, live=False, observe=observe)
    kept.append(made)
    for (top, scale, fits), job, (rows, rows_t, scale_inv) in zip(cases, jobs, made):
        amax = numerics.amax(job.weight)
        used = torch.tensor(scale) if fits else numerics.scale_from_amax(amax, largest)
        assert torch.equal(scale_inv, used.reciprocal()), (top, scale)
        assert torch.equal(rows_t.view(torch.uint8), rows.view(torch.uint8).t())
        want = numerics.quantize(job.weight, used, numerics.E4M3)
        # (Of two runs one was observed.)
        assert torch.equal(job.counts, numerics.counts(job.weight, used, want)), (top, scale)
        assert torch.equal(job.amax.nan_to_num(-1.0), amax.nan_to_num(-1.0)), (top, scale)
        want = want.float()
        near = (rows.float() - want).abs() <= want.abs() / 8 + 2**-9
        assert (near | want.isnan() | (rows.float() * 2 == want)).all()
for first, second in zip(*kept):
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8))
               for a, b in zip(first[:2], second[:2]))
    assert first[0].data_ptr() != second[0].data_ptr() and first[0]._version == 0
print("done")
"""


def test_kernels_under_the_interpreter() -> None:
    check_interpreted(SCRIPT)


def _bank(rows: int, length: int, device: str) -> list[Tensor]:
    return [
        torch.zeros(rows, length, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.zeros(rows, 4, device=device),
        torch.zeros(rows, 4, device=device),
        torch.tensor([448.0, 448.0, 57344.0], device=device).repeat(rows // 3),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 16, 1000, 1024])
def test_update_equals_the_oracle(length: int, algo: str) -> None:
    ours, theirs = _bank(300, length, "cuda"), _bank(300, length, "cpu")
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        amax = torch.exp2(torch.rand(300, generator=generator) * 200 - 140)
        amax[torch.randperm(300, generator=generator)[:30]] = 0
        amax[:3] = torch.tensor([torch.inf, torch.nan, 1e-44])
        ours[2][:, 0], theirs[2][:, 0] = amax.cuda(), amax
        fused.delayed_update(ours[0], ours[1], ours[2][:, 0], ours[3][:, 0], ours[4], algo)
        numerics.delayed_update(
            theirs[0], theirs[1], theirs[2][:, 0], theirs[3][:, 0], theirs[4], algo
        )
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.gpu
def test_update_of_several_lengths_equals_the_oracle() -> None:
    ours, theirs = _bank(300, 1024, "cuda"), _bank(300, 1024, "cpu")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (300,), generator=generator)
    lengths[::7] = 1024
    for _ in range(60):
        amax = torch.exp2(torch.rand(300, generator=generator) * 20)
        for bank, update in ((ours, fused.delayed_update), (theirs, numerics.delayed_update)):
            device = bank[0].device
            bank[2][:, 0] = amax.to(device)
            tensors = bank[0], bank[1], bank[2][:, 0], bank[3][:, 0], bank[4]
            update(*tensors, "max", lengths.to(device))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("live", [False, True], ids=["delayed", "current"])
def test_many_casts_equal_the_oracle(dtype: torch.dtype, live: bool) -> None:
    shapes = [(16, 16), (1024, 4096), (4096, 1024), (48, 4112), (2000, 80), (128, 128)]
    weights = [torch.randn(shape).mul(3).to(dtype) for shape in shapes]
    weights[1][5, 7], weights[2][0, 0], weights[4][3, 3] = torch.inf, torch.nan, 60000.0
    scale = torch.tensor(20.0)
    jobs = []
    for weight in weights:
        rows, cols = weight.shape
        jobs.append(
            (
                weight.cuda(),
                torch.empty(rows, cols, dtype=numerics.E4M3, device="cuda"),
                torch.empty(cols, rows, dtype=numerics.E4M3, device="cuda"),
                torch.zeros((), device="cuda"),
                scale.cuda(),
                torch.zeros((), device="cuda"),
                torch.zeros(4, dtype=torch.int64, device="cuda"),
            )
        )
    casts = fused.many_casts(jobs)
    assert casts is not None
    for times in (1, 2):
        casts.run(448.0, live=live, observe=True)
        for weight, (_, rows_fp8, rows_t, scale_inv, _, amax, counts) in zip(
            weights, jobs, strict=True
        ):
            seen = numerics.amax(weight)
            used = numerics.scale_from_amax(seen, 448.0) if live else scale
            want = numerics.quantize(weight, used, numerics.E4M3)
            same = (want.view(torch.uint8) == rows_fp8.cpu().view(torch.uint8)) | (
                want.float().isnan() & rows_fp8.cpu().float().isnan()
            )
            assert same.all()
            assert torch.equal(
                rows_t.t().contiguous().view(torch.uint8), rows_fp8.view(torch.uint8)
            )
            torch.testing.assert_close(amax.cpu(), seen, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(scale_inv.cpu(), used.reciprocal())
            assert torch.equal(counts.cpu(), times * numerics.counts(weight, used, want))
