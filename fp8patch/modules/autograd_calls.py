"""Custom autograd Functions for little CPU time: `apply` and `once_differentiable` without extras.

What PyTorch's own do each time for the sake of rare cases takes several microseconds a layer; here
the rare cases are asked for first, and left to PyTorch.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def quick_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, for calls that nothing traces.

    That one looks at every argument for a wrapper that a transform of `torch.func` has left behind.
    Here the first three are looked at, tensors or None; what follows are none.
    """
    try:
        direct: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
        unwrap: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
        transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
    except AttributeError:  # Another version.
        return function.apply

    def call(input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Any:
        if transformed():
            return function.apply(input, weight, bias, *rest)
        return direct(
            unwrap(input),
            None if weight is None else unwrap(weight),
            None if bias is None else unwrap(bias),
            *rest,
        )

    return call


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable`, whose context is only entered where gradients are enabled.

    Everywhere else autograd has disabled them already.
    """
    careful: Callable[..., Any] = once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return careful(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call
