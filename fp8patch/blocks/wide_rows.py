"""Inductor reads a row that is normalised once, at the widths of models too.

It keeps rows of up to 1024 numbers in registers. Wider ones it reads twice, for their statistics
and to normalise them, and draws the random numbers of a dropout in front twice as well.
"""

import functools
from typing import Any

from fp8patch import messages

__all__ = ["compile_inner"]

# On an H200, a norm behind a residual: 101 us instead of 133 for 25216 rows of 1280, 153 instead of
# 224 for 8192 rows of 4096 with dropout, and 98 instead of 105 for 4096 rows of 8192.
_WIDEST = 8192


def compile_inner(*args: Any, **kwargs: Any) -> Any:
    """Inductor's `inner_compile`, for `compile_fx`.

    It runs once for forward and once for backward, which may be in another thread and much later.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    if type(V.choices) is not InductorChoices:
        messages.once(
            "choices",
            "Inductor has choices of somebody else's already, so rows of more than 1024 that are "
            "normalised may be read twice.",
        )
        return compile_fx_inner(*args, **kwargs)
    with V.set_choices_handler(_choices()()):
        return compile_fx_inner(*args, **kwargs)


@functools.cache
def _choices() -> type[Any]:
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class WideRows(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            # (`multi_kernel` tries both, with a limit of its own.)
            wanted = config.triton.persistent_reductions and not config.triton.multi_kernel
            inner = features.get_reduction_hint() is ReductionHint.INNER
            if wanted and inner and not cooperative_reduction:
                sizes = V.graph.sizevars
                if sizes.statically_known_leq(features.reduction_numel, _WIDEST):
                    return True
            return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    return WideRows
