"""`Float8LayerNorm`: a LayerNorm that writes what the GEMMs after it read.

Under autocast, stock LayerNorm returns FP32, and every cast that follows pays for the width. Where
only GEMMs read the output (pre-LN blocks; the first training step sees it), nothing is lost by
writing the autocast dtype: they would round to it, or to FP8, anyway. Where the output is also the
residual stream (post-LN: BERT) it stays FP32, unless the recipe says `norm_output: bf16`.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8patch import regions
from fp8patch.compiler import outside_compiler
from fp8patch.modules.base import attach, rebuild, register
from fp8patch.recipe import Recipe
from fp8patch.roots import enter_module
from fp8patch.scaling import Bank


@register
class Float8LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` with FP32 statistics and, where that loses nothing, a narrow output."""

    _fp8_base = nn.LayerNorm
    _fp8_registered: ClassVar[type[nn.Module]]
    _fp8_bank: Bank
    _fp8_path: str
    # None until the bank knows this norm.
    _fp8_narrow: bool | None

    def __init__(self, *args: Any, recipe: Recipe | str | None = None, **kwargs: Any) -> None:
        """As the stock class, plus `recipe`. Conversion does not come through here."""
        super().__init__(*args, **kwargs)
        attach(self, Bank(Recipe.load(recipe), (), [""]), "")

    def forward(self, input: Tensor) -> Tensor:
        region = regions.active()
        base: Any = self._fp8_base
        if region is None:
            return base.forward(self, input)  # type: ignore[no-any-return]
        # What the first step shows is seen in eager only, whoever compiled what; and so is a first
        # use.
        watched = self._fp8_bank.observation is not None or self._fp8_narrow is None
        if watched or not torch.compiler.is_compiling():
            return _forward_in_eager(self, input, region)
        return _forward(self, input)

    def first_use(self, observe: bool) -> None:
        """Meet the bank now: a compiled forward can't."""
        if self._fp8_narrow is None:
            self._fp8_bank.adopt_norm(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has a bank of its own, which has to get to know it.
        return {**self.__dict__, "_fp8_narrow": None}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (self._fp8_registered, self._fp8_base), self.__getstate__()


def _forward(norm: Any, input: Tensor) -> Tensor:
    output: Tensor = norm._fp8_base.forward(norm, input)
    device = input.device.type
    if norm._fp8_narrow and torch.is_autocast_enabled(device):
        output = output.to(torch.get_autocast_dtype(device))
    return output


@outside_compiler
def _forward_in_eager(norm: Any, input: Tensor, region: regions.Region) -> Tensor:
    bank: Bank = norm._fp8_bank
    enter_module(bank, region)
    if norm._fp8_narrow is None:
        bank.adopt_norm(norm)
    output = _forward(norm, input)
    if bank.observation is not None:
        bank.observation.saw_norm(norm._fp8_path, output)
    return output
