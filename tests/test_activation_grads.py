"""`activation_grads` and `transpose_again`: on a CPU their definitions, under Triton's interpreter
the kernels' addressing, and on a GPU the kernels against those definitions."""

from typing import Any

import pytest
import torch
from interpreted import check_interpreted
from shapes import TENSORS, TensorCase, params
from test_quantize_form import far
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.activation_grads import GRADS
from fp8patch.ops.quantize import mark_cold, mark_warm, quantize_now
from fp8patch.ops.quantize_form import FORMS

SMALL = (13, 48)
VALUE_INV = 0.137
SCALES = (7.3, 11.0)
# By form: the activation.
ACTIVATIONS: dict[str, Any] = {
    "gelu": lambda x, _: torch.nn.functional.gelu(x),
    "gelu_tanh": lambda x, _: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu_mul": lambda x, y: torch.nn.functional.silu(x) * y,
}
CASES = [(form, sums) for form in GRADS for sums in (False, True) if form != "silu_mul" or not sums]


def slots(form: str, device: str = "cpu") -> list[tuple[Tensor, Tensor, Tensor]]:
    """(scale, amax, counts) of each gradient."""
    return [
        (
            torch.tensor(scale, device=device),
            torch.zeros((), device=device),
            torch.zeros(4, dtype=torch.int64, device=device),
        )
        for scale in SCALES[: 2 if form == "silu_mul" else 1]
    ]


def operands(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y, grad = torch.randn(shape) * 2, torch.randn(shape), torch.randn(shape)
    return x.to(dtype), y.to(dtype), grad.to(dtype)


def run(
    form: str,
    x: Tensor,
    y: Tensor,
    grad: Tensor,
    places: list[tuple[Tensor, Tensor, Tensor]],
    sums: bool,
    e5m2: bool = True,
) -> tuple[Tensor, ...]:
    gated = form == "silu_mul"
    second = places[1] if gated else (None, None, None)
    limit = numerics.FP8_MAX[numerics.E5M2 if e5m2 else numerics.E4M3]
    inv = torch.tensor(VALUE_INV, device=x.device)
    outputs: tuple[Tensor, ...] = torch.ops.fp8patch.activation_grads.default(
        x, y if gated else None, grad, form, inv, *places[0], *second, limit, e5m2, True, sums
    )
    return outputs


# -- what they are ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", GRADS)
def test_gradients_are_autograds(form: str) -> None:
    read = [t.requires_grad_() for t in operands((1, 997), torch.float64)[:2]]
    grad = torch.linspace(-2, 3, 997, dtype=torch.float64)[None]
    count = 2 if form == "silu_mul" else 1
    want = torch.autograd.grad(ACTIVATIONS[form](*read), read[:count], grad)
    x, y = (t.detach().float() for t in read)
    got = GRADS[form](x, y, grad.float())
    assert len(got) == count
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("form", "sums"), CASES)
def test_they_are_casts_of_gradients_and_of_the_value(form: str, sums: bool) -> None:
    x, y, grad = operands(SMALL, torch.bfloat16)
    places, expected = slots(form), slots(form)
    got = run(form, x, y, grad, places, sums)
    limit = numerics.FP8_MAX[numerics.E5M2]
    for i, (by, place) in enumerate(zip(GRADS[form](x, y, grad), expected, strict=True)):
        assert by.dtype == torch.bfloat16
        want = quantize_now(by, *place, limit, True, False, True, True, sums)
        for a, b in zip(got[4 * i : 4 * i + 3], want, strict=False):
            assert torch.equal(a.float(), b.float())
        if sums:
            assert torch.equal(got[3], want[3])
        assert torch.equal(places[i][1], place[1])
        assert torch.equal(places[i][2], place[2])
        assert place[1] == by.abs().max() > 0
    value = FORMS[form](x, y)
    want_t = numerics.quantize(value, 1 / torch.tensor(VALUE_INV), numerics.E4M3).t()
    assert got[7].shape == (48, 16)
    assert torch.equal(got[7][:, :13].float(), want_t.float())
    assert not got[7][:, 13:].float().any()


def test_the_transpose_again_is_that_of_the_cast() -> None:
    x, _, _ = operands(SMALL, torch.bfloat16)
    x[3, 5], x[4, 4] = float("inf"), 1e4
    # 1 / (1 / 4) is 4.
    slot = torch.tensor(4.0), torch.zeros(()), torch.zeros(4, dtype=torch.int64)
    _, want, scale_inv, _ = quantize_now(
        x, *slot, 448.0, False, False, True, True, False
    )  # fmt: skip
    got = torch.ops.fp8patch.transpose_again.default(x, scale_inv, x)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    # From the scale that the cast had, whatever it is by now.
    slot[0].fill_(1.0)
    assert torch.equal(
        torch.ops.fp8patch.transpose_again.default(x, scale_inv, x).view(torch.uint8),
        want.view(torch.uint8),
    )


def test_a_cold_scale_is_replaced() -> None:
    x, y, grad = operands(SMALL, torch.bfloat16)
    places = slots("silu_mul")
    mark_cold([places[1][0]])
    got = run("silu_mul", x, y, grad, places, sums=False)
    mark_warm([places[1][0]])
    _, by_y = GRADS["silu_mul"](x, y, grad)
    torch.testing.assert_close(got[2], 1 / torch.tensor(SCALES[0]))
    torch.testing.assert_close(got[6], by_y.abs().max().float() / 57344)


@pytest.mark.parametrize(("form", "sums"), CASES)
@pytest.mark.parametrize("shape", [(3, 7), (16, 32)])
def test_opcheck(form: str, sums: bool, shape: tuple[int, int]) -> None:
    x, y, grad = operands(shape, torch.bfloat16)
    gated = form == "silu_mul"
    places = slots(form)
    second = places[1] if gated else (None, None, None)
    inv = torch.tensor(VALUE_INV)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.fp8patch.activation_grads.default,
        (
            x,
            y if gated else None,
            grad,
            form,
            inv,
            *places[0],
            *second,
            448.0,
            False,
            False,
            sums,
        ),
        test_utils=tests,
    )
    torch.library.opcheck(
        torch.ops.fp8patch.transpose_again.default, (x, inv, grad), test_utils=tests
    )


# -- the kernels -----------------------------------------------------------------------------------

# As in test_quantize_form.py: a process of its own, and values to a few steps.
SCRIPT = """
import torch
from test_activation_grads import CASES, VALUE_INV, operands, run, slots
from fp8patch import numerics
from fp8patch.ops.triton import activation_grads
from fp8patch.ops.triton.transpose_again import transpose_again

activation_grads.PROGRAMS = 3

def check(got, want, where):
    assert got.shape == want.shape, where
    # A step is an eighth; half is lost where rounding loses a carry.
    wrong = (got.float() - want.float()).abs() > 0.5 * want.float().abs() + 0.01
    assert not wrong.any(), where

for shape in ((1, 1), (77, 130), (64, 128)):
    x, y, grad = operands(shape, torch.float32)
    grad = grad * 3
    x[-1, -1] = 90.0  # an outlier of the value
    if shape[0] > 1:
        grad[-2, 0], x[-2, 0] = 200.0, 2.0  # one of the gradients, in another tile
    inv = torch.tensor(VALUE_INV)
    for form, sums in CASES:
        gated = form == "silu_mul"
        want_places, places = slots(form), slots(form)
        want = run(form, x, y, grad, want_places, sums, e5m2=False)
        casts, found, value_t = activation_grads.activation_grads(
            x, y if gated else None, grad, form, inv, places, numerics.E4M3,
            observe=True, column_sums=sums)
        where = (shape, form, sums)
        for i, cast in enumerate(casts):
            for a, b in zip(cast[:2], want[4 * i:], strict=False):
                check(a, b, (where, i))
            assert torch.equal(cast[2], want[4 * i + 2]), where
            (_, amax, counts), (_, want_amax, want_counts) = places[i], want_places[i]
            torch.testing.assert_close(amax, want_amax, rtol=1e-5, atol=0)
            assert counts[[0, 2, 3]].tolist() == want_counts[[0, 2, 3]].tolist(), where
            assert shape == (1, 1) or counts[0] > 0, where
        check(value_t, want[7], where)
        if sums:
            torch.testing.assert_close(found, want[3], rtol=1e-4, atol=1e-4)
    check(transpose_again(x, inv), torch.ops.fp8patch.transpose_again.default(x, inv, x), shape)
print("done")
"""


def test_kernels_under_the_interpreter() -> None:
    check_interpreted(SCRIPT)


def on_both(
    form: str, read: tuple[Tensor, Tensor, Tensor], sums: bool
) -> list[tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor, Tensor]]]]:
    """(outputs, slots) on the CPU and on the GPU."""
    found = []
    for device in ("cpu", "cuda"):
        places = slots(form, device)
        outputs = run(form, *(t.to(device) for t in read), places, sums)
        found.append((tuple(t.cpu() for t in outputs), [tuple(t.cpu() for t in p) for p in places]))
    return found  # type: ignore[return-value]


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "sums"), CASES)
@pytest.mark.parametrize("case", params(TENSORS))
def test_kernel_against_the_definition(case: TensorCase, form: str, sums: bool) -> None:
    x = case.build(torch.bfloat16)
    _, y, grad = operands(tuple(x.shape), x.dtype)  # type: ignore[arg-type]
    (want, want_places), (got, places) = on_both(form, (x, y, grad), sums)
    finite = all(place[1].isfinite() for place in want_places)
    for i in (0, 1, 4, 5, 7):
        assert want[i].shape == got[i].shape
        if want[i].numel() and finite:
            assert far(want[i], got[i])[0] <= 1
    for i in (2, 6):
        assert torch.equal(want[i], got[i])
    for place, expected in zip(places, want_places, strict=True):
        assert place[1].isfinite() == expected[1].isfinite()
        if finite:
            torch.testing.assert_close(place[1], expected[1], rtol=2**-7, atol=1e-30)
        assert place[2][3] == expected[2][3] == x.numel()


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "sums"), CASES)
@pytest.mark.parametrize("shape", [(4096, 1024), (3000, 1296), (1111, 1031)], ids=str)
def test_kernel_at_the_size_of_a_layer(shape: tuple[int, int], form: str, sums: bool) -> None:
    (want, want_places), (got, places) = on_both(form, operands(shape, torch.bfloat16), sums)
    for i in (0, 1, 4, 5, 7):
        if want[i].numel():
            most, part = far(want[i], got[i])
            assert most <= 1
            assert part < 1e-3
    if sums:
        assert numerics.sqnr(want[3], got[3]) > 50
    for place, expected in zip(places, want_places, strict=True):
        torch.testing.assert_close(place[1], expected[1], rtol=2**-7, atol=0)
        assert (place[2] - expected[2])[[0, 2, 3]].abs().max() <= 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", params(TENSORS))
def test_the_transpose_again_on_a_gpu(case: TensorCase, dtype: torch.dtype) -> None:
    x = case.build(dtype)
    inv = torch.tensor(VALUE_INV)
    want = torch.ops.fp8patch.transpose_again.default(x, inv, x)
    got = torch.ops.fp8patch.transpose_again.default(x.cuda(), inv.cuda(), x.cuda())
    bits = [t.cpu().float() for t in (want, got)]
    torch.testing.assert_close(*bits, rtol=0, atol=0, equal_nan=True)
