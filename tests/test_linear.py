"""What a converted GEMM layer is beside its numerics: shapes, dtypes, gradients, stock behaviour.

Float8Linear and Float8Conv1D go through the same tests.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import bars
import pytest
import torch
from bars import Setup
from shapes import DTYPES, GEMMS, GemmCase, params
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import fp8patch
from fp8patch import messages, numerics
from fp8patch.modules.conv1d import Float8Conv1D
from fp8patch.modules.linear import Float8Linear

K, N = 48, 32
kinds = pytest.mark.parametrize("conv1d", [False, True], ids=["linear", "conv1d"])


def make(
    conv1d: bool, k: int = K, n: int = N, dtype: torch.dtype = torch.float32, recipe: Any = None
) -> tuple[Any, Any]:
    """A converted layer and a stock one with the same seeded weights."""
    generator = torch.Generator().manual_seed(k * 1000 + n)
    layer: Any = Float8Conv1D(n, k, recipe=recipe) if conv1d else Float8Linear(k, n, recipe=recipe)
    stock: Any = Conv1D(n, k) if conv1d else nn.Linear(k, n)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * k**-0.5)
        layer.bias.copy_(torch.randn(n, generator=generator))
    stock.load_state_dict(layer.state_dict())
    return layer.to(dtype), stock.to(dtype)


def mixed(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(
    layer: Any, x: Tensor, grad: Tensor, *, fp8: bool = True, autocast: torch.dtype | None = None
) -> tuple[Any, ...]:
    """Output, and the gradients of input, weight and bias."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    inside = fp8patch.autocast(backend="emulate") if fp8 else nullcontext()
    with mixed(autocast), inside:
        y = layer(x)
    y.backward(grad.to(y.dtype))
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


def same(a: Any, b: Any) -> bool:
    return all(
        (p is None and q is None) or (p.dtype == q.dtype and torch.equal(p, q))
        for p, q in zip(a, b, strict=True)
    )


@kinds
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", DTYPES, ids=str)
def test_dtypes_are_the_stock_modules(
    inputs: torch.dtype, weights: torch.dtype, autocast: torch.dtype | None, conv1d: bool
) -> None:
    layer, stock = make(conv1d, dtype=weights)
    x, grad = tokens(64, K, dtype=inputs), tokens(64, N, seed=1)
    if autocast is None and inputs != weights:
        for module in (layer, stock):
            with pytest.raises(RuntimeError, match="dtype"):
                run(module, x, grad)
        return
    ours = run(layer, x, grad, autocast=autocast)
    theirs = run(stock, x, grad, fp8=False, autocast=autocast)
    for a, b, bar in zip(ours, theirs, (24.0, 20.0, 20.0, 45.0), strict=True):
        assert a is not None
        assert b is not None
        assert (a.dtype, a.shape, a.is_contiguous()) == (b.dtype, b.shape, b.is_contiguous())
        assert numerics.sqnr(b, a) >= bar
    assert not same(ours[:1], theirs[:1])  # it did run in FP8


@kinds
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize("m", [0, 1, 2, 13, 16, 197])
@pytest.mark.parametrize(("n", "k"), [(48, 32), (10, 32), (32, 20), (7, 3)])
def test_any_number_of_tokens_and_padded_features(
    m: int, n: int, k: int, recipe: str, conv1d: bool
) -> None:
    padding = fp8patch.Recipe.load(recipe).replace(misaligned="pad")
    for steps in (1, 2):
        setup = Setup(padding, conv1d, steps, gemm=GemmCase(f"{m}x{n}x{k}", m, n, k))
        missed = bars.below(bars.measure(setup))
        assert not missed & (bars.ORACLE | bars.BIAS).keys()


@kinds
@pytest.mark.parametrize("gemm", params(g for g in GEMMS if not g.aligned))
def test_misaligned_features_run_as_stock_and_say_so(
    gemm: GemmCase,
    conv1d: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(messages, "_seen", set())
    layer, stock = make(conv1d, gemm.k, gemm.n)
    x, _, grad = gemm.build(torch.float32)
    assert same(run(layer, x, grad), run(stock, x, grad, fp8=False))
    run(layer, x, grad)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"out_features={gemm.n}, in_features={gemm.k}" in said
    assert "misaligned: pad" in said


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_without_a_bias(autocast: torch.dtype | None) -> None:
    layer, _ = make(False)
    bare = Float8Linear(K, N, bias=False)
    with torch.no_grad():
        bare.weight.copy_(layer.weight)
        layer.bias.zero_()
    x = tokens(5, K)
    with mixed(autocast), fp8patch.autocast(backend="emulate"):
        y, z = bare(x), layer(x)
    assert torch.equal(y, z)
    y.sum().backward()
    assert bare.weight.grad is not None


@kinds
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_off_is_stock_bit_for_bit(autocast: torch.dtype | None, conv1d: bool) -> None:
    layer, stock = make(conv1d)
    x, grad = tokens(2, 9, K), tokens(2, 9, N, seed=1)
    theirs = run(stock, x, grad, fp8=False, autocast=autocast)
    assert same(run(layer, x, grad, fp8=False, autocast=autocast), theirs)
    run(layer, x, grad, autocast=autocast)  # use leaves nothing behind
    assert same(run(layer, x, grad, fp8=False, autocast=autocast), theirs)
    with fp8patch.autocast(backend="emulate"), fp8patch.autocast(enabled=False):
        assert same(run(layer, x, grad, fp8=False, autocast=autocast), theirs)
    with fp8patch.autocast(backend="off"):
        assert same(run(layer, x, grad, fp8=False, autocast=autocast), theirs)


@kinds
def test_fp64_and_a_wrong_shape_are_the_stock_modules_business(conv1d: bool) -> None:
    layer, stock = make(conv1d, dtype=torch.float64)
    x, grad = tokens(3, K, dtype=torch.float64), tokens(3, N, dtype=torch.float64)
    assert same(run(layer, x, grad), run(stock, x, grad, fp8=False))
    layer, _ = make(conv1d)
    with pytest.raises(RuntimeError), fp8patch.autocast(backend="emulate"):
        layer(tokens(3, K + 16))


# -- shapes and strides -------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (1, 2, 3), (0,), (2, 0), (1, 1, 1, 6)])
def test_any_leading_dimensions(shape: tuple[int, ...], conv1d: bool) -> None:
    layer, stock = make(conv1d)
    twin = copy.deepcopy(layer)
    x, grad = tokens(*shape, K), tokens(*shape, N, seed=1)
    y, x_grad, weight_grad, bias_grad = run(layer, x, grad, autocast=torch.bfloat16)
    assert y.shape == stock(x).shape == (*shape, N)
    assert x_grad is not None
    assert x_grad.shape == x.shape
    flat = run(twin, x.reshape(-1, K), grad.reshape(-1, N), autocast=torch.bfloat16)
    assert same((y.reshape(-1, N), x_grad.reshape(-1, K), weight_grad, bias_grad), flat)


@kinds
def test_an_empty_batch_has_zero_gradients_and_teaches_nothing(conv1d: bool) -> None:
    layer, _ = make(conv1d)
    _, _, weight_grad, bias_grad = run(layer, tokens(0, K), tokens(0, N))
    assert weight_grad is not None
    assert not weight_grad.any()
    assert bias_grad is not None
    assert not bias_grad.any()
    run(layer, tokens(4, K), tokens(4, N))
    assert len(layer._fp8_bank.read("", 0).history) == 0  # the empty step left the input cold


@kinds
def test_strides_of_input_and_gradient_do_not_matter(conv1d: bool) -> None:
    layer, _ = make(conv1d)
    x, grad = tokens(6, K), tokens(6, N, seed=1)
    wide_x, wide_grad = tokens(6, 2 * K), tokens(6, 2 * N)
    wide_x[:, ::2], wide_grad[:, 1::2] = x, grad
    expected = run(copy.deepcopy(layer), x, grad)
    for a, b in (
        (x.t().contiguous().t(), grad),
        (wide_x[:, ::2], grad),
        (x, grad.t().contiguous().t()),
        (x, wide_grad[:, 1::2]),
    ):
        got = run(copy.deepcopy(layer), a, b)
        assert same(got[:3], expected[:3])
        # The FP32 sum of a column-major gradient runs in another order.
        assert numerics.sqnr(grad.double().sum(0), got[3]) >= 100


@kinds
def test_an_expanded_gradient(conv1d: bool) -> None:
    """What `y.sum()` and `y.mean()` send back."""
    layer, _ = make(conv1d)
    x = tokens(6, K)
    for grad in (torch.ones(()).expand(6, N), tokens(1, N).expand(6, N)):
        whole = run(copy.deepcopy(layer), x, grad.contiguous())
        assert same(run(copy.deepcopy(layer), x, grad), whole)


# -- what needs a gradient ----------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "rowwise_bf16_wgrad"])
def test_frozen_parts_change_nothing_for_the_others(recipe: str, conv1d: bool) -> None:
    layer, _ = make(conv1d, recipe=recipe)
    x, grad = tokens(6, K), tokens(6, N, seed=1)
    y, x_grad, weight_grad, bias_grad = run(copy.deepcopy(layer), x, grad)

    frozen = copy.deepcopy(layer)
    frozen.weight.requires_grad_(False)
    assert same(run(frozen, x, grad), (y, x_grad, None, bias_grad))
    frozen.bias.requires_grad_(False)
    assert same(run(frozen, x, grad), (y, x_grad, None, None))

    first = copy.deepcopy(layer)
    with fp8patch.autocast(backend="emulate"):
        out = first(x)
    out.backward(grad)
    assert same((out.detach(), first.weight.grad, first.bias.grad), (y, weight_grad, bias_grad))


@kinds
def test_all_frozen(conv1d: bool) -> None:
    layer, _ = make(conv1d)
    for p in layer.parameters():
        p.requires_grad_(False)
    with fp8patch.autocast(backend="emulate"):
        assert not layer(tokens(3, K)).requires_grad


@kinds
def test_the_output_may_be_edited_in_place(conv1d: bool) -> None:
    layer, _ = make(conv1d)
    x = tokens(2, 3, K).requires_grad_()
    with fp8patch.autocast(backend="emulate"):
        y = layer(x)
        y += 1
        y.view(-1)[0] = 0
    y.sum().backward()
    assert x.grad is not None


@kinds
def test_a_layer_is_one_node_of_autograd(conv1d: bool) -> None:
    """Each node costs CPU time, forward and backward."""
    layer, _ = make(conv1d)
    x = tokens(2, 3, K).requires_grad_()
    with fp8patch.autocast(backend="emulate"):
        node = layer(x).grad_fn
    assert node.name() == "Float8GemmsBackward"
    assert [after.name() for after, _ in node.next_functions[:3]] == [
        "torch::autograd::AccumulateGrad"
    ] * 3


@kinds
def test_a_second_derivative_is_refused_clearly(conv1d: bool) -> None:
    layer, _ = make(conv1d)
    x = tokens(3, K).requires_grad_()
    with fp8patch.autocast(backend="emulate"):
        y = layer(x)
    (x_grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        x_grad.sum().backward()


@kinds
def test_a_weight_changed_between_forward_and_backward_is_noticed(conv1d: bool) -> None:
    """As in stock PyTorch, where the optimizer is known to own the weight."""
    layer, _ = make(conv1d)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, grad = tokens(4, K), tokens(4, N)
    run(layer, x, grad)
    optimizer.step()
    with fp8patch.autocast(backend="emulate"):
        kept = layer(x.requires_grad_())
    optimizer.step()
    run(layer, x, grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward(grad)


@kinds
@pytest.mark.parametrize("n", [N, N + 16])
def test_a_new_parameter_while_the_old_one_lives(n: int, conv1d: bool) -> None:
    """`assign=True` or a resize, with an optimizer that still holds what was there."""
    layer, _ = make(conv1d)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = tokens(4, K)
    for _ in range(2):
        run(layer, x, tokens(4, N))
        optimizer.step()
    other, stock = make(conv1d, n=n, k=K)
    layer.weight, layer.bias = other.weight, other.bias
    if conv1d:
        layer.nf = n
    assert optimizer.param_groups[0]["params"][0] is not layer.weight
    y = run(layer, x, tokens(4, n))[0]
    assert numerics.sqnr(stock(x).detach(), y) > 15


# -- the gradient of the bias -------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_the_bias_gradient_is_the_sum(autocast: torch.dtype | None, conv1d: bool) -> None:
    layer, _ = make(conv1d)
    grad = (tokens(2048, N, seed=3) + 0.5).to(autocast or torch.float32)
    _, _, _, got = run(layer, tokens(2048, K), grad, autocast=autocast)
    assert got is not None
    assert got.dtype == torch.float32
    assert numerics.sqnr(grad.double().sum(0), got) >= 100
