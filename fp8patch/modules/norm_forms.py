"""Find RMSNorms by what they compute, not by what they are called.

T5LayerNorm is an RMSNorm, Gemma's multiplies by 1 + w, and a class named RMSNorm may be gated. So
each class is run once, on random input, in a copy of its own: the model is never run or changed.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["NormForm", "NormProbe"]

_ROWS = 6
# No norm is wider. Other modules hold one vector too, of any size, and a probe copies it often.
_WIDEST = 1 << 20
_SEED = 20240
# Tried when none of the module's own numbers is the eps that it adds.
_USUAL_EPS = (1e-6, 1e-5, 1e-8, 1e-12, torch.finfo(torch.float32).eps, 0.0)


@dataclass(frozen=True, slots=True)
class NormForm:
    """`x * rsqrt(mean(x^2) + eps) * w`, or `* (1 + w)`.

    Attributes:
        weight: The name of its one parameter.
        eps_name: The attribute that holds eps; None where eps is written into its code, or depends
            on the dtype (`nn.RMSNorm` without one): only the module itself knows it then.
    """

    factor: Literal["w", "1 + w"]
    eps: float
    weight: str = "weight"
    eps_name: str | None = None


def _single_vector(module: nn.Module) -> tuple[str, torch.Tensor] | None:
    """The one parameter of a module that holds a vector, nothing else and no children."""
    parameters = [(n, p) for n, p in module._parameters.items() if p is not None]
    if module._modules or len(parameters) != 1:
        return None
    name, vector = parameters[0]
    lazy = isinstance(vector, nn.parameter.UninitializedParameter)
    return None if lazy or vector.dim() != 1 else (name, vector)


class NormProbe:
    """Runs one copy per norm class and configuration, and remembers the answer."""

    def __init__(self) -> None:
        self._known: dict[Any, NormForm | None] = {}

    def form(self, module: nn.Module, stock: type[nn.Module]) -> NormForm | None:
        """How `module`, read as class `stock`, computes an RMSNorm; None when it does not."""
        found = _single_vector(module)
        if found is None:
            return None
        name, vector = found
        width = vector.shape[0]
        if width > _WIDEST:
            return None
        # A layer's index differs between equal norms and changes nothing; eps and flags may.
        own = {k: v for k, v in vars(module).items() if isinstance(v, bool | float | str)}
        key = (stock, name, width, *sorted((k, v) for k, v in own.items() if k != "training"))
        if key not in self._known:
            self._known[key] = _probe(module, stock, name, width)
        return self._known[key]


def _probe(module: nn.Module, stock: type[nn.Module], name: str, width: int) -> NormForm | None:
    generator = torch.Generator().manual_seed(_SEED)
    weight = torch.randn(width, generator=generator, device="cpu")
    # The last rows are so small that a wrong eps shows.
    size = torch.tensor([[1.0], [3.0], [0.1], [1e-2], [3e-3], [1e-3]])
    x = torch.randn(_ROWS, width, generator=generator, device="cpu") * size
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            shell = _shell(module, stock, weight)
            out = shell(x.unsqueeze(0).clone())
        except Exception:
            # Any module of the model can come here, so anything can be raised: no norm, then.
            return None
    if not isinstance(out, torch.Tensor) or out.shape != (1, _ROWS, width):
        return None
    y = out[0].float()
    own = {v: k for k, v in vars(module).items() if isinstance(v, float) and 0 <= v < 0.1}
    for eps in dict.fromkeys([*own, *_USUAL_EPS]):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        for factor, by in (("w", weight), ("1 + w", 1 + weight)):
            if torch.allclose(y, normed * by, rtol=1e-3, atol=1e-4):
                return NormForm(factor, eps, name, own.get(eps))  # type: ignore[arg-type]
    return None


def _shell(module: nn.Module, stock: type[nn.Module], weight: torch.Tensor) -> nn.Module:
    """A module of class `stock` with the attributes of `module`, `weight` on the CPU, no hooks.

    Not a deepcopy: that would copy accelerate's hooks with the weights they hold.
    """
    shell = stock.__new__(stock)
    blank = vars(nn.Module())
    shell.__dict__.update(blank)
    for name, value in vars(module).items():
        if name not in blank and name not in ("forward", "_old_forward", "_hf_hook"):
            plain = isinstance(value, int | float | str | list | tuple | dict | None)
            shell.__dict__[name] = copy.deepcopy(value) if plain else value
    shell.__dict__["training"] = False
    shell.__dict__["_parameters"] = OrderedDict(
        (name, None if p is None else nn.Parameter(weight, requires_grad=False))
        for name, p in module._parameters.items()
    )
    shell.__dict__["_buffers"] = OrderedDict(
        (name, None if b is None else torch.zeros(b.shape, dtype=b.dtype))
        for name, b in module._buffers.items()
    )
    return shell
