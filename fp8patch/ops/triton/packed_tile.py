"""The cast of a tile of BF16 values, observed two at a time.

As in cast_tile.py, of which these are the parts where a pair of BF16 values in one register takes
one instruction for what two FP32 values take two to four: the largest, and how many become zero.
For the latter a value is compared with the largest BF16 number that becomes zero, which is found
once, instead of being scaled first. That takes a GPU of compute capability 9.0.

That takes fewer registers, too: sixteen warps run at once on a multiprocessor instead of twelve.
"""

import triton
import triton.language as tl

from fp8patch.ops.triton.cast_tile import (
    cast_again,
    exceeds,
    formed_rows,
    raise_amax,
    raw_row,
    store_tile,
)

# Registers of a thread: what lets 16 warps run at once.
REGISTERS = 128


def _observing() -> str:
    """PTX for four columns of four rows, a pair of columns a register.

    $0-3 are the bits of the largest |value|, four times; the sum of $4-7 has the number of values
    that are not above the limit and not zero: masks of 16 bits, -1 for such a value, added up as
    words; $8-15 values by row, $16-17 the limit.
    """
    lines = [".reg .b32 top, low, high, mask, equal, none, sum, a<8>;"]
    lines += ["mov.b32 none, 0;", "mov.b32 sum, 0;"]
    for pair in range(8):
        value = f"${8 + pair}"
        lines += [
            f"abs.bf16x2 a{pair}, {value};",
            f"set.le.u32.bf16x2 mask, a{pair}, ${16 + pair % 2};",
            f"set.eq.u32.bf16x2 equal, {value}, none;",
            "sub.s32 mask, mask, equal;",
            "add.s32 sum, sum, mask;",
        ]
    lines.append("max.NaN.bf16x2 top, a0, a1;")
    lines += [f"max.NaN.bf16x2 top, top, a{pair};" for pair in range(2, 8)]
    lines += ["shl.b32 low, top, 16;", "and.b32 high, top, 0xffff0000;"]
    lines += ["max.s32 $0, low, high;", "mov.b32 $1, $0;", "mov.b32 $2, $0;", "mov.b32 $3, $0;"]
    lines += ["mov.b32 $4, sum;", "mov.b32 $5, 0;", "mov.b32 $6, 0;", "mov.b32 $7, 0;"]
    return "{\n" + "\n".join(lines) + "\n}"


_OBSERVING = tl.constexpr(_observing())
_OBSERVING_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 10))
_WIDENING = tl.constexpr("{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }")
_NARROWING = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@triton.jit
def widened(values, PTX: tl.constexpr):
    """BF16 values in FP32, in one instruction each instead of one and a half."""
    if PTX == "":
        wide = values.to(tl.float32)
    else:
        wide = tl.inline_asm_elementwise(
            _WIDENING, "=&r,=r,r", [values], dtype=tl.float32, is_pure=True, pack=2
        )
    return wide


@triton.jit
def narrowed(values, PTX: tl.constexpr):
    """FP32 values in BF16, two at once."""
    if PTX == "":
        narrow = values.to(tl.bfloat16)
    else:
        narrow = tl.inline_asm_elementwise(
            _NARROWING, "=r,f,f", [values], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return narrow


@triton.jit
def largest_flushed(used, FLUSHES_TO: tl.constexpr):
    """The largest BF16 number that times |used| is at most FLUSHES_TO; 0 if there is none."""
    near = (FLUSHES_TO / tl.abs(used)).to(tl.int32, bitcast=True) >> 16
    largest = tl.zeros((), tl.int32)
    # The division may be off by a bit or two, hence the number by one.
    for step in tl.static_range(3):
        code = tl.maximum(near + (step - 1), 0)
        product = (code << 16).to(tl.float32, bitcast=True) * tl.abs(used)
        largest = tl.where(product <= FLUSHES_TO, tl.maximum(largest, code), largest)
    return largest.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _pair(top, number, other_top, other_number):
    return tl.maximum(top, other_top), number + other_number


@triton.jit
def _seen(p0, p1, p2, p3, limit, PTX: tl.constexpr):
    """Bits of the largest |value|, and what adds up to the flushed ones (`_number`)."""
    if PTX == "":
        v0, v1 = tl.abs(p0.to(tl.float32)), tl.abs(p1.to(tl.float32))
        v2, v3 = tl.abs(p2.to(tl.float32)), tl.abs(p3.to(tl.float32))
        b0, b1 = v0.to(tl.int32, bitcast=True), v1.to(tl.int32, bitcast=True)
        b2, b3 = v2.to(tl.int32, bitcast=True), v3.to(tl.int32, bitcast=True)
        tops = tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3))
        least = limit.to(tl.float32)
        numbers = ((v0 > 0.0) & (v0 <= least)).to(tl.int32)
        numbers += ((v1 > 0.0) & (v1 <= least)).to(tl.int32)
        numbers += ((v2 > 0.0) & (v2 <= least)).to(tl.int32)
        numbers += ((v3 > 0.0) & (v3 <= least)).to(tl.int32)
    else:
        limits = tl.broadcast_to(limit, p0.shape)
        tops, masks = tl.inline_asm_elementwise(
            _OBSERVING,
            _OBSERVING_CONSTRAINTS,
            [p0, p1, p2, p3, limits],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=4,
        )
        numbers = masks
    return tops, numbers


@triton.jit
def _number(masks, PTX: tl.constexpr):
    """How many of `_seen` that is, added up."""
    if PTX == "":
        number = masks
    else:
        # The lower halves, -1 each, have carried into the upper ones.
        low = (-masks) & 0xFFFF
        number = low + ((low - ((masks + low) >> 16)) & 0xFFFF)
    return number


@triton.jit
def packed_rows(
    x, y, factor, w, k, rows, cols, stride_m, stride_k,
    EVEN: tl.constexpr, FORM: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Rows 4 w to 4 w + 3 of what is cast, in BF16."""
    if FORM == "":
        p0 = raw_row(x, 4 * w, k, rows, cols, True, stride_m, stride_k, EVEN)
        p1 = raw_row(x, 4 * w + 1, k, rows, cols, True, stride_m, stride_k, EVEN)
        p2 = raw_row(x, 4 * w + 2, k, rows, cols, True, stride_m, stride_k, EVEN)
        p3 = raw_row(x, 4 * w + 3, k, rows, cols, True, stride_m, stride_k, EVEN)
    else:
        v0, v1, v2, v3 = formed_rows(
            x, y, factor, w, k, rows, cols, stride_m, stride_k, EVEN, FORM, PTX
        )
        p0, p1, p2, p3 = narrowed(v0, PTX), narrowed(v1, PTX), narrowed(v2, PTX), narrowed(v3, PTX)
    return p0, p1, p2, p3


@triton.jit
def quantize_packed(
    p0, p1, p2, p3, x, y, factor, x_fp8, x_fp8_t, amax, counts, used, w, k, rows, cols, width,
    height, stride_m, stride_k,
    LARGEST: tl.constexpr, CLIPS: tl.constexpr, FLUSHES_TO: tl.constexpr,
    OBSERVE: tl.constexpr, TRANSPOSE: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """As `cast_tile.quantize_tile`, of `packed_rows`."""
    store_tile(
        x_fp8, x_fp8_t, widened(p0, PTX) * used, widened(p1, PTX) * used, widened(p2, PTX) * used,
        widened(p3, PTX) * used, w, k, rows, width, height, TRANSPOSE, EVEN, PTX,
    )  # fmt: skip
    tops, numbers = _seen(p0, p1, p2, p3, largest_flushed(used, FLUSHES_TO), PTX)
    if PTX == "":
        # (Triton's interpreter calls `_pair` for each element.)
        top_bits, lost = tl.max(tops), tl.sum(numbers)
    else:
        # Both in one go, as each takes a barrier.
        SIZE: tl.constexpr = tops.shape[0] * tops.shape[1]
        flat = tl.reshape(tops, (SIZE,)), tl.reshape(numbers, (SIZE,))
        top_bits, lost = tl.reduce(flat, 0, _pair)
    if OBSERVE:
        raise_amax(amax, top_bits)
        number = _number(lost, PTX)
        if number > 0:
            tl.atomic_add(counts + 1, number.to(tl.int64), sem="relaxed")
    if exceeds(top_bits, used, CLIPS):
        cast_again(
            x, y, factor, x_fp8, x_fp8_t, counts, used, w, k, rows, cols, width, height,
            stride_m, stride_k, LARGEST, CLIPS, OBSERVE, TRANSPOSE, EVEN, FORM, PTX,
        )  # fmt: skip
