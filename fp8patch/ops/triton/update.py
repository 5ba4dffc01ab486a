"""`numerics.delayed_update` of all slots in one launch; bit-equal to it."""

import triton
import triton.language as tl
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.triton.launch import Launcher, size_class


@triton.jit
def _update_kernel(
    history, cursor, pending, scale, limits, length, stride_pending, stride_scale,
    LARGEST: tl.constexpr, TAKE_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    amax = tl.load(pending + row * stride_pending)
    count = tl.load(cursor + row)
    if (amax > 0.0) & (amax < float("inf")):
        place = (count % length).to(tl.int32)
        chosen = amax
        if TAKE_MAX:
            k = tl.arange(0, BLOCK)
            # The oldest amax gives way to the new one before the maximum is taken.
            old = tl.load(history + row.to(tl.int64) * length + k, mask=k < length, other=0.0)
            chosen = tl.maximum(amax, tl.max(tl.where(k == place, 0.0, old)))
        tl.store(history + row.to(tl.int64) * length + place, amax)
        tl.store(cursor + row, count + 1)
        new = tl.minimum(tl.div_rn(tl.load(limits + row), chosen), LARGEST)
        tl.store(scale + row * stride_scale, new)
    tl.store(pending + row * stride_pending, 0.0)


_update = Launcher(_update_kernel)


def delayed_update(
    history: Tensor, cursor: Tensor, pending: Tensor, scale: Tensor, limit: Tensor, algo: str
) -> None:
    """As `numerics.delayed_update`; pending and scale may be strided."""
    rows, length = history.shape
    sizes = length, pending.stride(0), scale.stride(0)
    constants = {
        "LARGEST": numerics.FP32_MAX,
        "TAKE_MAX": algo == "max",
        "BLOCK": triton.next_power_of_2(length),
    }
    variant = (algo, length, *map(size_class, sizes))
    tensors = history, cursor, pending, scale, limit
    _update(variant, rows, tensors, sizes, constants, 4 if length >= 512 else 1)
