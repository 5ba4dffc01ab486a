"""Independent definitions of FP8 for tests: exact rationals, NumPy and ml_dtypes; no fp8patch.

Three ways to say the same thing, each used where it is strong: `round_exact` is the definition of
round to nearest even over the list of all values of a format (slow, any rational); `cast` is
ml_dtypes on whole arrays; the block formats are plain loops over blocks.
"""

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A small binary float: 1 sign bit, `exponent` bits, `mantissa` bits.

    Attributes:
        largest: Of its finite values.
        nan: The byte that torch and ml_dtypes give a positive nan.
        torch, numpy: The dtypes.
    """

    exponent: int
    mantissa: int
    largest: int
    nan: int
    torch: torch.dtype
    numpy: Any

    @cached_property
    def values(self) -> list[Fraction]:
        """All finite values >= 0; the place of a value is its byte."""
        bias, steps = 2 ** (self.exponent - 1) - 1, 2**self.mantissa
        found = []
        for e in range(2**self.exponent):
            for m in range(steps):
                power = max(e, 1) - bias - self.mantissa
                value = Fraction(m + (steps if e else 0)) * Fraction(2) ** power
                if value <= self.largest:
                    found.append(value)
        return found


E4M3 = Format(4, 3, 448, 0x7F, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn)
E5M2 = Format(5, 2, 57344, 0x7E, torch.float8_e5m2, ml_dtypes.float8_e5m2)
FORMATS = (E4M3, E5M2)


def round_exact(value: Fraction, to: Format) -> int:
    """The byte of |value| rounded to nearest even, saturating."""
    value = abs(value)
    values = to.values
    above = bisect_left(values, value)
    if above == len(values):
        return above - 1
    if values[above] == value:
        return above
    low, high = value - values[above - 1], values[above] - value
    if low == high:
        return above if above % 2 == 0 else above - 1
    return above if high < low else above - 1


def round_fp32(value: Fraction) -> float:
    """`value` rounded to FP32, to nearest even; inf past its range. Exact, as a Python float."""
    size = abs(value)
    if size == 0:
        return 0.0
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    # Python rounds a Fraction to the nearest integer, ties to even.
    rounded = round(size / step) * step
    if rounded >= Fraction(2) ** 128:
        return float("inf") if value > 0 else float("-inf")
    return float(rounded if value > 0 else -rounded)


def quantize_exact(x: float, scale: float, to: Format) -> int:
    """The byte that one value must become; both arguments are FP32 numbers."""
    if not np.isfinite(x):
        return to.nan
    product = round_fp32(Fraction(x) * Fraction(scale))
    size = Fraction(to.largest) if np.isinf(product) else Fraction(product)
    return round_exact(size, to) | (0x80 if np.signbit(x) else 0)


def numpy(x: Tensor) -> np.ndarray:
    """A tensor's values in FP32 (exact for FP16 and BF16)."""
    result: np.ndarray = x.detach().cpu().float().numpy()
    return result


def cast(x: np.ndarray, scale: Any, to: Format) -> np.ndarray:
    """FP8 bytes of FP32 `x`; `scale` FP32, a scalar or broadcasting."""
    with np.errstate(all="ignore"):
        product = x.astype(np.float32) * np.float32(scale)
        product = np.clip(product, -to.largest, to.largest)
        product = np.where(np.isfinite(x), product, np.float32(np.nan))
        return product.astype(to.numpy).view(np.uint8)  # type: ignore[no-any-return]


def amax(x: np.ndarray) -> np.float32:
    """max |x|; 0 of nothing; nan if there is one."""
    return np.float32(np.abs(x).max()) if x.size else np.float32(0)


def live_scale(live: Any, limit: float) -> np.ndarray:
    """limit / amax with amax at least 2^-108; 1 where amax is not finite."""
    live = np.asarray(live, np.float32)
    with np.errstate(all="ignore"):
        scale = np.float32(limit) / np.maximum(live, np.float32(2.0**-108))
    return np.where(np.isfinite(live), scale, np.float32(1)).astype(np.float32)


def counts(x: np.ndarray, scale: Any, to: Format) -> list[int]:
    """[clipped, flushed, not finite, all], one element at a time by what the words say."""
    beyond = {448: 464, 57344: 61440}[to.largest]
    clipped = flushed = odd = 0
    bytes_ = cast(x, scale, to).reshape(-1).tolist()
    with np.errstate(all="ignore"):
        products = (x * np.float32(scale)).reshape(-1).tolist()
    for value, product, byte in zip(x.reshape(-1).tolist(), products, bytes_, strict=True):
        if not np.isfinite(value):
            odd += 1
        elif abs(product) > beyond:
            clipped += 1
        elif value != 0 and byte & 0x7F == 0:
            flushed += 1
    return [clipped, flushed, odd, x.size]


def value(bytes_: np.ndarray, of: Format) -> np.ndarray:
    """FP64 values of FP8 bytes."""
    return bytes_.view(of.numpy).astype(np.float64)


def blockwise(x: np.ndarray, block: tuple[int, int], to: Format) -> tuple[np.ndarray, np.ndarray]:
    """(bytes [M, K], scale_inv [blocks, blocks]), block by block; ragged ones by what they hold."""
    bm, bk = block
    bytes_ = np.zeros(x.shape, np.uint8)
    grid = (-(-x.shape[0] // bm), -(-x.shape[1] // bk))
    inverse = np.zeros(grid, np.float32)
    for i in range(grid[0]):
        for j in range(grid[1]):
            here = np.s_[i * bm : (i + 1) * bm, j * bk : (j + 1) * bk]
            scale = live_scale(amax(x[here]), to.largest)
            bytes_[here] = cast(x[here], scale, to)
            inverse[i, j] = np.float32(1) / scale
    return bytes_, inverse


@cache
def _powers() -> list[Fraction]:
    return [Fraction(2) ** e for e in range(-127, 128)]


def mxfp8(x: np.ndarray, to: Format) -> tuple[np.ndarray, np.ndarray]:
    """(bytes [M, K], E8M0 bytes [M, K / 32]): the least power of two that no value overflows."""
    bytes_ = np.zeros(x.shape, np.uint8)
    exponents = np.zeros((x.shape[0], x.shape[1] // 32), np.uint8)
    for i, j in np.ndindex(*exponents.shape):
        here = np.s_[i, j * 32 : (j + 1) * 32]
        size = amax(x[here])
        if not np.isfinite(size):
            exponents[i, j] = 255
            bytes_[here] = to.nan
            continue
        least = bisect_left(_powers(), Fraction(float(size)) / to.largest)
        exponents[i, j] = least
        for k, v in enumerate(x[here].tolist()):
            exact = Fraction(v) / _powers()[least]
            bytes_[i, j * 32 + k] = round_exact(exact, to) | (0x80 if np.signbit(v) else 0)
    return bytes_, exponents


def bytes_of(x: Tensor) -> np.ndarray:
    """FP8 bytes of a torch tensor; every nan as the positive one (its sign carries nothing)."""
    fp8 = next(f for f in FORMATS if f.torch == x.dtype)
    return one_nan(x.detach().cpu().contiguous().view(torch.uint8).numpy(), fp8)


def one_nan(raw: np.ndarray, fp8: Format) -> np.ndarray:
    """`raw` with every nan as the positive one."""
    return np.where(np.isnan(value(raw, fp8)), fp8.nan, raw).astype(np.uint8)
