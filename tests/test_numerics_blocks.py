"""One scale a row (rowwise), a block (blockwise, MXFP8): the oracle against plain loops."""

import numpy as np
import oracle
import pytest
import torch
from oracle import FORMATS, Format
from shapes import DTYPES, TENSORS, TensorCase, params

from fp8patch import numerics

formats = pytest.mark.parametrize("fp8", FORMATS, ids=["e4m3", "e5m2"])
INF, NAN = float("inf"), float("nan")


@formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(TENSORS))
def test_rowwise_is_one_cast_a_row(case: TensorCase, dtype: torch.dtype, fp8: Format) -> None:
    x = case.build(dtype)
    x_fp8, scale = numerics.quantize_rowwise(x, fp8.torch, float(fp8.largest))
    assert scale.shape == (x.shape[0], 1)
    values, got = oracle.numpy(x), oracle.bytes_of(x_fp8)
    for i, row in enumerate(values):
        expected = oracle.live_scale(oracle.amax(row), fp8.largest)
        assert scale[i, 0].item() == expected
        assert np.array_equal(got[i], oracle.one_nan(oracle.cast(row, expected, fp8), fp8))


@formats
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (3, 16)], ids=str)
@pytest.mark.parametrize(
    "case",
    params(
        c
        for c in TENSORS
        if c.name
        in ("129x257 1x1 128x128 3x7 wide transposed one_outlier zeros inf_and_nan tinier".split())
    ),
)
def test_blockwise_is_one_cast_a_block(
    case: TensorCase, block: tuple[int, int], fp8: Format
) -> None:
    x = case.build(torch.bfloat16)
    x_fp8, inverse = numerics.quantize_blockwise(x, fp8.torch, block)
    expected, expected_inverse = oracle.blockwise(oracle.numpy(x), block, fp8)
    assert np.array_equal(oracle.bytes_of(x_fp8), oracle.one_nan(expected, fp8))
    assert np.array_equal(inverse.numpy(), expected_inverse)


MX = {
    "normal": torch.randn(5, 64, generator=torch.Generator().manual_seed(0)),
    "powers": torch.exp2(torch.arange(-126.0, 128).repeat_interleave(32)).reshape(-1, 32),
    "exactly_full": torch.tensor([448.0, 896.0, 57344.0, 449.0]).repeat_interleave(32).view(4, 32),
    "tiny": torch.randn(3, 32, generator=torch.Generator().manual_seed(1)) * 2.0**-130,
    "zeros": torch.zeros(2, 64),
    "largest": torch.full((1, 32), numerics.FP32_MAX),
    "signed_zeros": torch.full((1, 32), -0.0),
    "not_finite": torch.cat([torch.full((1, 32), INF), torch.full((1, 32), NAN)], 1),
}


@formats
@pytest.mark.parametrize("name", MX)
def test_mxfp8_takes_the_least_power_that_does_not_clip(name: str, fp8: Format) -> None:
    x = MX[name]
    x_fp8, exponent = numerics.quantize_mxfp8(x, fp8.torch)
    expected, expected_exponent = oracle.mxfp8(x.numpy(), fp8)
    assert exponent.dtype == torch.uint8
    assert np.array_equal(exponent.numpy(), expected_exponent)
    assert np.array_equal(oracle.bytes_of(x_fp8), oracle.one_nan(expected, fp8))


def test_mxfp8_block_with_one_inf_is_marked() -> None:
    x = torch.ones(2, 32)
    x[0, 3] = INF
    x_fp8, exponent = numerics.quantize_mxfp8(x)
    assert exponent[:, 0].tolist() == [255, int(exponent[1, 0])]
    assert int(exponent[1, 0]) == 127 - 8  # 1 / 448 rounds up to 2^-8
    assert x_fp8[0, 3].isnan()


def test_mxfp8_refuses_a_ragged_block() -> None:
    with pytest.raises(ValueError, match="K=33 is not a multiple of 32"):
        numerics.quantize_mxfp8(torch.zeros(2, 33))
