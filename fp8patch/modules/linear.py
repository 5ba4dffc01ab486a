"""`Float8Linear`: an `nn.Linear` whose three GEMMs run in FP8 inside `autocast`.

A subclass, so that what looks at the type (weight initialisation, `resize_token_embeddings`, PEFT,
weight-decay groups) sees a Linear; and made by changing the class of the existing object, so that
Parameters, hooks, ties and optimizer references stay what they are.
"""

from torch import nn

from fp8patch.modules.base import Float8Module, register


@register
class Float8Linear(Float8Module, nn.Linear):
    """`nn.Linear` in FP8: weight [N, K], input [..., K] -> [..., N], any number of tokens.

    Outside `autocast` it computes exactly what `nn.Linear` does.
    """

    _fp8_base = nn.Linear
