"""`quantize_form`: on a CPU its definition, under Triton's interpreter the kernels' addressing, and
on a GPU the kernels against that definition."""

from typing import Any

import pytest
import torch
from interpreted import check_interpreted
from shapes import TENSORS, TensorCase, params
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.quantize import mark_cold, mark_warm, quantize_now
from fp8patch.ops.quantize_form import FORMS

GELU = torch.nn.functional.gelu
SMALL = (13, 48)


def slot(device: str = "cpu") -> tuple[Tensor, Tensor]:
    return torch.zeros((), device=device), torch.zeros(4, dtype=torch.int64, device=device)


def cast(form: str, x: Tensor, y: Tensor | None, e5m2: bool = False, sums: bool = True) -> Any:
    """(rows, transpose, scale_inv, column sums, amax, counts) of the operator."""
    amax, counts = slot(x.device.type)
    scale = torch.tensor(7.3, device=x.device)
    limit = numerics.FP8_MAX[numerics.E5M2 if e5m2 else numerics.E4M3]
    outputs = torch.ops.fp8patch.quantize_form.default(
        x, y, form, scale, amax, counts, limit, e5m2, True, True, sums
    )
    return *outputs, amax, counts


def operands(form: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(0)
    x, y = (torch.randn(shape) * 2).to(dtype), torch.randn(shape).to(dtype)
    return x, None if form in ("gelu", "gelu_tanh") else y


# -- what it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_pytorchs_operators(form: str) -> None:
    x = torch.linspace(-6, 6, 997)
    y = torch.linspace(-2, 3, 997)
    x_64, y_64 = x.double().requires_grad_(), y.double()
    if form == "silu_mul":
        want = torch.nn.functional.silu(x_64) * y_64
    else:
        want = GELU(x_64, approximate="tanh" if "tanh" in form else "none")
    if form.endswith("backward"):
        (want,) = torch.autograd.grad(want, x_64, y_64)
    torch.testing.assert_close(FORMS[form](x, y).double(), want.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_form_and_then_the_cast(form: str) -> None:
    x, y = operands(form, SMALL, torch.bfloat16)
    *got, amax, counts = cast(form, x, y, e5m2=True)
    value = FORMS[form](x, x if y is None else y)
    assert value.dtype == torch.bfloat16
    place = slot()
    want = quantize_now(
        value, torch.tensor(7.3), *place, numerics.FP8_MAX[numerics.E5M2], True, False, True, True,
        True,
    )  # fmt: skip
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, want, strict=True))
    assert amax == place[0] == value.abs().max()
    assert torch.equal(counts, place[1])


def test_a_cold_scale_is_replaced() -> None:
    x, _ = operands("gelu", SMALL, torch.bfloat16)
    scale = torch.zeros(())
    mark_cold([scale])
    outputs = torch.ops.fp8patch.quantize_form.default(
        x, None, "gelu", scale, *slot(), 448.0, False, True, True, False
    )
    mark_warm([scale])
    torch.testing.assert_close(outputs[2], FORMS["gelu"](x, x).abs().max().float() / 448)
    assert outputs[3].numel() == 0


@pytest.mark.parametrize("form", ["gelu", "gelu_backward"])
def test_opcheck(form: str) -> None:
    x, y = operands(form, (3, 7), torch.bfloat16)
    arguments = (x, y, form, torch.tensor(3.0), *slot(), 448.0, False, False, True, True)
    torch.library.opcheck(
        torch.ops.fp8patch.quantize_form.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )


# -- the kernels -----------------------------------------------------------------------------------

# The interpreter is chosen when Triton is imported, so it gets a process of its own. It rounds FP8
# and BF16 in ways of its own (test_triton_quantize.py): values are checked as FP32, to a few steps.
SCRIPT = """
import torch
from test_quantize_form import SMALL, cast, operands, slot
from fp8patch import numerics
from fp8patch.ops.quantize_form import FORMS
from fp8patch.ops.triton import column_sums
from fp8patch.ops.triton.quantize import quantize as kernel

column_sums.PROGRAMS_FORMED = 3
for shape in ((1, 1), (77, 130)):
    for form in FORMS:
        sums = form.endswith("backward")
        x, y = operands(form, shape, torch.float32)
        x[-1, -1] = 90.0  # an outlier in a tile that is not whole
        want, want_t, inv, want_sums, amax, counts = cast(form, x, y)
        place = slot()
        rows, rows_t, scale_inv, found = kernel(
            x, torch.tensor(7.3), *place, 448.0, numerics.E4M3, live=False, observe=True,
            transpose=True, column_sums=sums, form=form, y=y)
        where = (shape, form)
        for a, b in ((rows, want), (rows_t, want_t)):
            assert a.shape == b.shape, where
            # A step is an eighth; half is lost where rounding loses a carry.
            wrong = (a.float() - b.float()).abs() > 0.5 * b.float().abs() + 0.01
            assert not wrong.any(), where
        assert torch.equal(scale_inv, inv)
        torch.testing.assert_close(place[0], amax, rtol=1e-5, atol=0)
        assert place[1][[0, 2, 3]].tolist() == counts[[0, 2, 3]].tolist(), where
        if sums:
            torch.testing.assert_close(found, want_sums, rtol=1e-4, atol=1e-4)
print("done")
"""


def test_kernels_under_the_interpreter() -> None:
    check_interpreted(SCRIPT)


def ordinal(x: Tensor) -> Tensor:
    """FP8 as integers in the order of their values; all nan are one, far away."""
    code = x.view(torch.uint8).int()
    return torch.where(x.float().isnan(), 1000, torch.where(code < 128, code, 128 - code))


def far(a: Tensor, b: Tensor) -> tuple[int, float]:
    """The most steps between two FP8 tensors, and the part of them that is not equal."""
    steps = (ordinal(a) - ordinal(b)).abs()
    return int(steps.max()), float((steps > 0).float().mean())


def as_in_training(form: str, x: Tensor, y: Tensor | None, device: str) -> list[Tensor]:
    """What goes forward in E4M3, gradients in E5M2 with column sums."""
    back = form.endswith("backward")
    x, y = x.to(device), None if y is None else y.to(device)
    return [t.cpu() for t in cast(form, x, y, e5m2=back, sums=back)]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", params(TENSORS))
def test_kernel_against_the_definition(case: TensorCase, form: str) -> None:
    x = case.build(torch.bfloat16)
    y = x.flip(0) if form == "silu_mul" else operands(form, tuple(x.shape), x.dtype)[1]
    want, got = (as_in_training(form, x, y, device) for device in ("cpu", "cuda"))
    assert torch.equal(want[2], got[2])
    assert want[4].isfinite() == got[4].isfinite()
    if want[4].isfinite():
        assert all(far(a, b)[0] <= 1 for a, b in zip(want[:2], got[:2], strict=True) if a.numel())
        # One step of BF16.
        torch.testing.assert_close(want[4], got[4], rtol=2**-7, atol=1e-30)
    assert want[5][3] == got[5][3] == x.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(4096, 1024), (3000, 1296), (1111, 1031)], ids=str)
def test_kernel_at_the_size_of_a_layer(shape: tuple[int, int], form: str) -> None:
    x, y = operands(form, shape, torch.bfloat16)
    want, got = (as_in_training(form, x, y, device) for device in ("cpu", "cuda"))
    for a, b in zip(want[:2], got[:2], strict=True):
        most, part = far(a, b)
        assert most <= 1
        assert part < 1e-3
    torch.testing.assert_close(want[4], got[4], rtol=2**-7, atol=0)
    if form.endswith("backward"):
        assert numerics.sqnr(want[3], got[3]) > 50
    # Of the tail PyTorch makes zeros, which don't count: see the module.
    more = got[5] - want[5]
    assert more[[0, 2, 3]].abs().max() <= 4
    assert -8 <= int(more[1]) <= x.numel() // 100
