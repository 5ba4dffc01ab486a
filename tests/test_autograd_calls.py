"""The quick ways to call a custom Function do what PyTorch's own do."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8patch.modules import autograd_calls
from fp8patch.modules.autograd_calls import first_order, quick_apply


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.needs = ctx.needs_input_grad
        return input * 2

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        assert not torch.is_grad_enabled()
        return grad * 2, None, None


run = quick_apply(Double)


def test_applies_and_differentiates() -> None:
    x = torch.ones(3, requires_grad=True)
    y = run(x, None, None)
    assert y.grad_fn is not None
    assert y.grad_fn.needs == (True, False, False)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_differentiating_twice_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(run(x, None, None).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_a_transform_is_refused_and_not_ignored() -> None:
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: run(x, None, None).sum())(torch.ones(3))


def leaked() -> Tensor:
    """What a transform leaves behind is still a wrapper after it has ended."""
    found: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        found.append(x * 2)
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    return found[0]


@pytest.mark.parametrize("place", range(3))
def test_a_dead_wrapper_is_unwrapped(place: int) -> None:
    arguments: list[Tensor | None] = [torch.ones(3), None, None]
    arguments[place] = leaked()
    assert arguments[place].requires_grad  # type: ignore[union-attr]
    assert not run(*arguments).requires_grad
    assert not Double.apply(*arguments).requires_grad  # type: ignore[no-untyped-call]
    # The planted fault: as it comes, it brings a graph along.
    direct: Any = super(torch.autograd.Function, Double).apply  # type: ignore[misc]
    assert direct(*arguments).requires_grad


def test_another_version_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_are_functorch_transforms_active")
    assert autograd_calls.quick_apply(Double) == Double.apply
