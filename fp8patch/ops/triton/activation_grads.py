"""The gradients of an activation, cast, and the activation's own transpose, in one read.

The parts are those of the other casts (cast_tile.py, forms.py). With column sums a program walks
down many tiles, and loads the next before it casts this one, for the reasons that column_sums.py
gives. Without them a program has one tile.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.triton.cast_tile import (
    CONSTANTS,
    add_count,
    bits_of,
    exceeds,
    max_abs,
    outlier,
    raise_amax,
    raw_row,
    store_tile,
    store_transposed,
)
from fp8patch.ops.triton.column_sums import cast_and_add, near_less_zero
from fp8patch.ops.triton.forms import value_and_grads
from fp8patch.ops.triton.launch import Launcher, blocks_of, empty_matrix, size_class
from fp8patch.ops.triton.packing import ASSEMBLY
from fp8patch.ops.triton.transpose_again import write_transposed

# Rows, columns and warps of a tile: with column sums, without, and of a gated form. Tuned by
# `scripts/tune_quantize.py --grads`.
_SUMMED, _PLAIN, _GATED = (32, 64, 4), (32, 64, 4), (32, 64, 2)
# With column sums, how many programs to aim at: twice what runs at once.
PROGRAMS = 1056
_BACKWARD = {"gelu": "gelu_backward", "gelu_tanh": "gelu_tanh_backward", "silu_mul": ""}


@triton.jit
def _raw_four(x, w, k, rows, cols, more, stride, EVEN: tl.constexpr):
    """Rows 4 w to 4 w + 3 as they are stored."""
    r0 = raw_row(x, 4 * w, k, rows, cols, more, stride, 1, EVEN)
    r1 = raw_row(x, 4 * w + 1, k, rows, cols, more, stride, 1, EVEN)
    r2 = raw_row(x, 4 * w + 2, k, rows, cols, more, stride, 1, EVEN)
    r3 = raw_row(x, 4 * w + 3, k, rows, cols, more, stride, 1, EVEN)
    return r0, r1, r2, r3


@triton.jit
def _formed_row(x, y, grad, FORM: tl.constexpr, BACKWARD: tl.constexpr, PTX: tl.constexpr):
    return value_and_grads(
        x.to(tl.float32), y.to(tl.float32), grad.to(tl.float32), x.dtype, FORM, BACKWARD, PTX
    )


@triton.jit
def _tops(v0, v1, v2, v3, BM: tl.constexpr, BK: tl.constexpr):
    """The largest |value| of each group of columns that one thread holds."""
    tops = max_abs(max_abs(v0, v1), max_abs(v2, v3))
    return tl.reduce(tl.reshape(tops, (BM // 4, BK // 4, 4)), 2, max_abs)


@triton.jit
def _lost(v0, v1, v2, v3, used, FLUSHES_TO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    small = near_less_zero(v0, used, FLUSHES_TO) + near_less_zero(v1, used, FLUSHES_TO)
    small += near_less_zero(v2, used, FLUSHES_TO) + near_less_zero(v3, used, FLUSHES_TO)
    return tl.sum(tl.reshape(small, (BM // 4, BK // 4, 4)), 2)


@triton.jit
def _has_outlier(v0, v1, v2, v3, used, CLIPS: tl.constexpr):
    top_bits = tl.max(bits_of(max_abs(max_abs(v0, v1), max_abs(v2, v3))))
    return exceeds(top_bits, used, CLIPS)


@triton.jit
def _cast_again(
    v0, v1, v2, v3, used, x_fp8, x_fp8_t, counts, w, k, rows, width, height,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, OBSERVE: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    if _has_outlier(v0, v1, v2, v3, used, CLIPS):
        s0 = outlier(v0, used, counts, LARGEST, CLIPS, OBSERVE)
        s1 = outlier(v1, used, counts, LARGEST, CLIPS, OBSERVE)
        s2 = outlier(v2, used, counts, LARGEST, CLIPS, OBSERVE)
        s3 = outlier(v3, used, counts, LARGEST, CLIPS, OBSERVE)
        store_tile(x_fp8, x_fp8_t, s0, s1, s2, s3, w, k, rows, width, height, True, EVEN, PTX)


@triton.jit
def _see(amax, counts, top_bits, lost, rows, cols):
    raise_amax(amax, top_bits)
    add_count(counts, 1, lost)
    if tl.program_id(0) == 0:
        # A size of 1 is a Python constant in here, which has no `.to`.
        tl.atomic_add(counts + 3, (tl.zeros((), tl.int64) + rows) * cols, sem="relaxed")


@triton.jit
def _outliers_again(
    x, y, grad, dx_fp8, dx_fp8_t, dx_counts, dy_fp8, dy_fp8_t, dy_counts, value_t,
    used, used_y, used_value, first, last, k, rows, cols, end, height, width,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, VALUE_LARGEST: tl.constexpr,
    VALUE_CLIPS: tl.constexpr, OBSERVE: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr,
    BACKWARD: tl.constexpr, PTX: tl.constexpr, VALUE_PTX: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rare: find the tiles that hold an outlier, and cast these again."""
    for tile in range(first, last):
        w = tile * (BM // 4) + tl.arange(0, BM // 4)
        x0, x1, x2, x3 = _raw_four(x, w, k, rows, end, True, cols, EVEN)
        y0, y1, y2, y3 = _raw_four(y, w, k, rows, end, True, cols, EVEN)
        g0, g1, g2, g3 = _raw_four(grad, w, k, rows, end, True, cols, EVEN)
        v0, a0, b0 = _formed_row(x0, y0, g0, FORM, BACKWARD, PTX)
        v1, a1, b1 = _formed_row(x1, y1, g1, FORM, BACKWARD, PTX)
        v2, a2, b2 = _formed_row(x2, y2, g2, FORM, BACKWARD, PTX)
        v3, a3, b3 = _formed_row(x3, y3, g3, FORM, BACKWARD, PTX)
        _cast_again(
            a0, a1, a2, a3, used, dx_fp8, dx_fp8_t, dx_counts, w, k, rows, width, height,
            LARGEST, CLIPS, OBSERVE, EVEN, PTX,
        )  # fmt: skip
        if BACKWARD == "":
            _cast_again(
                b0, b1, b2, b3, used_y, dy_fp8, dy_fp8_t, dy_counts, w, k, rows, width,
                height, LARGEST, CLIPS, OBSERVE, EVEN, PTX,
            )  # fmt: skip
        write_transposed(
            value_t, v0, v1, v2, v3, used_value, w, k, width, height,
            VALUE_LARGEST, VALUE_CLIPS, EVEN, VALUE_PTX,
        )  # fmt: skip


# `cols` is not specialised: see quantize.py.
@triton.jit(do_not_specialize=["cols", "tiles", "walk"])
def activation_grads_kernel(
    x, y, grad, value_inv, dx_fp8, dx_fp8_t, dx_scale, dx_inv, dx_amax, dx_counts,
    dy_fp8, dy_fp8_t, dy_scale, dy_inv, dy_amax, dy_counts, value_t, partial,
    rows, cols, height, width, tiles, walk,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr,
    VALUE_LARGEST: tl.constexpr, VALUE_CLIPS: tl.constexpr,
    OBSERVE: tl.constexpr, SUMS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    FORM: tl.constexpr, BACKWARD: tl.constexpr, PTX: tl.constexpr, VALUE_PTX: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    across = tl.cdiv(width, BK)
    first = (pid // across) * walk
    last = tl.minimum(first + walk, tiles)
    k = (pid % across) * BK + tl.arange(0, BK)
    GATED: tl.constexpr = BACKWARD == ""
    used, used_y = tl.load(dx_scale), tl.load(dy_scale)
    used_value = tl.div_rn(1.0, tl.load(value_inv))
    # (`width` is known to be a multiple of 16.)
    end = width if FULL else cols
    sums = tl.zeros((BM // 4, BK), tl.float32)
    top = tl.zeros((BM // 4, BK // 4), tl.float32)
    top_y, top_value, lost, lost_y = top, top, top, top
    w = first * (BM // 4) + tl.arange(0, BM // 4)
    x0, x1, x2, x3 = _raw_four(x, w, k, rows, end, True, cols, EVEN)
    g0, g1, g2, g3 = _raw_four(grad, w, k, rows, end, True, cols, EVEN)
    for tile in range(first, last):
        w = tile * (BM // 4) + tl.arange(0, BM // 4)
        y0, y1, y2, y3 = x0, x1, x2, x3
        if GATED:
            y0, y1, y2, y3 = _raw_four(y, w, k, rows, end, True, cols, EVEN)
        n0, n1, n2, n3 = x0, x1, x2, x3
        m0, m1, m2, m3 = g0, g1, g2, g3
        if SUMS:
            n = w + BM // 4
            more = tile + 1 < last
            if PTX == "":
                # Triton's interpreter (3.9) takes no scalar that was computed for a mask.
                more = (n < last * (BM // 4))[:, None]
            n0, n1, n2, n3 = _raw_four(x, n, k, rows, end, more, cols, EVEN)
            m0, m1, m2, m3 = _raw_four(grad, n, k, rows, end, more, cols, EVEN)
        v0, a0, b0 = _formed_row(x0, y0, g0, FORM, BACKWARD, PTX)
        v1, a1, b1 = _formed_row(x1, y1, g1, FORM, BACKWARD, PTX)
        v2, a2, b2 = _formed_row(x2, y2, g2, FORM, BACKWARD, PTX)
        v3, a3, b3 = _formed_row(x3, y3, g3, FORM, BACKWARD, PTX)
        store_transposed(
            value_t, v0 * used_value, v1 * used_value, v2 * used_value, v3 * used_value, w, k,
            width, height, EVEN, VALUE_PTX,
        )  # fmt: skip
        store_tile(
            dx_fp8, dx_fp8_t, a0 * used, a1 * used, a2 * used, a3 * used, w, k, rows, width,
            height, True, EVEN, PTX,
        )  # fmt: skip
        top_value = max_abs(top_value, _tops(v0, v1, v2, v3, BM, BK))
        top = max_abs(top, _tops(a0, a1, a2, a3, BM, BK))
        if SUMS:
            sums += (a0 + a1) + (a2 + a3)
        if OBSERVE:
            lost += _lost(a0, a1, a2, a3, used, FLUSHES_TO, BM, BK)
        if GATED:
            store_tile(
                dy_fp8, dy_fp8_t, b0 * used_y, b1 * used_y, b2 * used_y, b3 * used_y, w, k, rows,
                width, height, True, EVEN, PTX,
            )  # fmt: skip
            top_y = max_abs(top_y, _tops(b0, b1, b2, b3, BM, BK))
            if OBSERVE:
                lost_y += _lost(b0, b1, b2, b3, used_y, FLUSHES_TO, BM, BK)
        x0, x1, x2, x3 = n0, n1, n2, n3
        g0, g1, g2, g3 = m0, m1, m2, m3
    if SUMS:
        target = partial + (pid // across).to(tl.int64) * width + k
        tl.store(target, tl.sum(sums, 0), mask=k < width)
    bits, bits_y = tl.max(bits_of(top)), tl.max(bits_of(top_y))
    if OBSERVE:
        _see(dx_amax, dx_counts, bits, lost, rows, cols)
        if GATED:
            _see(dy_amax, dy_counts, bits_y, lost_y, rows, cols)
    again = exceeds(bits, used, CLIPS) | exceeds(bits_y, used_y, CLIPS)
    if again | exceeds(tl.max(bits_of(top_value)), used_value, VALUE_CLIPS):
        _outliers_again(
            x, y, grad, dx_fp8, dx_fp8_t, dx_counts, dy_fp8, dy_fp8_t, dy_counts, value_t,
            used, used_y, used_value, first, last, k, rows, cols, end, height, width,
            LARGEST, CLIPS, VALUE_LARGEST, VALUE_CLIPS, OBSERVE, EVEN, FORM, BACKWARD, PTX,
            VALUE_PTX, BM,
        )  # fmt: skip
    if pid == 0:
        tl.store(dx_inv, tl.div_rn(1.0, used))
        if GATED:
            tl.store(dy_inv, tl.div_rn(1.0, used_y))


_launch = Launcher(activation_grads_kernel)

_Slot = tuple[Tensor, Tensor, Tensor]
_Cast = tuple[Tensor, Tensor, Tensor]


def tile_of(form: str, column_sums: bool) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile."""
    if _BACKWARD[form] == "":
        return _GATED
    return _SUMMED if column_sums else _PLAIN


def activation_grads(
    x: Tensor,
    y: Tensor | None,
    grad: Tensor,
    form: str,
    value_inv: Tensor,
    slots: Sequence[_Slot],
    dtype: torch.dtype,
    *,
    observe: bool,
    column_sums: bool,
    tile: tuple[int, int, int] | None = None,
) -> tuple[list[_Cast], Tensor | None, Tensor]:
    """`ops.activation_grads` on the GPU; x [M, K] holds at least one element; all contiguous.

    Args:
        slots: (scale, amax, counts) of each gradient.
        column_sums: Of a form with one gradient only.

    Returns:
        (rows, transpose, scale_inv) of each gradient, column sums, the value's transpose.
    """
    rows, cols = x.shape
    device = x.device
    height, width = (rows + 15) // 16 * 16, (cols + 15) // 16 * 16
    tile = tile or tile_of(form, column_sums)
    bm, bk, warps = tile
    down, across = blocks_of(height, bm), blocks_of(width, bk)
    casts = [
        (
            empty_matrix(rows, width, dtype, device),
            empty_matrix(width, height, dtype, device),
            torch.empty_like(scale),
        )
        for scale, _, _ in slots
    ]
    value_t = empty_matrix(width, height, numerics.E4M3, device)
    y = x if y is None else y
    full = cols == width
    flags = (observe, column_sums, full and rows % bm == 0 and width % bk == 0, full)
    numbers = rows, cols, height, width
    aligned = x.data_ptr() % 16, y.data_ptr() % 16, grad.data_ptr() % 16
    sizes = size_class(rows), cols >> 31, size_class(height), size_class(width)
    variant = (x.dtype, dtype, flags, tile, form, aligned, sizes)
    outputs = []
    for (scale, amax, counts), (x_fp8, x_fp8_t, scale_inv) in zip(slots, casts, strict=True):
        outputs += [x_fp8, x_fp8_t, scale, scale_inv, amax, counts]
    tensors = x, y, grad, value_inv, *outputs, *outputs[: 12 - len(outputs)], value_t

    def constants() -> dict[str, Any]:
        return _constants(dtype, x.is_cuda, flags, form, bm, bk)

    sums = None
    if column_sums:
        shape = cols, width
        sums = cast_and_add(
            variant, down, across, tensors, numbers, constants, warps, shape, PROGRAMS, _launch
        )
    else:
        _launch(variant, down * across, (*tensors, value_t), (*numbers, down, 1), constants, warps)
    return casts, sums, value_t


def _constants(
    dtype: torch.dtype, on_gpu: bool, flags: tuple[bool, ...], form: str, bm: int, bk: int
) -> dict[str, Any]:
    value = CONSTANTS[numerics.E4M3]
    return {
        **CONSTANTS[dtype],
        "VALUE_LARGEST": value["LARGEST"],
        "VALUE_CLIPS": value["CLIPS"],
        **dict(zip(("OBSERVE", "SUMS", "EVEN", "FULL"), flags, strict=True)),
        "FORM": form,
        "BACKWARD": _BACKWARD[form],
        "PTX": ASSEMBLY[dtype] if on_gpu else "",
        "VALUE_PTX": ASSEMBLY[numerics.E4M3] if on_gpu else "",
        "BM": bm,
        "BK": bk,
    }
