"""The cast operators equal the oracle bit for bit: values, padding, transpose, what they record."""

import sys
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import E4M3, E5M2, Format
from shapes import DTYPES, TENSORS, TensorCase, params
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops import kernels
from fp8patch.ops import quantize as ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
formats = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
cases = pytest.mark.parametrize("case", params(TENSORS))


class Place(NamedTuple):
    """A slot as the bank lays it out: views of wider tensors."""

    scale: Tensor
    amax: Tensor
    counts: Tensor


def place(device: str, scale: float = 1.0) -> Place:
    scales = torch.full((3, 4), scale, device=device)
    amax = torch.zeros(3, 4, device=device)
    return Place(scales[1, 0], amax[1, 0], torch.zeros(3, 4, dtype=torch.int64, device=device)[1])


def quantize(x: Tensor, slot: Place, fp8: Format, **options: Any) -> tuple[Tensor, ...]:
    given = {"live": False, "observe": True, "transpose": True, **options}
    *cast, sums = ops.quantize(x, *slot, float(fp8.largest), fp8 is E5M2, **given)
    assert sums is None or sums.numel() == 0
    return tuple(cast)


def same(a: Tensor, b: Tensor) -> bool:
    """Same FP8 bytes, shape and layout; one nan is as good as another."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_contiguous():
        return False
    ours, theirs = a.view(torch.uint8).cpu(), b.contiguous().view(torch.uint8).cpu()
    both_nan = a.cpu().float().isnan() & b.cpu().float().isnan()
    return bool(((ours == theirs) | both_nan).all())


def zero_padded(x: Tensor, rows: int, cols: int) -> Tensor:
    out = torch.zeros(rows, cols, device=x.device)
    out[: x.shape[0], : x.shape[1]] = x.float()
    return out.to(x.dtype)


def up(size: int) -> int:
    return -(-size // 16) * 16


@devices
@formats
@dtypes
@cases
@pytest.mark.parametrize("live", [True, False], ids=["live", "scaled"])
def test_it_is_the_oracle(
    case: TensorCase, dtype: torch.dtype, fp8: Format, live: bool, device: str
) -> None:
    x = case.build(dtype, device)
    m, k = x.shape
    slot = place(device, 37.5)
    before = x.clone()
    x_fp8, x_fp8_t, scale_inv = quantize(x, slot, fp8, live=live)

    scale = numerics.scale_from_amax(numerics.amax(x), fp8.largest) if live else slot.scale
    wanted = numerics.quantize(x, scale, fp8.torch)
    assert same(x_fp8, zero_padded(wanted, m, up(k)))
    assert same(x_fp8_t, zero_padded(wanted.float().t().to(fp8.torch), up(k), up(m)))
    assert scale_inv.shape == ()
    assert scale_inv.dtype == torch.float32
    assert torch.equal(scale_inv, scale.reciprocal())

    values = oracle.numpy(x)
    assert np.array_equal(slot.amax.cpu().numpy(), oracle.amax(values), equal_nan=True)
    assert slot.counts.tolist() == oracle.counts(values, scale.item(), fp8)
    assert slot.scale.item() == 37.5
    assert torch.equal(x, before) or not case.finite


@devices
@dtypes
@cases
@formats
def test_rowwise_is_the_oracle(
    case: TensorCase, dtype: torch.dtype, fp8: Format, device: str
) -> None:
    x = case.build(dtype, device)
    m, k = x.shape
    slot = place(device)
    x_fp8, x_fp8_t, inverse, inverse_t = ops.quantize_rowwise(
        x, slot.amax, slot.counts, float(fp8.largest), fp8 is E5M2, True, True
    )
    wanted, scale = numerics.quantize_rowwise(x, fp8.torch, float(fp8.largest))
    wanted_t, scale_t = numerics.quantize_rowwise(x.t(), fp8.torch, float(fp8.largest))
    assert same(x_fp8, zero_padded(wanted, m, up(k)))
    assert same(x_fp8_t, zero_padded(wanted_t, up(k), up(m)))
    assert torch.equal(inverse, scale.reciprocal())
    assert torch.equal(inverse_t[:k], scale_t.reciprocal())
    assert inverse_t.shape == (up(k), 1)
    assert inverse_t[k:].isfinite().all()
    values = oracle.numpy(x)
    assert np.array_equal(slot.amax.cpu().numpy(), oracle.amax(values), equal_nan=True)
    assert slot.counts.tolist() == oracle.counts(values, oracle.numpy(scale), fp8)


@given(
    rows=st.integers(0, 70),
    columns=st.integers(0, 70),
    e5m2=st.booleans(),
    exponent=st.integers(-30, 30),
    turned=st.booleans(),
)
def test_any_shape(rows: int, columns: int, e5m2: bool, exponent: int, turned: bool) -> None:
    fp8 = E5M2 if e5m2 else E4M3
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 2.0**exponent
    x = x.t() if turned else x
    slot = place("cpu", 3.0)
    x_fp8, x_fp8_t, inverse = quantize(x, slot, fp8)
    expected = oracle.cast(oracle.numpy(x), 3.0, fp8)
    m, k = x.shape
    assert x_fp8.shape == (m, up(k))
    assert x_fp8_t.shape == (up(k), up(m))
    assert np.array_equal(oracle.bytes_of(x_fp8[:, :k]), expected)
    assert np.array_equal(oracle.bytes_of(x_fp8_t[:k, :m]), expected.T)
    assert not x_fp8[:, k:].float().any()
    assert not x_fp8_t[k:].float().any()
    assert not x_fp8_t[:, m:].float().any()
    assert inverse.item() == np.float32(1) / np.float32(3)
    assert slot.counts.tolist() == oracle.counts(oracle.numpy(x), 3.0, fp8)


@devices
def test_observing_takes_the_maximum_and_adds(device: str) -> None:
    slot = place(device)
    for values in ([1.0, -5.0], [3.0, 2.0], [500.0, 2.0**-12]):
        quantize(torch.tensor([values], device=device), slot, E4M3)
    assert slot.amax.item() == 500
    assert slot.counts.tolist() == [1, 1, 0, 6]
    quantize(torch.tensor([[float("nan"), 1.0]], device=device), slot, E4M3)
    quantize(torch.tensor([[7.0, 1.0]], device=device), slot, E4M3)
    assert slot.amax.isnan()
    assert slot.counts.tolist() == [1, 1, 1, 10]


@devices
def test_without_observing_nothing_is_written(device: str) -> None:
    slot = place(device)
    x = torch.randn(4, 16, device=device)
    quantize(x, slot, E4M3, observe=False)
    ops.quantize_rowwise(x, slot.amax, slot.counts, 448.0, False, False, True)
    assert slot.amax.item() == 0
    assert slot.counts.tolist() == [0, 0, 0, 0]


@devices
def test_recording_moves_no_version(device: str) -> None:
    slot = place(device)
    versions = [t._version for t in slot]
    x = torch.randn(4, 16, device=device)
    quantize(x, slot, E4M3)
    ops.quantize_rowwise(x, slot.amax, slot.counts, 448.0, False, True, False)
    assert slot.amax.item() > 0
    assert [t._version for t in slot] == versions


def test_no_transpose_leaves_it_empty() -> None:
    slot = place("cpu")
    assert quantize(torch.ones(3, 5), slot, E4M3, transpose=False)[1].shape == (0, 0)
    _, rows_t, _, inverse_t = ops.quantize_rowwise(
        torch.ones(3, 5), slot.amax, slot.counts, 448.0, False, True, False
    )
    assert rows_t.shape == (0, 0)
    assert inverse_t.shape == (0, 1)


def test_the_returned_inverse_does_not_follow_the_slot() -> None:
    slot = place("cpu", 2.0)
    inverse = quantize(torch.ones(1, 16), slot, E4M3)[2]
    slot.scale.fill_(64.0)
    assert inverse.item() == 0.5


@devices
def test_a_cold_scale_is_replaced_by_the_live_one_until_warm(device: str) -> None:
    slot, other = place(device, 0.0), place(device, 4.0)
    x = torch.full((1, 16), 7.0, device=device)
    ops.mark_cold([slot.scale])
    try:
        assert not ops.cold_was_used([slot.scale])
        assert quantize(x, slot, E4M3)[2].item() == 1 / 64
        assert quantize(x, other, E4M3)[2].item() == 1 / 4
        assert ops.cold_was_used([slot.scale, other.scale])
        assert not ops.cold_was_used([other.scale])
        slot.scale.fill_(2.0)
        assert quantize(x, slot, E4M3)[2].item() == 1 / 64
    finally:
        ops.mark_warm([slot.scale])
    assert not ops.cold_was_used([slot.scale])
    assert quantize(x, slot, E4M3)[2].item() == 1 / 2


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 197])
def test_padded(size: int) -> None:
    assert ops.padded(size) == up(size)


def test_casts_of_tiny_gradients_live_and_by_scale_one() -> None:
    """Why the first step is two-pass: E5M2 at scale 1 flushes them."""
    x = torch.full((2, 16), 1e-6)
    slot = place("cpu")
    assert not quantize(x, slot, E5M2)[0].float().any()
    rows, _, inverse = quantize(x, slot, E5M2, live=True)
    assert numerics.sqnr(x, numerics.dequantize(rows, inverse)) > 40


# -- as operators -------------------------------------------------------------------------------


SHAPES = [(4, 16), (3, 7), (1, 1), (0, 16), (17, 33)]
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transpose", [True, False], ids=["both", "rows"])
@pytest.mark.parametrize("observe", [True, False], ids=["observing", "only"])
def test_opcheck(shape: tuple[int, int], transpose: bool, observe: bool) -> None:
    # The schema declares no mutation, on purpose (the docstring of the file): where the operator
    # records, the check of the schema must say so, and that is all it may say.
    checks = CHECKS[1:] if observe else CHECKS
    slot = place("cpu")
    x = torch.randn(shape, dtype=torch.bfloat16)
    for e5m2, live in ((False, False), (True, True)):
        torch.library.opcheck(
            torch.ops.fp8patch.quantize.default,
            (x, *slot, 448.0, e5m2, live, observe, transpose, transpose),
            test_utils=checks,
        )
    torch.library.opcheck(
        ops.quantize_rowwise,
        (x, slot.amax, slot.counts, 448.0, False, observe, transpose),
        test_utils=checks,
    )


@dtypes
def test_fake_outputs_are_like_real_ones(dtype: torch.dtype) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    slot = place("cpu")
    for case in TENSORS:
        x = case.build(dtype)
        for transpose in (True, False):
            real = [
                *quantize(x, slot, E5M2, transpose=transpose),
                *ops.quantize_rowwise(x, slot.amax, slot.counts, 448.0, False, False, transpose),
            ]
            with FakeTensorMode() as mode:
                fake_x, fake_slot = mode.from_tensor(x), Place(*map(mode.from_tensor, slot))
                fake = [
                    *quantize(fake_x, fake_slot, E5M2, transpose=transpose),
                    *ops.quantize_rowwise(fake_x, *fake_slot[1:], 448.0, False, False, transpose),
                ]
            for a, b in zip(real, fake, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), case.name


def test_without_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fp8patch.ops.triton.quantize", None)
    kernels.load.cache_clear()
    try:
        found = [kernels.load("quantize", "casts are slow") for _ in range(2)]
        silent = kernels.load("quantize")
    finally:
        kernels.load.cache_clear()
    assert (found, silent) == ([None, None], None)
    said = capsys.readouterr().err
    assert said.count("no Triton here") == 1
    assert said.endswith("so casts are slow.\n")
