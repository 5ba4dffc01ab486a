"""The generator itself: a numerics test is only as good as the cases it gets."""

import pytest
import torch
from shapes import DTYPES, FINITE, GEMMS, TENSORS, GemmCase, TensorCase, params

BY_NAME = {case.name: case for case in TENSORS}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, so that nan equals nan and -0.0 is not 0.0."""
    as_int = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", params(TENSORS))
def test_a_case_is_what_it_says(case: TensorCase, dtype: torch.dtype) -> None:
    x = case.build(dtype)
    assert x.dtype == dtype
    assert x.dim() == 2
    assert same(x, case.build(dtype))
    assert bool(x.isfinite().all()) == (case in FINITE)


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(TENSORS)
    assert len({gemm.name for gemm in GEMMS}) == len(GEMMS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["transposed", "every_other_column", "gapped_rows", "expanded"])
def test_views_stay_views(name: str, dtype: torch.dtype) -> None:
    assert not BY_NAME[name].build(dtype).is_contiguous()


def test_the_special_values_are_there() -> None:
    bf16 = torch.bfloat16
    assert BY_NAME["negative_zeros"].build(bf16).signbit().all()
    tiny = torch.finfo(bf16).tiny
    subnormal = BY_NAME["subnormal"].build(bf16)
    assert (subnormal != 0).any()
    assert subnormal.abs().amax() < tiny
    half = BY_NAME["subnormal_fp16"].build(torch.float16)
    assert ((half != 0) & (half.abs() < torch.finfo(torch.float16).tiny)).any()
    assert BY_NAME["largest"].build(torch.float16).abs().amax() == 65504
    assert BY_NAME["inf"].build(bf16).isinf().any()
    assert BY_NAME["nan"].build(bf16).isnan().any()
    assert BY_NAME["no_rows"].build(bf16).shape == (0, 64)
    assert {1, 2, 197} <= {case.build(bf16).shape[0] for case in TENSORS}


@pytest.mark.parametrize("gemm", params(GEMMS))
def test_a_gemm_has_its_shapes(gemm: GemmCase) -> None:
    input, weight, grad_output = gemm.build()
    assert input.shape == (gemm.m, gemm.k)
    assert weight.shape == (gemm.n, gemm.k)
    assert grad_output.shape == (gemm.m, gemm.n)
    assert all(same(a, b) for a, b in zip(gemm.build(), gemm.build(), strict=True))


def test_gemms_cover_odd_tokens_and_misaligned_features() -> None:
    assert {0, 1, 2, 197} <= {gemm.m for gemm in GEMMS}
    assert {True, False} == {gemm.aligned for gemm in GEMMS}
