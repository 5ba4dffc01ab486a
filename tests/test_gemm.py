"""The scaled GEMM: its emulation against FP64, empties, biases; the GPU kernels against FP64."""

import pytest
import torch
from bars import FAST_ACCUM_ORACLE, ORACLE
from shapes import GEMMS, GemmCase, params
from torch import Tensor

from fp8patch import numerics
from fp8patch.numerics import E4M3, E5M2, sqnr
from fp8patch.ops.gemm import fp8_gemm
from fp8patch.ops.quantize import padded

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
OUT = (torch.float32, torch.bfloat16, torch.float16)
# What rounding to the output's dtype costs at least; FP32 only differs by the order of the sum.
BARS = {torch.float32: 100.0, torch.bfloat16: ORACLE["fprop_oracle"], torch.float16: 60.0}


def operand(x: Tensor, dtype: torch.dtype, rowwise: bool) -> tuple[Tensor, Tensor]:
    """x, zero-padded to multiples of 16 columns, in FP8, and its scale_inv."""
    x = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 16))
    if rowwise:
        x_fp8, scale = numerics.quantize_rowwise(x, dtype, numerics.FP8_MAX[dtype])
    else:
        scale = numerics.scale_from_amax(numerics.amax(x), numerics.FP8_MAX[dtype])
        x_fp8 = numerics.quantize(x, scale, dtype)
    return x_fp8, scale.reciprocal()


def operands(
    gemm: GemmCase, rowwise: bool, device: str = "cpu", first: torch.dtype = E4M3
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """a, b_t, their scale_inv, and the product in FP64."""
    input, weight, _ = gemm.build(torch.float32, device)
    weight = torch.nn.functional.pad(weight, (0, 0, 0, padded(gemm.n) - gemm.n))
    a, a_inv = operand(input, first, rowwise)
    b, b_inv = operand(weight, E4M3, rowwise)
    exact = (a.double() * a_inv.double()) @ (b.double() * b_inv.double()).t()
    return a, b, a_inv, b_inv, exact


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensor", "rowwise"])
@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("gemm", params(GEMMS))
def test_the_emulation_is_the_product(gemm: GemmCase, dtype: torch.dtype, rowwise: bool) -> None:
    for first in (E4M3, E5M2):
        a, b, a_inv, b_inv, exact = operands(gemm, rowwise, first=first)
        out = fp8_gemm(a, b, a_inv, b_inv, dtype, fast_accum=False, emulate=True)
        assert (out.shape, out.dtype) == (exact.shape, dtype)
        assert sqnr(exact, out) >= BARS[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["precise", "fast"])
@pytest.mark.parametrize("rowwise", [False, True], ids=["tensor", "rowwise"])
@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("gemm", params(GEMMS))
def test_the_kernel_is_the_product(
    gemm: GemmCase, dtype: torch.dtype, rowwise: bool, fast: bool
) -> None:
    bias = torch.linspace(-0.1, 0.1, padded(gemm.n), device="cuda")
    a, b, a_inv, b_inv, exact = operands(gemm, rowwise, "cuda")
    out = fp8_gemm(a, b, a_inv, b_inv, dtype, fast_accum=fast, emulate=False, bias=bias)
    assert (out.shape, out.dtype) == (exact.shape, dtype)
    assert sqnr(exact + bias.double(), out) >= (FAST_ACCUM_ORACLE if fast else 45.0)


def test_small_integers_come_out_exactly() -> None:
    a = torch.randint(-8, 9, (5, 64)).to(E4M3)
    b = torch.randint(-8, 9, (16, 64)).to(E4M3)
    one = torch.ones(())
    out = fp8_gemm(a, b, one, one * 0.5, torch.float32, fast_accum=False, emulate=True)
    assert torch.equal(out, (a.float() @ b.float().t()) * 0.5)


@devices
@pytest.mark.parametrize("dtype", OUT, ids=str)
@pytest.mark.parametrize("bias_dtype", OUT, ids=str)
def test_a_bias_is_added_before_the_rounding(
    dtype: torch.dtype, bias_dtype: torch.dtype, device: str
) -> None:
    a, b, a_inv, b_inv, exact = operands(GEMMS[1], False, device)
    bias = torch.linspace(-3, 3, b.shape[0], device=device).to(bias_dtype)
    out = fp8_gemm(a, b, a_inv, b_inv, dtype, fast_accum=False, emulate=device == "cpu", bias=bias)
    assert out.dtype == dtype
    wanted = exact + bias.double()
    if device == "cpu":
        one_rounding = (exact.float() + bias.float()).to(dtype)
        assert sqnr(one_rounding, out) > 70
    assert sqnr(wanted, out) >= 45


@devices
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("contracted", [0, 16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_empty_operands(rows: int, contracted: int, with_bias: bool, device: str) -> None:
    a = torch.zeros(rows, contracted, device=device).to(E4M3)
    b = torch.zeros(32, contracted, device=device).to(E4M3)
    one = torch.ones((), device=device)
    bias = torch.arange(32.0, device=device) if with_bias else None
    out = fp8_gemm(
        a, b, one, one, torch.bfloat16, fast_accum=True, emulate=device == "cpu", bias=bias
    )
    assert (out.shape, out.dtype) == ((rows, 32), torch.bfloat16)
    row = torch.zeros(32, device=device) if bias is None else bias
    assert torch.equal(out, row.bfloat16().expand(rows, 32))


def test_autocast_does_not_reach_the_emulation() -> None:
    a, b, a_inv, b_inv, _ = operands(GEMMS[6], False)
    plain = fp8_gemm(a, b, a_inv, b_inv, torch.float32, fast_accum=False, emulate=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = fp8_gemm(a, b, a_inv, b_inv, torch.float32, fast_accum=False, emulate=True)
    assert torch.equal(inside, plain)


def test_nan_spreads_over_its_row_alone() -> None:
    x = torch.ones(4, 16)
    x[2, 5] = float("inf")
    a, one = numerics.quantize(x, torch.ones(()), E4M3), torch.ones(())
    b = torch.ones(16, 16).to(E4M3)
    out = fp8_gemm(a, b, one, one, torch.bfloat16, fast_accum=True, emulate=True)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()
