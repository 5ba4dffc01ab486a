"""One small GEMM of each kind that FP8 hardware knows, run and compared with the oracle.

The operands are quantised by `numerics` on the CPU. The oracle is the FP64 product of exactly these
FP8 values with exactly these scales, so what is compared is the GEMM alone: its layout rules, which
scale it applies to what, how it accumulates. Rows and blocks of the data differ in size by up to
64 times: a scale in the wrong place costs tens of dB.

Every kind is run twice: on the GPU, where there is one, and emulated on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from fp8patch import numerics
from fp8patch.doctor.types import GemmTest, Outcome
from fp8patch.messages import one_line
from fp8patch.numerics import E4M3, E5M2, FP8_MAX
from fp8patch.ops.gemm import fp8_gemm

__all__ = ["KINDS", "check_gemms"]

# Rounding the result to BF16 alone leaves about 52 dB; Hopper's fast accumulation of K = 512 takes
# little of it (55 dB measured on an H200 for K up to 768). One misplaced scale leaves under 20.
BAR_DB = 45.0
# Everything is a multiple of 128, for the block kinds; K has four blocks, and so needs no padding
# of the 128x128 scales.
M, N, K = 256, 384, 512
_GRADIENT = 1e-6


@dataclass(frozen=True, slots=True)
class Operand:
    """FP8 [rows, K], and its scale_inv as the kind stores it and as [rows, K] for the oracle."""

    values: Tensor
    scale_inv: Tensor
    wide: Tensor

    def exact(self) -> Tensor:
        """FP64, without any rounding."""
        return self.values.double() * self.wide.double()


# (a, b_t, device) -> [M, N]
Gemm = Callable[[Operand, Operand, str], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to scale a GEMM.

    Attributes:
        name: How the report calls it.
        operands: Their formats.
        needs: Least compute capability that has it.
        cast: High precision [rows, K] to an operand; the first for `a`, the second for `b_t`.
        hardware, emulated: The GEMM on a device, and the same product in FP32.
        grad: `a` is a gradient: a millionth of the size.
    """

    name: str
    operands: str
    needs: tuple[int, int]
    cast: tuple[Callable[[Tensor], Operand], Callable[[Tensor], Operand]]
    hardware: Gemm
    emulated: Gemm
    grad: bool = False


def check_gemms(device: str | None) -> list[GemmTest]:
    """Run every kind: on `device` (a CUDA device; None where there is none), and emulated."""
    return [_check(kind, device) for kind in KINDS]


def _check(kind: Kind, device: str | None) -> GemmTest:
    x, weight = _data(kind)
    a, b_t = kind.cast[0](x), kind.cast[1](weight)
    oracle = a.exact() @ b_t.exact().t()
    return GemmTest(
        kind=kind.name,
        operands=kind.operands,
        needs=kind.needs,
        hardware=None if device is None else _outcome(kind.hardware, a, b_t, device, oracle),
        emulated=_outcome(kind.emulated, a, b_t, "cpu", oracle),
        rounding_db=numerics.sqnr(x.double() @ weight.double().t(), oracle),
    )


def _outcome(gemm: Gemm, a: Operand, b_t: Operand, device: str, oracle: Tensor) -> Outcome:
    try:
        found = numerics.sqnr(oracle, gemm(a, b_t, device).cpu())
    except Exception as error:  # whatever a library raises is the answer here
        return Outcome(ok=False, ran=False, detail=one_line(error))
    # `not >=`, so that nan is a failure.
    wrong = not found >= BAR_DB
    detail = f"{found:.1f} dB, and {BAR_DB:g} is the least that rounding explains" if wrong else ""
    return Outcome(ok=not wrong, ran=True, db=found, detail=detail)


def _data(kind: Kind) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def uneven(rows: int) -> Tensor:
        x = torch.randn(rows, K, generator=generator)
        by_row = torch.randint(-3, 4, (rows, 1), generator=generator)
        by_block = torch.randint(-3, 4, (rows // 128, K // 128), generator=generator)
        wide = by_block.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return torch.ldexp(x, by_row + wide)

    x, weight = uneven(M), uneven(N)
    return x * _GRADIENT if kind.grad else x, weight


# -- casts ----------------------------------------------------------------------------------------


def _by_tensor(x: Tensor, dtype: torch.dtype) -> Operand:
    scale = numerics.scale_from_amax(numerics.amax(x), FP8_MAX[dtype])
    inverse = scale.reciprocal()
    return Operand(numerics.quantize(x, scale, dtype), inverse, inverse.expand(x.shape))


def _by_row(x: Tensor) -> Operand:
    values, scale = numerics.quantize_rowwise(x, E4M3, FP8_MAX[E4M3])
    inverse = scale.reciprocal()
    return Operand(values, inverse, inverse.expand(x.shape))


def _by_block(x: Tensor, block: tuple[int, int]) -> Operand:
    values, inverse = numerics.quantize_blockwise(x, E4M3, block)
    wide = inverse.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return Operand(values, inverse, wide)


def _by_mx(x: Tensor) -> Operand:
    values, exponent = numerics.quantize_mxfp8(x)
    inverse = torch.ldexp(torch.ones(exponent.shape), exponent.int() - 127)
    return Operand(values, exponent, inverse.repeat_interleave(32, 1))


# -- GEMMs ----------------------------------------------------------------------------------------


def _own(a: Operand, b_t: Operand, device: str, *, wgrad: bool, emulate: bool) -> Tensor:
    """The GEMM that converted modules call, as for fprop or for wgrad."""
    return fp8_gemm(
        a.values.to(device),
        b_t.values.to(device),
        a.scale_inv.to(device),
        b_t.scale_inv.to(device),
        torch.float32 if wgrad else torch.bfloat16,
        fast_accum=not wgrad,
        emulate=emulate,
    )


def _dequantized(a: Operand, b_t: Operand, device: str) -> Tensor:
    """Block scales change along K: the product of what the FP8 values stand for."""
    with torch.autocast(device, enabled=False):
        product = (a.values.float() * a.wide) @ (b_t.values.float() * b_t.wide).t()
    return product.bfloat16()


def _blocks(a: Operand, b_t: Operand, device: str, *, recipe_b: ScalingType) -> Tensor:
    """cuBLAS wants the scales of both operands with the blocks of K as the slow dimension."""
    inverse_b = column_major(b_t.scale_inv)
    square = recipe_b == ScalingType.BlockWise128x128
    return scaled_mm(
        a.values.to(device),
        b_t.values.to(device).t(),
        column_major(a.scale_inv).to(device),
        ScalingType.BlockWise1x128,
        # [N / 128, K / 128] for us, and K first for it; of 1x128 blocks it takes [N, K / 128].
        (b_t.scale_inv.t() if square else inverse_b).to(device),
        recipe_b,
        output_dtype=torch.bfloat16,
    )


def _mx(a: Operand, b_t: Operand, device: str) -> Tensor:
    return scaled_mm(
        a.values.to(device),
        b_t.values.to(device).t(),
        swizzled(a.scale_inv).to(device),
        ScalingType.BlockWise1x32,
        swizzled(b_t.scale_inv).to(device),
        ScalingType.BlockWise1x32,
        SwizzleType.SWIZZLE_32_4_4,
        SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.bfloat16,
    )


def column_major(x: Tensor) -> Tensor:
    """[R, C] with strides (1, R)."""
    return x.t().contiguous().t()


def swizzled(exponent: Tensor) -> Tensor:
    """uint8 [R, C], R a multiple of 128 and C of 4 -> E8M0 [R * C] in cuBLAS's order.

    Tiles of 128x4 follow each other by rows. Inside one, (r, c) lies at (r % 32) * 16 + (r // 32) *
    4 + c.
    """
    rows, cols = exponent.shape
    tiles = exponent.reshape(rows // 128, 4, 32, cols // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten().view(torch.float8_e8m0fnu)


_1X128 = partial(_by_block, block=(1, 128))
_128X128 = partial(_by_block, block=(128, 128))


def _own_kind(
    name: str,
    needs: tuple[int, int],
    cast: Callable[[Tensor], Operand],
    *,
    wgrad: bool = False,
) -> Kind:
    first = partial(_by_tensor, dtype=E5M2) if wgrad else cast
    return Kind(
        name=name,
        operands="E5M2 x E4M3" if wgrad else "E4M3 x E4M3",
        needs=needs,
        cast=(first, cast),
        hardware=partial(_own, wgrad=wgrad, emulate=False),
        emulated=partial(_own, wgrad=wgrad, emulate=True),
        grad=wgrad,
    )


def _block_kind(
    name: str,
    needs: tuple[int, int],
    cast: tuple[Callable[[Tensor], Operand], Callable[[Tensor], Operand]],
    hardware: Gemm,
) -> Kind:
    return Kind(
        name=name,
        operands="E4M3 x E4M3",
        needs=needs,
        cast=cast,
        hardware=hardware,
        emulated=_dequantized,
    )


_E4M3 = partial(_by_tensor, dtype=E4M3)
_SQUARE = partial(_blocks, recipe_b=ScalingType.BlockWise128x128)
_LINES = partial(_blocks, recipe_b=ScalingType.BlockWise1x128)

# Least compute capabilities: hardware.py says why, and MXFP8 is in the tensor cores of Blackwell.
KINDS: tuple[Kind, ...] = (
    _own_kind("per tensor", (8, 9), _E4M3),
    _own_kind("per tensor, FP32 out", (8, 9), _E4M3, wgrad=True),
    _own_kind("rowwise", (9, 0), _by_row),
    _block_kind("1x128 by 128x128", (9, 0), (_1X128, _128X128), _SQUARE),
    _block_kind("1x128 by 1x128", (9, 0), (_1X128, _1X128), _LINES),
    _block_kind("MXFP8 (1x32)", (10, 0), (_by_mx, _by_mx), _mx),
)
