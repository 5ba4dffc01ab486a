"""`numerics.delayed_update` of all slots in one launch; bit-equal to it."""

import triton
import triton.language as tl
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.triton.launch import Launcher, size_class


@triton.jit
def _update_kernel(
    history, cursor, pending, scale, limits, lengths, width, stride_pending, stride_scale,
    LARGEST: tl.constexpr, TAKE_MAX: tl.constexpr, MIXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    amax = tl.load(pending + row * stride_pending)
    count = tl.load(cursor + row)
    length = tl.zeros((), tl.int64) + width
    if MIXED:
        length = tl.load(lengths + row)
    if (amax > 0.0) & (amax < float("inf")):
        place = (count % length).to(tl.int32)
        chosen = amax
        if TAKE_MAX:
            k = tl.arange(0, BLOCK)
            # The oldest amax gives way to the new one before the maximum is taken.
            old = tl.load(history + row.to(tl.int64) * width + k, mask=k < length, other=0.0)
            chosen = tl.maximum(amax, tl.max(tl.where(k == place, 0.0, old)))
        tl.store(history + row.to(tl.int64) * width + place, amax)
        tl.store(cursor + row, count + 1)
        new = tl.minimum(tl.div_rn(tl.load(limits + row), chosen), LARGEST)
        tl.store(scale + row * stride_scale, new)
    tl.store(pending + row * stride_pending, 0.0)


_update = Launcher(_update_kernel)


def delayed_update(
    history: Tensor,
    cursor: Tensor,
    pending: Tensor,
    scale: Tensor,
    limit: Tensor,
    algo: str,
    length: Tensor | None = None,
) -> None:
    """As `numerics.delayed_update`; pending and scale may be strided."""
    rows, width = history.shape
    sizes = width, pending.stride(0), scale.stride(0)
    mixed = length is not None
    constants = {
        "LARGEST": numerics.FP32_MAX,
        "TAKE_MAX": algo == "max",
        "MIXED": mixed,
        "BLOCK": triton.next_power_of_2(width),
    }
    variant = (algo, width, mixed, *map(size_class, sizes))
    # Without lengths any address will do: it is not read.
    tensors = history, cursor, pending, scale, limit, cursor if length is None else length
    _update(variant, rows, tensors, sizes, constants, 4 if width >= 512 else 1)
