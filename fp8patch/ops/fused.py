"""Work on many tensors at once: all slots of a bank, all weights of a model, in a launch each."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from fp8patch import numerics


@cache
def _kernels() -> Any:
    # That there is no Triton is said where the first single cast asks for it.
    try:
        from fp8patch.ops.triton import quantize_many, update
    except ImportError:
        return None
    return quantize_many, update


def delayed_update(
    history: Tensor,
    cursor: Tensor,
    pending: Tensor,
    scale: Tensor,
    limit: Tensor,
    algo: str,
    length: Tensor | None = None,
) -> None:
    """`numerics.delayed_update`, in one launch on a GPU. Shapes and dtypes as there."""
    if history.is_cuda and (kernels := _kernels()) is not None:
        kernels[1].delayed_update(history, cursor, pending, scale, limit, algo, length)
    else:
        numerics.delayed_update(history, cursor, pending, scale, limit, algo, length)


def many_casts(jobs: Sequence[tuple[Tensor, ...]]) -> Any | None:
    """A `ManyCasts` of jobs (its `Job`, as plain tuples); None where there is no Triton."""
    kernels = _kernels()
    if kernels is None:
        return None
    module = kernels[0]
    return module.ManyCasts([module.Job(*job) for job in jobs])
