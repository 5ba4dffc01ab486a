"""`Float8Conv1D`: GPT-2's linear layer, whose weight is stored [in, out]."""

from transformers.pytorch_utils import Conv1D

from fp8patch.modules.base import Float8Module, register


@register
class Float8Conv1D(Float8Module, Conv1D):
    """`transformers.pytorch_utils.Conv1D` in FP8: weight [K, N], input [..., K] -> [..., N]."""

    _fp8_base = Conv1D
    _fp8_in_out = True
