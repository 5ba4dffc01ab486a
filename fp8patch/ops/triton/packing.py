"""Four rows of values to FP8 bytes, packed by column and by row, in 1.25 instructions a value.

The conversion takes two values at once, so it can put two rows of one column side by side; one move
joins four rows into a 32-bit word, which is how the transpose is stored. Eight byte permutations of
four such words give the rows back. Left to the compiler, shifting bytes together takes some eight
instructions a value, and the cast is bound by instructions rather than by memory.
"""

import torch
import triton
import triton.language as tl

from fp8patch import numerics

_NAMES = {numerics.E4M3: "e4m3x2", numerics.E5M2: "e5m2x2"}
_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["f"] * 16))


def assembly(dtype: torch.dtype) -> str:
    """PTX for four columns of four rows: $0-3 words, $4-7 rows of bytes, $8-23 values by row."""
    lines = [".reg .b16 low, high;", ".reg .b32 a, b, c, d;"]
    for column in range(4):
        row = [f"${8 + 4 * r + column}" for r in range(4)]
        for half, (first, second) in (("low", row[:2]), ("high", row[2:])):
            # The first source goes to the upper byte.
            lines.append(f"cvt.rn.satfinite.{_NAMES[dtype]}.f32 {half}, {second}, {first};")
        lines.append(f"mov.b32 ${column}, {{low, high}};")
    lines += [
        "prmt.b32 a, $0, $1, 0x5140;",
        "prmt.b32 b, $2, $3, 0x5140;",
        "prmt.b32 c, $0, $1, 0x7362;",
        "prmt.b32 d, $2, $3, 0x7362;",
        "prmt.b32 $4, a, b, 0x5410;",
        "prmt.b32 $5, a, b, 0x7632;",
        "prmt.b32 $6, c, d, 0x5410;",
        "prmt.b32 $7, c, d, 0x7632;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


ASSEMBLY = {dtype: assembly(dtype) for dtype in _NAMES}


@triton.jit
def cast_four(s0, s1, s2, s3, fp8: tl.constexpr, PTX: tl.constexpr):
    """Scaled values of four rows -> (words, row 0, row 1, row 2, row 3): uint32, and uint8 each.

    PTX is `ASSEMBLY` of the type, or "" where there is no PTX (the CPU interpreter).
    """
    if PTX == "":
        b0 = s0.to(fp8).to(tl.uint8, bitcast=True)
        b1 = s1.to(fp8).to(tl.uint8, bitcast=True)
        b2 = s2.to(fp8).to(tl.uint8, bitcast=True)
        b3 = s3.to(fp8).to(tl.uint8, bitcast=True)
        low = b0.to(tl.uint32) | (b1.to(tl.uint32) << 8)
        words = low | (b2.to(tl.uint32) << 16) | (b3.to(tl.uint32) << 24)
    else:
        words, b0, b1, b2, b3 = tl.inline_asm_elementwise(
            PTX,
            _CONSTRAINTS,
            [s0, s1, s2, s3],
            dtype=(tl.uint32, tl.uint8, tl.uint8, tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    return words, b0, b1, b2, b3


_ROUND = tl.constexpr(
    "{ cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000; }"
)


@triton.jit
def rounded(values, dtype: tl.constexpr, PTX: tl.constexpr):
    """(values in `dtype`, these in FP32 again), in 1.5 instructions a BF16 value instead of 4."""
    if PTX == "" or dtype != tl.bfloat16:
        found = values.to(dtype)
        again = found.to(tl.float32)
    else:
        found, again = tl.inline_asm_elementwise(
            _ROUND,
            "=&r,=f,=f,f,f",
            [values],
            dtype=(tl.bfloat16, tl.float32),
            is_pure=True,
            pack=2,
        )
    return found, again
