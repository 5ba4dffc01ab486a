"""The oracle against independent definitions: exact rationals, ml_dtypes, NumPy loops."""

from collections import deque
from fractions import Fraction

import ml_dtypes
import numpy as np
import oracle
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import E4M3, E5M2, FORMATS, Format
from shapes import DTYPES, TENSORS, TensorCase, params
from torch import Tensor

from fp8patch import numerics

formats = pytest.mark.parametrize("fp8", FORMATS, ids=["e4m3", "e5m2"])
INF, NAN = float("inf"), float("nan")

floats = st.floats(width=32)
positive = st.floats(min_value=2.0**-149, max_value=numerics.FP32_MAX, width=32)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65536 numbers of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


# -- the independent definitions agree with each other --------------------------------------------


@formats
def test_the_list_of_values_is_the_format(fp8: Format) -> None:
    listed = np.array([float(v) for v in fp8.values])
    assert np.array_equal(oracle.value(np.arange(len(listed), dtype=np.uint8), fp8), listed)
    assert listed[-1] == fp8.largest == numerics.FP8_MAX[fp8.torch]
    step = Fraction(2) ** (Fraction(fp8.largest).numerator.bit_length() - 1 - fp8.mantissa)
    assert fp8.largest + step / 2 == numerics.CLIPS_ABOVE[fp8.torch]


@given(positive, positive)
def test_exact_fp32_rounding_is_fp32_rounding(a: float, b: float) -> None:
    with np.errstate(all="ignore"):
        assert oracle.round_fp32(Fraction(a) * Fraction(b)) == np.float32(a) * np.float32(b)
        assert oracle.round_fp32(Fraction(a) / Fraction(b)) == np.float32(a) / np.float32(b)


# -- quantize -------------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_rounds_as_exact_arithmetic_says(
    fp8: Format, dtype: torch.dtype
) -> None:
    x = every_pattern(dtype)
    got = oracle.bytes_of(numerics.quantize(x, scalar(1.0), fp8.torch))
    values = x.float().tolist()
    # A value and its negative differ in the sign bit; computed once, because it is slow.
    exact = {v: oracle.quantize_exact(v, 1.0, fp8) for v in values if v >= 0}
    exact |= {-v: byte | 0x80 for v, byte in exact.items() if 0 < v < INF} | {-INF: fp8.nan}
    wanted = [exact.get(v, fp8.nan) | (0x80 if v == 0 and np.signbit(v) else 0) for v in values]
    assert np.array_equal(got, np.array(wanted, np.uint8))


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "scale", [1.0, 2.0**-8, 2.0**20, 448 / 3.3, 57344 / 1e-6, 1e-30, 3e38, 1e-40]
)
def test_every_16_bit_value_at_other_scales(fp8: Format, dtype: torch.dtype, scale: float) -> None:
    x = every_pattern(dtype)
    got = oracle.bytes_of(numerics.quantize(x, scalar(scale), fp8.torch))
    assert np.array_equal(got, oracle.one_nan(oracle.cast(oracle.numpy(x), scale, fp8), fp8))


@formats
@given(floats, positive)
@example(464.0, 1.0)
@example(-464.00003, 1.0)
@example(61440.0, 1.0)
@example(3.4e38, 3.4e38)
@example(2.0**-149, 2.0**10)
@example(-(2.0**-133), 2.0**127)
@example(-0.0, 5.0)
def test_any_fp32_value_rounds_as_exact_arithmetic_says(
    fp8: Format, x: float, scale: float
) -> None:
    got = oracle.bytes_of(numerics.quantize(torch.tensor([x]), scalar(scale), fp8.torch))
    assert got[0] == oracle.quantize_exact(x, scale, fp8)


@formats
def test_every_tie_goes_to_even(fp8: Format) -> None:
    pairs = list(zip(fp8.values, fp8.values[1:], strict=False))
    middles = torch.tensor([float((a + b) / 2) for a, b in pairs])
    for x in (middles, -middles):
        got = oracle.bytes_of(numerics.quantize(x, scalar(1.0), fp8.torch)) & 0x7F
        even = [i if i % 2 == 0 else i + 1 for i in range(len(pairs))]
        assert got.tolist() == even
    up = oracle.bytes_of(numerics.quantize(middles.nextafter(scalar(INF)), scalar(1.0), fp8.torch))
    down = oracle.bytes_of(
        numerics.quantize(middles.nextafter(scalar(0.0)), scalar(1.0), fp8.torch)
    )
    assert up.tolist() == list(range(1, len(fp8.values)))
    assert down.tolist() == list(range(len(pairs)))


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saturation_and_what_is_not_finite(fp8: Format, dtype: torch.dtype) -> None:
    big = torch.finfo(dtype).max
    x = torch.tensor([big, -big, INF, -INF, NAN, 0.0, -0.0]).to(dtype)
    out = numerics.quantize(x, scalar(1e6), fp8.torch).float()
    assert out[:2].tolist() == [fp8.largest, -fp8.largest]
    assert out[2:5].isnan().all()
    assert out[5:].tolist() == [0, 0]
    assert out[5:].signbit().tolist() == [False, True]


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(TENSORS))
def test_tensors_equal_ml_dtypes(case: TensorCase, dtype: torch.dtype, fp8: Format) -> None:
    x = case.build(dtype)
    live = numerics.amax(x)
    assert np.array_equal(live.numpy(), oracle.amax(oracle.numpy(x)), equal_nan=True)
    scale = numerics.scale_from_amax(live, fp8.largest)
    assert np.array_equal(scale.numpy(), oracle.live_scale(live.numpy(), fp8.largest))
    out = numerics.quantize(x, scale, fp8.torch)
    expected = oracle.one_nan(oracle.cast(oracle.numpy(x), scale.item(), fp8), fp8)
    assert np.array_equal(oracle.bytes_of(out), expected)
    back = numerics.dequantize(out, scale.reciprocal()).numpy()
    inverse = np.float32(1) / scale.numpy()
    values = oracle.value(expected, fp8).astype(np.float32) * inverse
    assert np.array_equal(back, values, equal_nan=True)


def test_fp32_does_not_pass_through_bf16() -> None:
    # Just past the tie between 16 and 18; BF16 would round it back onto the tie, and so to 16.
    x = torch.tensor([17.0 + 2**-15])
    assert numerics.quantize(x, scalar(1.0), numerics.E4M3).item() == 18
    assert numerics.quantize(x.bfloat16(), scalar(1.0), numerics.E4M3).item() == 16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_that_fp8_holds_come_back(dtype: torch.dtype) -> None:
    x = torch.arange(-16, 17).to(dtype)
    assert numerics.quantize(x, scalar(1.0), numerics.E4M3).float().tolist() == x.tolist()


# -- amax, scale, counts --------------------------------------------------------------------------


@given(st.lists(floats, max_size=8))
def test_amax(values: list[float]) -> None:
    got = numerics.amax(torch.tensor(values, dtype=torch.float32)).item()
    if any(np.isnan(v) for v in values):
        assert np.isnan(got)
    else:
        assert got == max((abs(v) for v in values), default=0.0)


def test_amax_of_doubles() -> None:
    assert torch.equal(numerics.amax(torch.tensor([-3.0, 2.0], dtype=torch.float64)), scalar(3.0))


@formats
@pytest.mark.parametrize("margin", [0, 1, 5])
@given(live=positive)
@example(live=2.0**-61)
@example(live=2.0**-149)
def test_the_scale_is_the_rounded_quotient(fp8: Format, margin: int, live: float) -> None:
    limit = fp8.largest * 2.0**-margin
    scale = numerics.scale_from_amax(scalar(live), limit).item()
    floor = max(Fraction(live), Fraction(2) ** -108)
    assert scale == oracle.round_fp32(Fraction(limit) / floor)
    assert 0 < scale < INF
    inverse = np.float32(1) / np.float32(scale)
    assert np.isfinite(inverse)
    # The amax itself lands within one FP32 rounding of the limit: it never clips.
    assert live * scale <= limit * (1 + 2.0**-23)


def test_the_scale_of_nothing_and_of_what_is_not_finite() -> None:
    live = torch.tensor([0.0, INF, NAN])
    scale = numerics.scale_from_amax(live, 448.0)
    assert scale.tolist() == [448.0 * 2**108, 1.0, 1.0]


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(TENSORS))
def test_counts_equal_a_count(case: TensorCase, dtype: torch.dtype, fp8: Format) -> None:
    x = case.build(dtype)
    for scale in (1.0, 300.0, 2.0**-12):
        x_fp8 = numerics.quantize(x, scalar(scale), fp8.torch)
        got = numerics.counts(x, scalar(scale), x_fp8)
        assert got.dtype == torch.int64
        assert got.tolist() == oracle.counts(oracle.numpy(x), scale, fp8)


def test_counts_at_the_edges() -> None:
    x = torch.tensor([464.0, 464.0001, -465.0, 2**-10, 2**-9 * 0.51, -0.0, 0.0, INF, NAN])
    x_fp8 = numerics.quantize(x, scalar(1.0), numerics.E4M3)
    # 2^-10 is a tie between 0 and the smallest value, 2^-9: it goes to 0.
    assert numerics.counts(x, scalar(1.0), x_fp8).tolist() == [2, 1, 2, 9]
    y = torch.tensor([61440.0, 61441.0, -70000.0, 2**-17, 2**-17 * 1.01])
    y_fp8 = numerics.quantize(y, scalar(1.0), numerics.E5M2)
    assert numerics.counts(y, scalar(1.0), y_fp8).tolist() == [2, 1, 0, 5]


# -- delayed scaling against a loop ---------------------------------------------------------------


class Plain:
    """One slot of delayed scaling, as one would write it first."""

    def __init__(self, length: int, limit: float, algo: str) -> None:
        self.history: deque[np.float32] = deque(maxlen=length)
        self.limit, self.algo, self.scale = np.float32(limit), algo, np.float32(0)

    def step(self, pending: float) -> None:
        if not np.isfinite(pending) or pending == 0:
            return
        self.history.append(np.float32(pending))
        chosen = max(self.history) if self.algo == "max" else self.history[-1]
        with np.errstate(over="ignore"):
            scale = self.limit / chosen
        self.scale = min(scale, np.float32(numerics.FP32_MAX))


observed = st.one_of(
    st.sampled_from([0.0, INF, NAN, 2.0**-149, numerics.FP32_MAX, 1.0]),
    st.floats(min_value=0, width=32),
)


@given(
    length=st.sampled_from([1, 2, 3, 16]),
    algo=st.sampled_from(["max", "most_recent"]),
    margin=st.integers(0, 4),
    steps=st.lists(st.tuples(observed, observed, observed), max_size=40),
)
def test_the_delayed_update_is_the_loop(
    length: int, algo: str, margin: int, steps: list[tuple[float, float, float]]
) -> None:
    limits = [448.0 * 2.0**-margin, 448.0, 57344.0 * 2.0**-margin]
    plain = [Plain(length, limit, algo) for limit in limits]
    history, cursor = torch.zeros(3, length), torch.zeros(3, dtype=torch.int64)
    pending, scale, limit = torch.zeros(3), torch.zeros(3), torch.tensor(limits)
    for step in steps:
        pending.copy_(torch.tensor(step))
        numerics.delayed_update(history, cursor, pending, scale, limit, algo)
        assert pending.tolist() == [0, 0, 0]
        for row, one, amax in zip(range(3), plain, step, strict=True):
            one.step(amax)
            assert scale[row].item() == one.scale
            count = int(cursor[row])
            ring = [history[row, i % length].item() for i in range(max(0, count - length), count)]
            assert ring == [float(v) for v in one.history]


@given(steps=st.lists(st.tuples(observed, observed, observed), max_size=40))
def test_histories_of_several_lengths_in_one_tensor(
    steps: list[tuple[float, float, float]],
) -> None:
    lengths = (1, 5, 16)
    plain = [Plain(length, 448.0, "max") for length in lengths]
    history, cursor = torch.zeros(3, 16), torch.zeros(3, dtype=torch.int64)
    pending, scale, limit = torch.zeros(3), torch.zeros(3), torch.full((3,), 448.0)
    for step in steps:
        pending.copy_(torch.tensor(step))
        numerics.delayed_update(
            history, cursor, pending, scale, limit, "max", torch.tensor(lengths)
        )
        for row, one, amax in zip(range(3), plain, step, strict=True):
            one.step(amax)
            assert scale[row].item() == one.scale
            assert not history[row, lengths[row] :].any()


def test_an_update_of_a_strided_view_in_place() -> None:
    """The bank's pending and scale are columns of wider tensors."""
    wide = torch.full((2, 4), 7.0)
    scale = torch.zeros(2, 4)
    history, cursor = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    limit = torch.tensor([448.0, 448.0])
    numerics.delayed_update(history, cursor, wide[:, 0], scale[:, 0], limit, "max")
    assert wide.tolist() == [[0.0, 7.0, 7.0, 7.0]] * 2
    assert scale.tolist() == [[64.0, 0.0, 0.0, 0.0]] * 2


# -- dB -------------------------------------------------------------------------------------------


def test_sqnr() -> None:
    x = torch.tensor([3.0, 4.0])
    assert numerics.sqnr(x, x) == INF
    assert numerics.sqnr(x, x + torch.tensor([0.3, 0.4])) == pytest.approx(20.0, abs=1e-5)
    assert numerics.sqnr(x, torch.zeros(2)) == 0


def test_ml_dtypes_is_another_implementation() -> None:
    """ml_dtypes does not go through torch: its nan bytes differ in nothing but the sign."""
    assert np.float32(1e9).astype(ml_dtypes.float8_e4m3fn).view(np.uint8) in (0x7F, 0xFF)
    assert E4M3.values[1] == Fraction(1, 512)
    assert E5M2.values[1] == Fraction(1, 65536)
