"""Work on many tensors at once: all slots of a bank, all weights of a model, in a launch each."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.kernels import load


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
    # That there is no Triton is said where the first single cast asks for it.
    if history.is_cuda and (kernels := load("update")) is not None:
        kernels.delayed_update(history, cursor, pending, scale, limit, algo, length)
    else:
        numerics.delayed_update(history, cursor, pending, scale, limit, algo, length)


def many_casts(jobs: Sequence[tuple[Tensor, ...]]) -> Any | None:
    """A `ManyCasts` of jobs (its `Job`, as plain tuples); None where there is no Triton."""
    kernels = load("quantize_many")
    return None if kernels is None else kernels.ManyCasts([kernels.Job(*job) for job in jobs])
