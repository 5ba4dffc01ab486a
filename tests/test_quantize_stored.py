"""`quantize_form` of what is stored otherwise than it is cast: rounding, and dropout's gradient.

Unlike the activations (test_quantize_form.py) these are equal to the bit on a GPU, too.
"""

from typing import Any

import pytest
import torch
from interpreted import check_interpreted
from shapes import TENSORS, TensorCase, params
from test_quantize_form import SMALL, slot
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.quantize import mark_cold, mark_warm, quantize_now
from fp8patch.ops.quantize_form import STORED

FACTOR = 1 / 0.9
ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def dtypes(form: str) -> tuple[torch.dtype, torch.dtype]:
    """Of what is read, and of what is cast."""
    if form == "dropout":
        return torch.bfloat16, torch.bfloat16
    return torch.float32, ROUNDED[form.rpartition("_")[2]]


def mask_of(x: Tensor, form: str) -> Tensor | None:
    """Drops a third, laid out as x is; None where the form has no mask."""
    if "dropout" not in form:
        return None
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) > 0.3
    return torch.empty_like(x, dtype=torch.bool).copy_(kept)


def cast(
    form: str, x: Tensor, mask: Tensor | None, sums: bool = True, factor: float = FACTOR
) -> list[Tensor]:
    """(rows, transpose, scale_inv, column sums, amax, counts) of the operator."""
    amax, counts = slot(x.device.type)
    limit = numerics.FP8_MAX[numerics.E5M2]
    outputs = torch.ops.fp8patch.quantize_form.default(
        x, mask, form, torch.tensor(7.3, device=x.device), amax, counts, limit, True, True, True,
        sums, factor=factor,
    )  # fmt: skip
    return [*outputs, amax, counts]


def plain(form: str, x: Tensor, mask: Tensor | None, sums: bool = True) -> list[Any]:
    """The same, one operation after the other."""
    value = x.float()
    if mask is not None:
        factor = torch.where(mask, torch.tensor(FACTOR, dtype=torch.float32), torch.zeros(()))
        value = value * factor
    amax, counts = slot()
    limit = numerics.FP8_MAX[numerics.E5M2]
    outputs = quantize_now(
        value.to(dtypes(form)[1]), torch.tensor(7.3), amax, counts, limit, True, False, True, True,
        sums,
    )  # fmt: skip
    return [*outputs, amax, counts]


def equal(a: Tensor, b: Tensor) -> bool:
    """To the bit, with -0.0, but for what kind of nan it is."""
    a, b = a.cpu(), b.cpu()
    if a.dtype.itemsize == 1:
        nan = a.float().isnan() & b.float().isnan()
        return bool(((a.view(torch.uint8) == b.view(torch.uint8)) | nan).all())
    return torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))


# -- what it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("case", params(TENSORS))
def test_it_is_the_plain_operations(case: TensorCase, form: str) -> None:
    x = case.build(dtypes(form)[0])
    mask = mask_of(x, form)
    for a, b in zip(cast(form, x, mask), plain(form, x, mask), strict=True):
        assert a.shape == b.shape
        assert equal(a, b)


def test_signs_and_what_is_not_finite() -> None:
    x = torch.tensor([[1.0, -1.0, 0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0]] * 2)
    mask = torch.tensor([[True] * 8, [False] * 8])
    rows = cast("dropout_to_bf16", x, mask, factor=2.0)[0].float()[:, :8] / 7.3
    nan = torch.nan
    rounded = [0.9589, -0.9589, 0.0, -0.0]  # 2 * 7.3 is 14 in E5M2
    assert torch.allclose(rows[0, :4], torch.tensor(rounded) * 2, atol=1e-3)
    assert rows[0, 4:].nan_to_num(5.0).tolist() == pytest.approx([5.0, 5.0, 5.0, 3.836], abs=1e-3)
    assert equal(rows[1], torch.tensor([0.0, -0.0, 0.0, -0.0, nan, nan, nan, 0.0]))
    assert rows[1].signbit()[:4].tolist() == [False, True, False, True]


def test_it_is_pytorchs_dropout() -> None:
    x = torch.randn(SMALL)
    h = torch.randn(SMALL).requires_grad_()
    y, mask = torch.native_dropout(h, 0.1, True)
    y.backward(x)
    assert h.grad is not None
    assert equal(STORED["dropout_to_fp16"](x, mask, FACTOR), h.grad.half())


def test_a_wrong_factor_and_a_wrong_mask_are_noticed() -> None:
    x = torch.randn(SMALL)
    mask = mask_of(x, "dropout")
    assert mask is not None
    want = plain("dropout_to_bf16", x, mask)
    assert all(map(equal, cast("dropout_to_bf16", x, mask), want))
    assert not all(map(equal, cast("dropout_to_bf16", x, mask, factor=1.109375), want))
    assert not all(map(equal, cast("dropout_to_bf16", x, ~mask), want))


def test_rounding_first_makes_a_difference() -> None:
    x = torch.randn(64, 64)
    from_fp32 = quantize_now(
        x, torch.tensor(7.3), *slot(), 57344.0, True, False, False, True, True
    )  # fmt: skip
    assert not equal(from_fp32[0], cast("to_bf16", x, None)[0])


@pytest.mark.parametrize("form", ["to_bf16", "dropout"])
def test_a_cold_scale_is_replaced(form: str) -> None:
    x = torch.randn(SMALL).to(dtypes(form)[0])
    scale = torch.zeros(())
    mark_cold([scale])
    outputs = torch.ops.fp8patch.quantize_form.default(
        x, mask_of(x, form), form, scale, *slot(), 57344.0, True, True, True, False, factor=FACTOR
    )
    mark_warm([scale])
    *_, amax, _ = plain(form, x, mask_of(x, form))
    torch.testing.assert_close(outputs[2], amax.float() / 57344)


@pytest.mark.parametrize("form", STORED)
def test_opcheck(form: str) -> None:
    x = torch.randn(3, 7).to(dtypes(form)[0])
    arguments = (x, mask_of(x, form), form, torch.tensor(3.0), *slot())
    torch.library.opcheck(
        torch.ops.fp8patch.quantize_form.default,
        (*arguments, 448.0, False, False, True, True),
        {"factor": FACTOR},
        test_utils=("test_schema", "test_faketensor"),
    )


# -- the kernels -----------------------------------------------------------------------------------

# As in test_quantize_form.py. Values are exact in BF16, which the interpreter rounds its own way.
SCRIPT = """
import torch
from test_quantize_form import slot
from test_quantize_stored import STORED, cast, dtypes, mask_of
from fp8patch import numerics
from fp8patch.ops.triton import column_sums
from fp8patch.ops.triton.quantize import quantize as kernel

column_sums.PROGRAMS_STORED = 3
for shape in ((1, 1), (77, 70)):
    for form in STORED:
        x = torch.randint(-7, 8, shape).to(dtypes(form)[0])
        x[-1, -1] = 69632.0 if "fp16" not in form else 30000.0
        mask = mask_of(x, form)
        if mask is not None:
            mask[-1, -1] = True
        for sums in (False, True):
            want, want_t, inv, want_sums, amax, counts = cast(form, x, mask, sums, factor=0.5)
            place = slot()
            rows, rows_t, scale_inv, found = kernel(
                x, torch.tensor(7.3), *place, 57344.0, numerics.E5M2, live=False, observe=True,
                transpose=True, column_sums=sums, form=form, y=mask, factor=0.5)
            where = (shape, form, sums)
            for a, b in ((rows, want), (rows_t, want_t)):
                assert a.shape == b.shape, where
                wrong = (a.float() - b.float()).abs() > 0.5 * b.float().abs()
                assert not wrong.any(), where
            assert torch.equal(scale_inv, inv)
            assert torch.equal(place[0], amax), where
            assert place[1].tolist() == counts.tolist(), where
            if sums:
                torch.testing.assert_close(found, want_sums, rtol=1e-6, atol=1e-5)
print("done")
"""


def test_kernels_under_the_interpreter() -> None:
    check_interpreted(SCRIPT)


def check_on_gpu(form: str, x: Tensor, sums: bool) -> None:
    mask = mask_of(x, form)
    want = plain(form, x, mask, sums)
    got = cast(form, x.cuda(), None if mask is None else mask.cuda(), sums)
    *wanted, want_sums, want_amax, want_counts = want
    *found, got_sums, got_amax, got_counts = got
    assert all(map(equal, found, wanted))
    assert equal(got_amax, want_amax)
    assert got_counts.tolist() == want_counts.tolist()
    if sums:
        torch.testing.assert_close(
            got_sums.cpu(), want_sums, rtol=1e-4, atol=1e-3 * float(want_amax.nan_to_num(0)),
            equal_nan=True,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("case", params(TENSORS))
def test_kernel_is_the_plain_operations(case: TensorCase, form: str) -> None:
    for sums in (False, True):
        check_on_gpu(form, case.build(dtypes(form)[0]), sums)


@pytest.mark.gpu
@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("shape", [(4096, 1024), (3000, 1296), (1111, 1031)], ids=str)
def test_kernel_at_the_size_of_a_layer(shape: tuple[int, int], form: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtypes(form)[0])
    for sums in (False, True):
        check_on_gpu(form, x, sums)


@pytest.mark.gpu
def test_a_mask_that_starts_anywhere() -> None:
    x = torch.randn(33, 64)
    mask = mask_of(x, "dropout")
    assert mask is not None
    room = torch.zeros(33 * 64 + 1, dtype=torch.bool, device="cuda")
    shifted = room[1:].view(33, 64)
    shifted.copy_(mask)
    got = cast("dropout_to_bf16", x.cuda(), shifted)
    want = plain("dropout_to_bf16", x, mask)
    assert all(map(equal, got[:3], want[:3]))
