"""The parts of the kernels that cast: reading, casting, writing and observing a tile.

Single bytes are slow to transpose through shared memory. So a thread reads the same columns of four
neighbouring rows and packs their results into one 32-bit word (packing.py): the transpose then
moves words.

Bit equality with `numerics` needs three things said explicitly: divisions are correctly rounded
(`div_rn`; a plain `/` compiles to a 2-ulp approximation), inf becomes nan before the saturating
conversion would make it the largest value, and amax is compared as the integer of its bits, where
nan is above inf is above every number, so that both propagate.
"""

import triton
import triton.language as tl

from fp8patch import numerics
from fp8patch.ops.triton.forms import formed
from fp8patch.ops.triton.packing import cast_four

CONSTANTS = {
    dtype: {
        "LARGEST": numerics.FP8_MAX[dtype],
        "CLIPS": numerics.CLIPS_ABOVE[dtype],
        "FLUSHES_TO": numerics.FLUSHES_TO[dtype],
    }
    for dtype in (numerics.E4M3, numerics.E5M2)
}


@triton.jit
def load_row(x, m, k, rows, cols, stride_m, stride_k, EVEN: tl.constexpr):
    """FP32 values of rows m and columns k; zero outside x."""
    offsets = m.to(tl.int64)[:, None] * stride_m + k.to(tl.int64)[None, :] * stride_k
    if EVEN:
        return tl.load(x + offsets).to(tl.float32)
    inside = (m[:, None] < rows) & (k[None, :] < cols)
    return tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def raw_row(x, m, k, rows, cols, more, stride_m, stride_k, EVEN: tl.constexpr):
    """Rows m and columns k as they are stored; zero outside x, and anything if not `more`."""
    offsets = m.to(tl.int64)[:, None] * stride_m + k.to(tl.int64)[None, :] * stride_k
    if EVEN:
        return tl.load(x + offsets, mask=more)
    return tl.load(x + offsets, mask=(m[:, None] < rows) & (k[None, :] < cols) & more, other=0.0)


@triton.jit
def other_row(
    first, y, m, k, rows, cols, more, stride_m, stride_k, EVEN: tl.constexpr, FORM: tl.constexpr
):
    """Of y, where the form (forms.py) reads it, as `raw_row` does; else `first`."""
    alone: tl.constexpr = FORM == "to_bf16" or FORM == "to_fp16"
    if alone or FORM == "" or FORM == "gelu" or FORM == "gelu_tanh":
        row = first
    else:
        row = raw_row(y, m, k, rows, cols, more, stride_m, stride_k, EVEN)
    return row


@triton.jit
def formed_row(
    x, y, factor, m, k, rows, cols, stride_m, stride_k,
    EVEN: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """FP32 values of rows m and columns k of what is cast: x, or a form (forms.py) of x and y."""
    first = load_row(x, m, k, rows, cols, stride_m, stride_k, EVEN)
    second = other_row(first, y, m, k, rows, cols, True, stride_m, stride_k, EVEN, FORM)
    return formed(first, second.to(tl.float32), factor, x.dtype.element_ty, FORM, PTX)


@triton.jit
def formed_rows(
    x, y, factor, w, k, rows, cols, stride_m, stride_k,
    EVEN: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The same of rows 4 w, 4 w + 1, 4 w + 2 and 4 w + 3."""
    v0 = formed_row(x, y, factor, 4 * w, k, rows, cols, stride_m, stride_k, EVEN, FORM, PTX)
    v1 = formed_row(x, y, factor, 4 * w + 1, k, rows, cols, stride_m, stride_k, EVEN, FORM, PTX)
    v2 = formed_row(x, y, factor, 4 * w + 2, k, rows, cols, stride_m, stride_k, EVEN, FORM, PTX)
    v3 = formed_row(x, y, factor, 4 * w + 3, k, rows, cols, stride_m, stride_k, EVEN, FORM, PTX)
    return v0, v1, v2, v3


@triton.jit
def bits_of(values):
    """|value| as the integer of its FP32 bits, which orders as the values do, and nan on top."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@triton.jit
def live_scale(bits, limit, FLOOR: tl.constexpr):
    amax = tl.load(bits).to(tl.float32, bitcast=True)
    scale = tl.div_rn(limit, tl.maximum(amax, FLOOR))
    return tl.where(amax < float("inf"), scale, 1.0)


@triton.jit
def as_one(flags):
    # As floats: the compiler turns a sum of booleans into bit masks and their population count, at
    # six instructions an element.
    return tl.where(flags, 1.0, 0.0)


@triton.jit
def add_count(counts, column, ones):
    number = tl.sum(ones)
    if number > 0.0:
        tl.atomic_add(counts + column, number.to(tl.int64), sem="relaxed")


@triton.jit
def raise_amax(amax, top_bits):
    # Thousands of atomics on one address would queue up; most tiles have nothing to add to it.
    slot = amax.to(tl.pointer_type(tl.int32), bitcast=True)
    if top_bits > tl.load(slot):
        tl.atomic_max(slot, top_bits, sem="relaxed")


@triton.jit
def flushed(values, used, FLUSHES_TO: tl.constexpr):
    return as_one((values != 0.0) & (tl.abs(values * used) <= FLUSHES_TO))


@triton.jit
def _store_row(x_fp8, quantized, m, k, rows, width, EVEN: tl.constexpr):
    target = x_fp8.to(tl.pointer_type(tl.uint8), bitcast=True)
    target += m.to(tl.int64)[:, None] * width + k[None, :]
    if EVEN:
        tl.store(target, quantized)
    else:
        tl.store(target, quantized, mask=(m[:, None] < rows) & (k[None, :] < width))


@triton.jit
def _store_words(x_fp8_t, words, w, k, width, height, EVEN: tl.constexpr):
    # `height` is a multiple of 16, so that each row of the transpose holds whole words.
    # (w and not a row divided by four: the compiler has to see that neighbours are neighbours.)
    words_a_row = tl.multiple_of(height // 4, 4)
    offsets = k.to(tl.int64)[:, None] * words_a_row + w[None, :]
    target = x_fp8_t.to(tl.pointer_type(tl.uint32), bitcast=True) + offsets
    if EVEN:
        tl.store(target, tl.trans(words))
    else:
        inside = (k[:, None] < width) & (w[None, :] < words_a_row)
        tl.store(target, tl.trans(words), mask=inside)


@triton.jit
def store_tile(
    x_fp8, x_fp8_t, s0, s1, s2, s3, w, k, rows, width, height,
    TRANSPOSE: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Cast and write rows 4 w to 4 w + 3, and the same transposed, as word w of each row."""
    words, b0, b1, b2, b3 = cast_four(s0, s1, s2, s3, x_fp8.dtype.element_ty, PTX)
    _store_row(x_fp8, b0, 4 * w, k, rows, width, EVEN)
    _store_row(x_fp8, b1, 4 * w + 1, k, rows, width, EVEN)
    _store_row(x_fp8, b2, 4 * w + 2, k, rows, width, EVEN)
    _store_row(x_fp8, b3, 4 * w + 3, k, rows, width, EVEN)
    if TRANSPOSE:
        _store_words(x_fp8_t, words, w, k, width, height, EVEN)


@triton.jit
def store_transposed(
    x_fp8_t, s0, s1, s2, s3, w, k, width, height, EVEN: tl.constexpr, PTX: tl.constexpr
):
    """As `store_tile`, the transpose alone."""
    words, _, _, _, _ = cast_four(s0, s1, s2, s3, x_fp8_t.dtype.element_ty, PTX)
    _store_words(x_fp8_t, words, w, k, width, height, EVEN)


@triton.jit
def outlier(
    values, used, counts, LARGEST: tl.constexpr, CLIPS: tl.constexpr, OBSERVE: tl.constexpr
):
    """What a tile with an element that clips, or is not finite, is scaled to."""
    scaled = values * used
    finite = tl.abs(values) < float("inf")
    if OBSERVE:
        add_count(counts, 0, as_one(finite & (tl.abs(scaled) > CLIPS)))
        add_count(counts, 2, as_one(finite == 0))
    return tl.where(finite, tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST), float("nan"))


@triton.jit
def max_abs(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exceeds(top_bits, used, CLIPS: tl.constexpr):
    """Whether a tile with this largest |value| holds one that clips, or is not finite."""
    return (top_bits.to(tl.float32, bitcast=True) * used <= CLIPS) == 0


@triton.jit
def cast_again(
    x, y, factor, x_fp8, x_fp8_t, counts, used, w, k, rows, cols, width, height, stride_m, stride_k,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr,
    OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Cast and write rows 4 w to 4 w + 3, among which there is an outlier, and count those."""
    v0, v1, v2, v3 = formed_rows(
        x, y, factor, w, k, rows, cols, stride_m, stride_k, EVEN, FORM, PTX
    )
    s0 = outlier(v0, used, counts, LARGEST, CLIPS, OBSERVE)
    s1 = outlier(v1, used, counts, LARGEST, CLIPS, OBSERVE)
    s2 = outlier(v2, used, counts, LARGEST, CLIPS, OBSERVE)
    s3 = outlier(v3, used, counts, LARGEST, CLIPS, OBSERVE)
    store_tile(x_fp8, x_fp8_t, s0, s1, s2, s3, w, k, rows, width, height, TRANSPOSE, EVEN, PTX)


@triton.jit
def quantize_tile(
    x, y, factor, x_fp8, x_fp8_t, amax, counts, used,
    w, k, rows, cols, width, height, stride_m, stride_k,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr,
    OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Cast rows 4 w to 4 w + 3, write them, and add to the slot what was seen."""
    v0, v1, v2, v3 = formed_rows(
        x, y, factor, w, k, rows, cols, stride_m, stride_k, EVEN, FORM, PTX
    )
    store_tile(
        x_fp8, x_fp8_t, v0 * used, v1 * used, v2 * used, v3 * used, w, k, rows, width, height,
        TRANSPOSE, EVEN, PTX,
    )  # fmt: skip
    tile_bits = tl.max(bits_of(max_abs(max_abs(v0, v1), max_abs(v2, v3))))
    if OBSERVE:
        raise_amax(amax, tile_bits)
        lost = flushed(v0, used, FLUSHES_TO) + flushed(v1, used, FLUSHES_TO)
        lost += flushed(v2, used, FLUSHES_TO) + flushed(v3, used, FLUSHES_TO)
        add_count(counts, 1, lost)
    # What only an outlier needs is done again, from memory, in the rare tile that holds one.
    if exceeds(tile_bits, used, CLIPS):
        cast_again(
            x, y, factor, x_fp8, x_fp8_t, counts, used,
            w, k, rows, cols, width, height, stride_m, stride_k,
            LARGEST, CLIPS, OBSERVE, TRANSPOSE, EVEN, FORM, PTX,
        )  # fmt: skip
