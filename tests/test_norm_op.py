"""LayerNorm and RMSNorm as operators: against FP64, against the stock norms, and under Triton."""

from typing import Any

import pytest
import torch
from interpreted import check_interpreted
from torch import Tensor, nn
from torch.nn import functional as F

from fp8patch import numerics
from fp8patch.modules import norm_function
from fp8patch.modules.norm_function import Normalize, NormSpec
from fp8patch.ops import norm as ops

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# dB to FP64 of what is written in a dtype. Measured: 53.7, 69.6 and 110.6 at least (FP32 is lowest
# where a mean of 30 standard deviations is subtracted, 136 without one).
BARS = {BF16: 53.0, FP16: 69.0, FP32: 110.0}
SHAPES = [(1, 16), (5, 48), (33, 130), (300, 1024), (2048, 64), (3, 16384)]
KINDS = ["layer", "rms", "rms offset"]
EPS = 1e-5


def build(shape: tuple[int, int], kind: str, dtype: torch.dtype, mean: float = 0.0) -> Any:
    """(x, weight, bias, grad) of one case."""
    g = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=g) * 3 + mean).to(dtype)
    weight = torch.randn(shape[1], generator=g) * 0.3 + (kind != "rms offset")
    bias = torch.randn(shape[1], generator=g) * 0.1 if kind == "layer" else None
    return x, weight, bias, torch.randn(shape, generator=g).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, kind: str) -> list[Tensor]:
    """y and the gradients of x, weight and bias, by the definition, in FP64 through autograd."""
    given = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    values = given[0] - given[0].mean(1, keepdim=True) if kind == "layer" else given[0]
    factor = 1 + given[1] if kind == "rms offset" else given[1]
    y = values / (values.square().mean(1, keepdim=True) + EPS).sqrt() * factor
    y = y if bias is None else y + given[2]
    y.backward(grad.double())
    return [y.detach(), *(t.grad for t in given)]  # type: ignore[misc]


def ours(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, kind: str, dtype: torch.dtype
) -> list[Tensor]:
    given = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    w_and_b: list[Any] = [*given[1:], None][:2]
    spec = NormSpec(EPS, kind == "layer", kind == "rms offset", dtype)
    y = Normalize.apply(given[0], *w_and_b, spec)  # type: ignore[no-untyped-call]
    y.backward(grad.to(dtype))
    return [y.detach(), *(t.grad for t in given)]  # type: ignore[misc]


def missed(expected: list[Tensor], found: list[Tensor]) -> set[str]:
    """What lies below the bar of its dtype."""
    names = ("y", "grad_x", "grad_weight", "grad_bias")
    below = set()
    for name, a, b in zip(names, expected, found, strict=False):
        # `not >=`, so that nan is a miss.
        if not numerics.sqnr(a, b.double().to(a.device)) >= BARS[b.dtype]:
            below.add(name)
    return below


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_near_fp64(shape: tuple[int, int], kind: str) -> None:
    for dtype in (FP32, BF16, FP16):
        for mean in (0.0, 100.0):
            case = build(shape, kind, dtype, mean)
            expected = exact(*case, kind)
            for out in {dtype, FP32}:
                assert not missed(expected, ours(*case, kind, out)), (dtype, mean, out)


def _eps_outside(x: Tensor, *args: Any) -> Any:
    y, mean, rstd = ops.norm(x, *args)
    wrong = 1 / (1 / rstd.square() - EPS).sqrt().add(EPS)
    return (y.float() * (wrong / rstd).unsqueeze(1)).to(y.dtype), mean, wrong


def _bf16_statistics(x: Tensor, *args: Any) -> Any:
    y, mean, rstd = ops.norm(x, *args)
    coarse = rstd.bfloat16().float()
    return (y.float() * (coarse / rstd).unsqueeze(1)).to(y.dtype), mean, coarse


def _no_mean_term(grad: Tensor, x: Tensor, weight: Tensor, mean: Any, rstd: Any, *args: Any) -> Any:
    by_x, sums = ops.norm_backward(grad, x, weight, mean, rstd, *args)
    term = (grad.float() * weight).mean(1, keepdim=True) * rstd.unsqueeze(1)
    return (by_x.float() + term).to(by_x.dtype), sums


def _one_row_short(grad: Tensor, x: Tensor, weight: Any, mean: Any, rstd: Any, *args: Any) -> Any:
    by_x, _ = ops.norm_backward(grad, x, weight, mean, rstd, *args)
    _, sums = ops.norm_backward(grad[1:], x[1:], weight, mean[1:], rstd[1:], *args)
    return by_x, sums


@pytest.mark.parametrize(
    ("name", "fault", "hit"),
    [
        ("norm", _eps_outside, {"y", "grad_x"}),
        ("norm", _bf16_statistics, {"y", "grad_x"}),
        ("norm_backward", _no_mean_term, {"grad_x"}),
        ("norm_backward", _one_row_short, {"grad_weight", "grad_bias"}),
    ],
)
def test_a_planted_fault_misses_the_bars(
    name: str, fault: Any, hit: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, *rest = build((33, 130), "layer", BF16)
    x *= 0.01  # where eps matters
    expected = exact(x, *rest, "layer")
    assert not missed(expected, ours(x, *rest, "layer", BF16))
    monkeypatch.setattr(norm_function, name, fault)
    assert hit <= missed(expected, ours(x, *rest, "layer", BF16))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_odd_values_go_where_the_stock_norms_send_them(device: str) -> None:
    x = torch.randn(6, 32, device=device)
    x[1, 3], x[2, 4], x[3, 5] = float("inf"), float("nan"), -float("inf")
    x[4] = 0.0
    weight, bias = torch.rand(32, device=device), torch.rand(32, device=device)
    layer = ops.norm(x, weight, bias, EPS, True, False, FP32)[0]
    rms = ops.norm(x, weight, None, EPS, False, False, FP32)[0]
    near = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(layer, F.layer_norm(x, [32], weight, bias, EPS), **near)
    torch.testing.assert_close(rms, F.rms_norm(x, [32], weight, EPS), **near)
    assert layer[[1, 2, 3]].isnan().all()
    assert layer[[0, 4, 5]].isfinite().all()
    assert rms[1].isnan().sum() == 1  # everything else is over an infinite norm: 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_any_layout_and_no_rows_at_all(device: str, dtype: torch.dtype) -> None:
    base = torch.randn(7, 96, device=device).to(dtype)
    weight, bias = torch.rand(32, device=device), torch.rand(32, device=device)
    layouts = {
        "rows apart": base[:, 32:64],
        "every third row": base[::3, :32],
        "elements apart": base[:, ::3],
        "transposed": torch.randn(32, 7, device=device).to(dtype).t(),
        "one row for all": base[:1, :32].expand(7, 32),
        "shifted by one": base.reshape(-1)[1:65].view(2, 32),
    }
    for name, x in layouts.items():
        grad = torch.ones((), device=device, dtype=dtype).expand(x.shape)
        plain = x.clone(memory_format=torch.contiguous_format)
        for center in (True, False):
            shift = bias if center else None
            got = ops.norm(x, weight, shift, EPS, center, False, dtype)
            want = ops.norm(plain, weight, shift, EPS, center, False, dtype)
            got += ops.norm_backward(grad, x, weight, *got[1:], center, False, True)
            want += ops.norm_backward(
                grad.contiguous(), plain, weight, *want[1:], center, False, True
            )
            for a, b in zip(got, want, strict=True):
                close = {"rtol": 1e-2, "atol": 1e-5} if a.dtype == BF16 else {"rtol": 1e-4}
                torch.testing.assert_close(a, b, **{"atol": 1e-5, **close}, msg=name)
    three = base.view(7, 3, 32).transpose(0, 1)
    flat = ops.norm(three.reshape(21, 32), weight, bias, EPS, True, False, dtype)
    deep = ops.norm(three, weight, bias, EPS, True, False, dtype)
    assert deep[0].shape == three.shape
    torch.testing.assert_close(deep[0].view(21, 32), flat[0], rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(deep[2], flat[2], rtol=1e-5, atol=0)
    back = [
        ops.norm_backward(g, x, weight, *deep[1:], True, False, True)
        for g, x in ((three, three), (flat[0].view(3, 7, 32), three.contiguous()))
    ]
    assert [t.shape for t in back[0]] == [t.shape for t in back[1]] == [(3, 7, 32), (2, 32)]
    nothing = base[:0, :32].requires_grad_()
    parameter = nn.Parameter(weight)
    spec = NormSpec(EPS, True, False, BF16)
    y = Normalize.apply(nothing, parameter, bias, spec)  # type: ignore[no-untyped-call]
    y.sum().backward()
    assert y.shape == (0, 32)
    assert nothing.grad is not None
    assert parameter.grad is not None
    assert not parameter.grad.any()


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    x, weight, bias, grad = build((5, 48), "layer", FP32)
    expected = exact(x, weight, bias, grad, "layer")
    spec = NormSpec(EPS, True, False, FP32)
    for wanted in ([True, False, False], [False, True, False], [False, False, True]):
        given = [
            t.clone().requires_grad_(w) for t, w in zip((x, weight, bias), wanted, strict=True)
        ]
        Normalize.apply(*given, spec).backward(grad)  # type: ignore[no-untyped-call]
        for t, w, e in zip(given, wanted, expected[1:], strict=True):
            assert (t.grad is not None) == w
            assert t.grad is None or numerics.sqnr(e, t.grad.double()) > BARS[FP32]


def test_without_a_weight_and_with_a_narrow_one() -> None:
    x, weight, bias, _ = build((5, 48), "layer", BF16)
    plain = ops.norm(x, None, None, EPS, True, False, FP32)[0]
    torch.testing.assert_close(plain, F.layer_norm(x.float(), [48], eps=EPS))
    x.requires_grad_()
    parameters = [nn.Parameter(t.bfloat16()) for t in (weight, bias)]
    spec = NormSpec(EPS, True, False, BF16)
    Normalize.apply(x, *parameters, spec).sum().backward()  # type: ignore[no-untyped-call]
    assert [p.grad.dtype for p in parameters if p.grad is not None] == [BF16, BF16]
    assert x.grad is not None
    assert x.grad.dtype == BF16


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_operators_are_what_they_say(device: str) -> None:
    x, weight, bias, grad = (t.to(device) for t in build((5, 48), "layer", BF16))
    tests = ("test_schema", "test_faketensor")
    for center in (True, False):
        arguments = (x, weight, bias if center else None, EPS, center, False, FP32)
        torch.library.opcheck(torch.ops.fp8patch.norm.default, arguments, test_utils=tests)
        _, mean, rstd = ops.norm(*arguments)
        for parameters in (True, False):
            torch.library.opcheck(
                torch.ops.fp8patch.norm_backward.default,
                (grad, x, weight, mean, rstd, center, False, parameters),
                test_utils=tests,
            )


def test_the_output_may_be_edited_in_place_and_the_input_may_not() -> None:
    x, weight, bias, _ = build((5, 48), "layer", FP32)
    weight.requires_grad_()
    spec = NormSpec(EPS, True, False, FP32)
    y = Normalize.apply(x.view(5, 1, 48), weight, bias, spec)  # type: ignore[no-untyped-call]
    y += 1
    y.sum().backward()
    y = Normalize.apply(x, weight, bias, spec)  # type: ignore[no-untyped-call]
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# The interpreter is chosen when Triton is imported, so it gets a process of its own. It truncates
# where it should round to BF16: values are compared as written in FP32.
SCRIPT = """
import torch
from fp8patch import numerics
from fp8patch.ops import norm as oracle
from fp8patch.ops.triton import norm as kernel

torch.manual_seed(0)
for rows, cols in ((1, 1), (3, 16), (13, 48), (34, 130), (2, 5000)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for center, offset in ((True, False), (False, False), (False, True)):
            where = rows, cols, dtype, center, offset
            x = (torch.randn(rows, cols + 3) * 3 + 1).to(dtype)[:, :cols]
            grad = torch.randn(rows, cols).to(dtype)
            if rows % 2 == 0:
                grad = grad[:1].expand(rows, cols)
            weight = torch.randn(cols) if rows != 13 else None
            bias = torch.randn(cols) if center and rows != 13 else None
            arguments = x, weight, bias, 1e-5, center, offset, torch.float32
            want, got = oracle.norm(*arguments), kernel.norm(*arguments)
            if dtype == torch.bfloat16:
                grad, x = grad.float(), x.float()  # so that grad_x is FP32
            arguments = grad, x, weight, *want[1:], center, offset, rows != 3
            want += oracle.norm_backward(*arguments)
            got += kernel.norm_backward(*arguments)
            for a, b in zip(want, got, strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype, where
                assert not a.numel() or numerics.sqnr(a, b) >= 68, (where, numerics.sqnr(a, b))
                assert a.dtype != torch.float32 or not a.numel() or numerics.sqnr(a, b) >= 120
print("done")
"""


def test_kernels_under_the_interpreter() -> None:
    check_interpreted(SCRIPT)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (12288, 1024), (197, 8192), (65, 32768)], ids=str)
def test_kernels_are_near_fp64(shape: tuple[int, int], kind: str) -> None:
    for dtype in (FP32, BF16, FP16):
        case = [None if t is None else t.cuda() for t in build(shape, kind, dtype)]
        expected = exact(*case, kind)  # type: ignore[arg-type]
        for out in {dtype, FP32}:
            found = [ours(*case, kind, out) for _ in "ab"]  # type: ignore[arg-type]
            assert not missed(expected, found[0]), (dtype, out)
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "not deterministic"
