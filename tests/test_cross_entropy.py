"""The fused cross entropy as an operator: against FP64, at its edges, and under Triton."""

from typing import Any

import pytest
import torch
from interpreted import check_interpreted
from torch import Tensor
from torch.nn import functional as F

from fp8patch import numerics
from fp8patch.ops import cross_entropy as ops

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
IGNORED = -100
# dB of the gradient to FP64, in what it is written in. Measured: 55.0, 69.8 and 125 at least.
BARS = {BF16: 53.0, FP16: 68.0, FP32: 115.0}
SHAPES = [(1, 1), (1, 700), (5, 37), (33, 1000), (7, 9001)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def build(shape: tuple[int, int], dtype: torch.dtype, device: str, apart: int = 0) -> Any:
    """(logits whose rows lie `apart` elements from each other, labels, gradient of the losses)."""
    rows, classes = shape
    g = torch.Generator().manual_seed(rows + classes)
    wide = (torch.randn(rows, classes + apart, generator=g) * 3).to(device, dtype)
    labels = torch.randint(0, classes, (rows,), generator=g)
    labels[1::3] = IGNORED
    return wide[:, :classes], labels.to(device), torch.rand(rows, generator=g).to(device)


def exact(logits: Tensor, labels: Tensor, by_loss: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and the gradient of the logits, by PyTorch in FP64."""
    x = logits.detach().double().requires_grad_()
    losses = F.cross_entropy(x, labels, reduction="none", ignore_index=IGNORED)
    losses.backward(by_loss.double())
    assert x.grad is not None
    return losses.detach(), x.grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_near_fp64(shape: tuple[int, int], device: str) -> None:
    for dtype in (FP32, BF16, FP16):
        for apart in (0, 3, 8):
            logits, labels, by_loss = build(shape, dtype, device, apart)
            losses, lse, sums = ops.cross_entropy(logits, labels, IGNORED)
            expected, grads = exact(logits, labels, by_loss)
            torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
            assert not losses[1::3].any()
            count = float((labels != IGNORED).sum())
            assert sums.tolist() == [pytest.approx(float(losses.sum()), rel=1e-6), count, 1.0]
            found = ops.cross_entropy_backward(logits, labels, lse, by_loss, IGNORED)
            assert (found.shape, found.dtype) == (logits.shape, dtype)
            assert (found.stride(0) * found.element_size()) % 16 == 0
            assert not found[1::3].any()
            if shape[1] > 1:  # (One class has no gradient.)
                assert numerics.sqnr(grads, found.double()) > BARS[dtype], (dtype, apart)
            same = ops.cross_entropy_backward(logits, labels, lse, by_loss[0], IGNORED)
            each = by_loss[0].expand(shape[0]).contiguous()
            twin = ops.cross_entropy_backward(logits, labels, lse, each, IGNORED)
            assert torch.equal(same, twin)


def test_a_planted_fault_misses_the_bar() -> None:
    logits, labels, by_loss = build((33, 1000), BF16, "cpu")
    _, lse, _ = ops.cross_entropy(logits, labels, IGNORED)
    _, grads = exact(logits, labels, by_loss)
    # As it comes from log-probabilities that were rounded to BF16.
    found = ops.cross_entropy_backward(logits, labels, lse.bfloat16().float(), by_loss, IGNORED)
    assert numerics.sqnr(grads, found.double()) < BARS[BF16]


@pytest.mark.parametrize("device", DEVICES)
def test_odd_values_go_where_pytorch_sends_them(device: str) -> None:
    x = torch.randn(7, 600, device=device)
    inf = float("inf")
    x[0, 3], x[1, 4], x[2, 5:] = inf, float("nan"), -inf
    x[3] = -inf
    labels = torch.tensor([3, 0, 1, 2, 5, 6, 7], device=device)
    x[4, 5] = -inf
    wanted = x.clone().requires_grad_()
    expected = F.cross_entropy(wanted, labels, reduction="none")
    expected.sum().backward()
    losses, lse, _ = ops.cross_entropy(x, labels, IGNORED)
    torch.testing.assert_close(losses, expected.detach(), equal_nan=True)
    grad = ops.cross_entropy_backward(x, labels, lse, torch.ones(7, device=device), IGNORED)
    torch.testing.assert_close(grad, wanted.grad, equal_nan=True)
    assert grad[[2, 5, 6]].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_label_that_is_no_class_is_no_number(device: str) -> None:
    x = torch.randn(4, 600, device=device)
    labels = torch.tensor([0, 600, -1, IGNORED], device=device)
    losses, lse, sums = ops.cross_entropy(x, labels, IGNORED)
    assert losses.isnan().tolist() == [False, True, True, False]
    assert sums.isnan().tolist() == [True, False, False]
    assert sums[2] == 0
    grad = ops.cross_entropy_backward(x, labels, lse, torch.ones((), device=device), IGNORED)
    assert grad.isnan().all(1).tolist() == [False, True, True, False]
    assert not grad[3].any()
    assert grad[0].isfinite().all()
    found = ops.cross_entropy(x, labels, -1)
    assert found[0].isnan().tolist() == [False, True, False, True]
    assert found[2][2] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_and_no_labels(device: str) -> None:
    x = torch.randn(0, 600, device=device)
    labels = torch.zeros(0, dtype=torch.int64, device=device)
    losses, lse, sums = ops.cross_entropy(x, labels, IGNORED)
    assert (losses.shape, sums.tolist()) == ((0,), [0.0, 0.0, 1.0])
    assert ops.cross_entropy_backward(x, labels, lse, losses, IGNORED).shape == (0, 600)
    x, labels = torch.randn(3, 600, device=device), torch.full((3,), IGNORED, device=device)
    losses, lse, sums = ops.cross_entropy(x, labels, IGNORED)
    assert sums.tolist() == [0.0, 0.0, 1.0]
    nan = torch.tensor(float("nan"), device=device)
    assert not ops.cross_entropy_backward(x, labels, lse, nan, IGNORED).any()


@pytest.mark.gpu
def test_any_ignored_label_after_another() -> None:
    """A compiled kernel serves them all. (1 is a number that Triton likes to make a constant.)"""
    x = torch.randn(64, 640, device="cuda")
    for ignored in (1, -100, 0, 16, -1, 1, -(1 << 40)):
        labels = torch.randint(0, 640, (64,), device="cuda")
        labels[::4] = ignored
        losses, lse, sums = ops.cross_entropy(x, labels, ignored)
        given = x.clone().requires_grad_()
        expected = F.cross_entropy(given, labels, ignore_index=ignored, reduction="none")
        torch.testing.assert_close(losses, expected.detach())
        assert sums[1:].tolist() == [int((labels != ignored).sum()), 1.0]
        expected.sum().backward()
        found = ops.cross_entropy_backward(x, labels, lse, torch.ones((), device="cuda"), ignored)
        torch.testing.assert_close(found, given.grad)
        assert losses._base is None


_INTERPRETED = """
import torch
from test_cross_entropy import BARS, IGNORED, SHAPES, build, exact
from fp8patch import numerics
from fp8patch.ops import cross_entropy as plain
from fp8patch.ops.triton import cross_entropy as kernels

# (The interpreter cuts numbers off where the GPU rounds them to BF16.)
for dtype in (torch.float32, torch.float16):
    for shape in SHAPES:
        logits, labels, by_loss = build(shape, dtype, "cpu", 3)
        expected, grads = exact(logits, labels, by_loss)
        losses, lse, sums = kernels.cross_entropy(logits, labels, IGNORED)
        torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums, plain.cross_entropy(logits, labels, IGNORED)[2])
        width = plain.width_of(logits)
        for given in (by_loss, by_loss[0]):
            found = kernels.cross_entropy_backward(logits, labels, lse, given, IGNORED, width)
            like = plain.cross_entropy_backward(logits, labels, lse, given, IGNORED)
            assert found.stride() == like.stride()
            if shape[1] > 1:
                assert numerics.sqnr(like.double(), found.double()) > BARS[dtype]
x = torch.randn(3, 600)
x[0], x[1, 5:], x[2, 7] = -float("inf"), -float("inf"), float("nan")
labels = torch.tensor([1, 2, 600])
expected = plain.cross_entropy(x, labels, IGNORED)
found = kernels.cross_entropy(x, labels, IGNORED)
torch.testing.assert_close(found, expected, equal_nan=True)
by_loss = torch.ones(3)
grads = [
    plain.cross_entropy_backward(x, labels, expected[1], by_loss, IGNORED),
    kernels.cross_entropy_backward(x, labels, found[1], by_loss, IGNORED, 608),
]
torch.testing.assert_close(*grads, equal_nan=True)

# More elements apart than fit into 32 bits. (What nobody touches takes no memory.)
rows = torch.randn(3, 600).half()
far = torch.empty((1 << 31) + 600, dtype=torch.half).as_strided(rows.shape, (1 << 30, 1))
far.copy_(rows)
found = [kernels.cross_entropy(x, labels, IGNORED) for x in (far, rows)]
torch.testing.assert_close(*found, equal_nan=True)
grads = [
    kernels.cross_entropy_backward(x, labels, found[0][1], by_loss, IGNORED, 608)
    for x in (far, rows)
]
torch.testing.assert_close(*grads, equal_nan=True)
print("done")
"""


def test_under_the_interpreter() -> None:
    check_interpreted(_INTERPRETED)
