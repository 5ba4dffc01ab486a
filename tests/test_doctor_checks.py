"""What `doctor` tests: right here, and a planted fault in each is seen."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.doctor import casts, gemms
from fp8patch.doctor.gemms import BAR_DB, KINDS, Kind, Operand

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


# -- GEMMs ----------------------------------------------------------------------------------------


def test_every_kind_is_right_when_emulated() -> None:
    for test in gemms.check_gemms(None):
        assert test.hardware is None
        assert test.emulated.ok, f"{test.kind}: {test.emulated.detail}"
        # E5M2 has one bit less than E4M3.
        assert (24 if "E5M2" in test.operands else 28) < test.rounding_db < 30


@kinds
def test_the_oracle_is_that_of_an_independent_cast(kind: Kind) -> None:
    """ml_dtypes and plain loops over blocks, instead of `numerics`."""
    # Exact rationals, one element at a time, are slow.
    rows = 2 if kind.name.startswith("MX") else None
    for x, cast in zip(gemms._data(kind), kind.cast, strict=True):
        operand = cast(x[:rows])
        fp8 = next(f for f in oracle.FORMATS if f.torch == operand.values.dtype)
        raw, wide = _independent(oracle.numpy(x[:rows]), kind, cast, fp8)
        np.testing.assert_array_equal(operand.exact().numpy(), oracle.value(raw, fp8) * wide)


def _independent(x: np.ndarray, kind: Kind, cast: Any, fp8: oracle.Format) -> tuple[Any, Any]:
    """(bytes, scale_inv of each in FP64)"""
    if kind.name.startswith("MX"):
        raw, exponents = oracle.mxfp8(x, fp8)
        return raw, np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 32, axis=1)
    if "128" in kind.name:
        high, wide = cast.keywords["block"]
        raw, inverse = oracle.blockwise(x, (high, wide), fp8)
        return raw, np.repeat(np.repeat(inverse.astype(np.float64), high, 0), wide, 1)
    by_row = kind.name == "rowwise"
    live = np.abs(x).max(axis=1, keepdims=True) if by_row else oracle.amax(x)
    scale = oracle.live_scale(live, fp8.largest)
    return oracle.cast(x, scale, fp8), (np.float32(1) / scale).astype(np.float64)


def _swapped(kind: Kind, change: Callable[[Operand], Operand]) -> Any:
    """The test of `kind` with an emulation that gets a changed second operand."""
    emulated = kind.emulated
    wrong = dataclasses.replace(kind, emulated=lambda a, b, where: emulated(a, change(b), where))
    return gemms._check(wrong, None)


@kinds
def test_a_scale_that_is_one_percent_off_is_seen(kind: Kind) -> None:
    def off(operand: Operand) -> Operand:
        scale = operand.scale_inv
        scale = scale * 1.01 if scale.is_floating_point() else scale
        return dataclasses.replace(operand, scale_inv=scale, wide=operand.wide * 1.01)

    test = _swapped(kind, off)
    assert test.emulated.ran
    assert not test.emulated.ok
    assert f"{test.emulated.db:.1f} dB" in test.emulated.detail
    assert 35 < test.emulated.db < BAR_DB


@pytest.mark.parametrize("kind", KINDS[2:], ids=lambda kind: kind.name)
def test_scales_of_other_rows_are_seen(kind: Kind) -> None:
    def rolled(operand: Operand) -> Operand:
        step = 128 if "128x128" in kind.name else 1
        return dataclasses.replace(
            operand, scale_inv=operand.scale_inv.roll(1, 0), wide=operand.wide.roll(step, 0)
        )

    assert _swapped(kind, rolled).emulated.db < 20


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind.name)
def test_the_call_of_the_hardware_gemm(kind: Kind) -> None:
    """PyTorch's CPU has these three: the same call, without a GPU."""
    test = gemms._check(kind, "cpu")
    assert test.hardware is not None
    assert test.hardware.ok, test.hardware.detail


def test_what_a_library_refuses_is_its_answer() -> None:
    test = gemms._check(KINDS[3], "cpu")
    assert test.hardware is not None
    assert not test.hardware.ran
    assert test.hardware.detail.startswith("Invalid scaling configuration")
    assert "\n" not in test.hardware.detail


def test_nan_is_a_failure() -> None:
    bad = dataclasses.replace(KINDS[0], emulated=lambda a, b, d: torch.full((256, 384), torch.nan))
    outcome = gemms._check(bad, None).emulated
    assert (outcome.ran, outcome.ok) == (True, False)


def test_the_layouts_that_cublas_documents() -> None:
    x = torch.arange(256 * 8, dtype=torch.int64)
    exponent = (x % 251).to(torch.uint8).reshape(256, 8)
    flat = gemms.swizzled(exponent).view(torch.uint8)
    for row, col in ((0, 0), (1, 0), (32, 0), (31, 3), (127, 5), (128, 0), (255, 7)):
        tile = (row // 128) * 2 + col // 4
        place = tile * 512 + (row % 128 % 32) * 16 + (row % 128 // 32) * 4 + col % 4
        assert flat[place] == exponent[row, col]
    columns = gemms.column_major(torch.zeros(5, 3))
    assert (tuple(columns.shape), columns.stride()) == ((5, 3), (1, 5))


# -- casts ----------------------------------------------------------------------------------------


def test_the_casts_are_right_here() -> None:
    for test in casts.check_casts("cpu"):
        assert test.outcome.ok, f"{test.name}: {test.outcome.detail}"


def _bit(x: Tensor) -> None:
    x.view(torch.uint8)[5, 7] ^= 1


@pytest.mark.parametrize(
    ("part", "spoil"),
    [
        ("values", lambda found, amax, counts: _bit(found[0])),
        ("transpose", lambda found, amax, counts: _bit(found[1])),
        # The padding of the transpose, which the wgrad GEMM contracts over.
        ("transpose", lambda found, amax, counts: found[1].view(torch.uint8)[3, -1].fill_(1)),
        ("scale_inv", lambda found, amax, counts: found[2].mul_(1 + 1e-7)),
        ("amax", lambda found, amax, counts: amax.zero_()),
        ("counts", lambda found, amax, counts: counts[1].add_(1)),
        ("column sums", lambda found, amax, counts: found[3].mul_(1.01)),
    ],
)
def test_a_cast_that_is_a_bit_off_is_seen(
    part: str, spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = casts.quantize

    def wrong(*args: Any) -> Any:
        found = tuple(tensor.clone() for tensor in right(*args))
        spoil(found, args[2], args[3])
        return found

    monkeypatch.setattr(casts, "quantize", wrong)
    details = [test.outcome.detail for test in casts.check_casts("cpu")]
    assert details == [f"not equal to the oracle: {part}"] * 3 + ["", "", ""]


def test_a_kernel_that_does_not_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("ptxas\nfatal: unknown target")

    monkeypatch.setattr(casts, "quantize_rowwise", fails)
    outcome = casts.check_casts("cpu")[3].outcome
    assert (outcome.ran, outcome.ok, outcome.detail) == (
        False,
        False,
        "ptxas fatal: unknown target",
    )


def test_an_update_that_forgets_the_oldest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(history: Tensor, cursor: Tensor, *rest: Any) -> None:
        numerics.delayed_update(history[:, :15], cursor, *rest)

    monkeypatch.setattr(casts, "delayed_update", wrong)
    detail = casts.check_casts("cpu")[4].outcome.detail
    assert detail.startswith("not equal to the oracle: history (max)")


def test_a_norm_that_is_one_percent_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = casts.norm
    monkeypatch.setattr(casts, "norm", lambda *a: tuple(x * 1.01 for x in right(*a)))
    detail = casts.check_casts("cpu")[5].outcome.detail
    assert detail == "not equal to the oracle: LayerNorm, RMSNorm"
