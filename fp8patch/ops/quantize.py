"""`quantize` and `quantize_rowwise`: high precision to FP8, and what was seen on the way.

Both are opaque operators declared *without* mutation, although they write two tensors: `amax` takes
the maximum of |x|, `counts` adds the elements that clipped, flushed, were not finite, and all.
Nothing that is traced ever reads those two, so the lie is harmless, and it pays three times:

- the partitioner merges identical casts (q, k and v of one input);
- no version counter moves, so views of one bank don't trip over each other in backward;
- recomputation and shared layers only repeat a maximum, and the counts are used as ratios.

Declared as a mutation nothing is merged; returned as an output, amax costs a copy a tensor.

`scale_inv` is an output for safety too: recomputed in backward from `scale`, it could come from a
scale that has moved since.

Shapes: x is [M, K]. K is padded with zeros to a multiple of 16, and so is M in the transpose, where
it is what the wgrad GEMM contracts over: any M works, and zeros change neither amax nor product.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.kernels import load

# What the operators that compute something before they cast take last, as `quantize` does.
FLAGS = ("observe", "transpose", "column_sums")

# The GEMMs want the contracted size in multiples of 16 bytes.
ALIGNMENT = 16

# Addresses of scales that were never set: their first tensor is scaled by its own amax instead.
# Host state, because asking the device would cost a sync a call; only this operator may look at
# it.
_cold: set[int] = set()
_cold_used: set[int] = set()


def mark_cold(scales: Iterable[Tensor]) -> None:
    """These scales were never set: use the live amax until `mark_warm`."""
    _cold.update(scale.data_ptr() for scale in scales)


def mark_warm(scales: Iterable[Tensor]) -> None:
    """These scales hold a value (or their memory is about to be freed)."""
    addresses = {scale.data_ptr() for scale in scales}
    _cold.difference_update(addresses)
    _cold_used.difference_update(addresses)


def cold_was_used(scales: Iterable[Tensor]) -> bool:
    """Did a cast go through one of these while it was cold? Costs no sync."""
    return bool(_cold_used) and any(scale.data_ptr() in _cold_used for scale in scales)


def is_cold(scale: Tensor) -> bool:
    """Was this scale never set?"""
    return scale.data_ptr() in _cold


def padded(size: int) -> int:
    """`size` rounded up to a multiple of 16."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def dtype_of(e5m2: bool) -> torch.dtype:
    """The FP8 format."""
    return numerics.E5M2 if e5m2 else numerics.E4M3


def _pad(x: Tensor, rows: int, cols: int) -> Tensor:
    """Zero-pad a contiguous FP8 [M, K]; through uint8, which every backend can copy."""
    if tuple(x.shape) == (rows, cols):
        return x
    out = torch.zeros(rows, cols, dtype=torch.uint8, device=x.device)
    out[: x.shape[0], : x.shape[1]] = x.view(torch.uint8)
    return out.view(x.dtype)


def _transposed(x: Tensor) -> Tensor:
    """[M, K] FP8 -> [padded K, padded M] FP8, contiguous."""
    # A clone, not contiguous(): with no rows at all that would be a view of x, and an operator may
    # not return two views of one memory.
    columns = x.view(torch.uint8).t().clone(memory_format=torch.contiguous_format)
    return _pad(columns.view(x.dtype), padded(x.shape[1]), padded(x.shape[0]))


def preserved_version(*tensors: Tensor) -> AbstractContextManager[None]:
    """Writes to `tensors` inside the block do not count as changes to what autograd has saved."""
    context: AbstractContextManager[None]
    context = torch.autograd._unsafe_preserve_version_counter(tensors)  # type: ignore[attr-defined]
    return context


def _record(amax: Tensor, counts: Tensor, live: Tensor, seen: Tensor) -> None:
    with preserved_version(amax, counts):
        amax.copy_(torch.maximum(amax, live))
        counts.add_(seen)


def kernels() -> Any:
    """The Triton kernels, or None where there is no Triton (the plain form is slow on a GPU)."""
    return load("quantize", "casts to FP8 run as plain PyTorch: right, but slow")


def quantize_now(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    limit: float,
    e5m2: bool,
    live: bool,
    observe: bool,
    transpose: bool,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`quantize`, not through the dispatcher: a call of it costs as much as a small cast.

    Column sums that were not asked for are None: an empty tensor takes as long as any.
    """
    dtype = dtype_of(e5m2)
    if scale.data_ptr() in _cold:
        _cold_used.add(scale.data_ptr())
        live = True
    if x.is_cuda and x.numel() and (found := kernels()) is not None:
        return found.quantize(  # type: ignore[no-any-return]
            x,
            scale,
            amax,
            counts,
            limit,
            dtype,
            live=live,
            observe=observe,
            transpose=transpose,
            column_sums=column_sums,
        )
    seen = numerics.amax(x)
    used = numerics.scale_from_amax(seen, limit) if live else scale.clone()
    x_fp8 = numerics.quantize(x, used, dtype).contiguous()
    if observe:
        _record(amax, counts, seen, numerics.counts(x, used, x_fp8))
    x_fp8_t = _transposed(x_fp8) if transpose else x_fp8.new_empty(0, 0)
    sums = x.sum(0, dtype=torch.float32) if column_sums else None
    return _pad(x_fp8, x.shape[0], padded(x.shape[1])), x_fp8_t, used.reciprocal(), sums


def as_traced(
    cast: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `quantize_now` returns as an operator has to: nothing is an empty tensor."""
    rows, rows_t, scale_inv, sums = cast
    return rows, rows_t, scale_inv, scale_inv.new_empty(0) if sums is None else sums


def _quantize(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return as_traced(quantize_now(x, *rest))


def _quantize_fake(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    limit: float,
    e5m2: bool,
    live: bool,
    observe: bool,
    transpose: bool,
    column_sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    x_fp8 = x.new_empty((rows, padded(cols)), dtype=dtype_of(e5m2))
    shape = (padded(cols), padded(rows)) if transpose else (0, 0)
    sums = x.new_empty((cols if column_sums else 0,), dtype=torch.float32)
    return x_fp8, x.new_empty(shape, dtype=dtype_of(e5m2)), torch.empty_like(scale), sums


# By hand and not by the `custom_op` decorator, whose wrapper costs time on each call.
_library = torch.library.Library("fp8patch", "DEF")
_library.define(
    "quantize(Tensor x, Tensor scale, Tensor amax, Tensor counts, float limit, bool e5m2, "
    "bool live, bool observe, bool transpose, bool column_sums) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _library.impl("quantize", _quantize, _key)
torch.library.register_fake("fp8patch::quantize", _quantize_fake, lib=_library)


def quantize(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    limit: float,
    e5m2: bool,
    live: bool,
    observe: bool,
    transpose: bool,
    column_sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cast with one scale a tensor.

    Args:
        x: [M, K] in FP32, BF16 or FP16; may be non-contiguous.
        scale: FP32 scalar, used unless `live` or never set.
        amax: FP32 scalar, `counts`: int64 [4]: the slot, written if `observe`.
        limit: what the live amax is scaled to: the largest FP8 value times 2^-margin.
        e5m2: E5M2 instead of E4M3.
        live: scale by the amax of x itself (two passes).
        observe: write the slot.
        transpose: return the transpose too (empty otherwise).
        column_sums: return the sums over M of x itself, the gradient of a bias.

    Returns:
        x_fp8 [M, padded K], its transpose [padded K, padded M], scale_inv (FP32 scalar), column
        sums (FP32 [K]; if not asked for: None, traced an empty tensor).
    """
    if x.requires_grad:
        x = x.detach()
    arguments = (x, scale, amax, counts, limit, e5m2, live, observe, transpose, column_sums)
    if type(x) is Tensor and not torch.compiler.is_compiling():
        return quantize_now(*arguments)
    # Traced, or a tensor without data.
    result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.fp8patch.quantize.default(*arguments)
    return result


@torch.library.custom_op("fp8patch::quantize_rowwise", mutates_args=())
def quantize_rowwise(
    x: Tensor,
    amax: Tensor,
    counts: Tensor,
    limit: float,
    e5m2: bool,
    observe: bool,
    transpose: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast with one scale a row, from the row's own amax; arguments as in `quantize`.

    Returns:
        x_fp8 [M, padded K], x_fp8_t [padded K, padded M], scale_inv [M, 1], scale_inv_t [padded
        K, 1]. The transpose is quantised by *its* rows (the columns of x), so it holds other
        values.
    """
    dtype = dtype_of(e5m2)
    x_fp8, scale = numerics.quantize_rowwise(x, dtype, limit)
    x_fp8 = x_fp8.contiguous()
    if observe:
        _record(amax, counts, numerics.amax(x), numerics.counts(x, scale, x_fp8))
    if transpose:
        columns, scale_t = numerics.quantize_rowwise(x.t(), dtype, limit)
        x_fp8_t = _pad(columns.contiguous(), padded(x.shape[1]), padded(x.shape[0]))
        missing = x_fp8_t.shape[0] - scale_t.shape[0]
        inv_t = torch.nn.functional.pad(scale_t.reciprocal(), (0, 0, 0, missing), value=1.0)
    else:
        x_fp8_t, inv_t = x_fp8.new_empty(0, 0), scale.new_empty(0, 1)
    return _pad(x_fp8, x.shape[0], padded(x.shape[1])), x_fp8_t, scale.reciprocal(), inv_t


@quantize_rowwise.register_fake
def _(
    x: Tensor,
    amax: Tensor,
    counts: Tensor,
    limit: float,
    e5m2: bool,
    observe: bool,
    transpose: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    x_fp8 = x.new_empty((rows, padded(cols)), dtype=dtype_of(e5m2))
    shape = (padded(cols), padded(rows)) if transpose else (0, 0)
    x_fp8_t = x.new_empty(shape, dtype=dtype_of(e5m2))
    scale_inv = x.new_empty((rows, 1), dtype=torch.float32)
    return x_fp8, x_fp8_t, scale_inv, x.new_empty((shape[0], 1), dtype=torch.float32)
