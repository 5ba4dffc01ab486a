"""What FP8 rounding is, in plain PyTorch. Every kernel must equal these functions bit for bit.

A tensor x is stored as `x_fp8 = round(x * scale)` together with `scale_inv = 1 / scale`;
`x_fp8 * scale_inv` is x again, with 3 (E4M3) or 2 (E5M2) bits of mantissa:

    E4M3  1-4-3  largest 448     smallest normal 2^-6   subnormal step 2^-9    no inf, one nan
    E5M2  1-5-2  largest 57344   smallest normal 2^-14  subnormal step 2^-16   inf and nan

E4M3 has the precision that activations and weights want, E5M2 the range that gradients want (the
HYBRID format of Micikevicius et al., "FP8 Formats for Deep Learning", 2022).

Rules that hold everywhere:
- the product `x * scale` is one FP32 multiplication, from x as it is (an FP32 weight does not pass
  through BF16), then round to nearest, ties to even;
- a finite value beyond the largest saturates to it;
- inf and nan both become nan. Saturating an inf would hide an FP16 overflow from GradScaler, which
  looks for non-finite gradients: it would never skip a step or lower its loss scale.

amax is max |x| in FP32, and it propagates inf and nan: the delayed update then sees that the step
was bad and keeps the old scale.

Shapes: M tokens, K in_features, N out_features. Scales are FP32.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

FP8_MAX: dict[torch.dtype, float] = {E4M3: 448.0, E5M2: 57344.0}

# Halfway between the largest value and the next one that the exponent would allow (480, 65536). Up
# to here the largest value is the correctly rounded result; past it, values clip.
CLIPS_ABOVE: dict[torch.dtype, float] = {E4M3: 464.0, E5M2: 61440.0}

# Half the smallest FP8 number: up to and including here a value rounds to zero (the tie is even).
FLUSHES_TO: dict[torch.dtype, float] = {E4M3: 2.0**-10, E5M2: 2.0**-17}

FP32_MAX = torch.finfo(torch.float32).max

# Floor of a live amax, so that an all-zero tensor has a finite scale whose reciprocal is a normal
# FP32 number too: 57344 / 2^-108 = 1.9e37, and its reciprocal 5e-38.
AMAX_FLOOR = 2.0**-108

# Columns of the counters that `counts` returns and a slot holds.
SATURATED, FLUSHED, NON_FINITE, SEEN = range(4)


def amax(x: Tensor) -> Tensor:
    """max |x| as an FP32 scalar; inf and nan propagate; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    # One pass; `x.abs().amax()` writes |x| first. (FP64 would not be narrowed on the way.)
    dtype = None if x.dtype == torch.float64 else torch.float32
    largest: Tensor = torch.linalg.vector_norm(x, float("inf"), dtype=dtype)
    return largest.float()


def scale_from_amax(live_amax: Tensor, limit: float) -> Tensor:
    """Scale that brings `live_amax` to `limit` (the largest FP8 value times 2^-margin).

    For current scaling and for a slot's first use. A non-finite amax gives 1 (there is no older
    scale to keep), one under `AMAX_FLOOR` gives the scale of the floor. Elementwise: a scalar per
    tensor, or [M, 1] per row.
    """
    # Not `limit / tensor`: torch turns that into a product with the reciprocal, rounded twice.
    scale = torch.full_like(live_amax, limit) / live_amax.clamp(min=AMAX_FLOOR)
    return torch.where(torch.isfinite(live_amax), scale, torch.ones_like(scale))


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x (any floating dtype, any shape) -> FP8 of `dtype`; `scale` is a scalar or broadcasts."""
    limit = FP8_MAX[dtype]
    finite = torch.where(torch.isfinite(x), x.float(), torch.nan)
    return (finite * scale).clamp(-limit, limit).to(dtype)


def dequantize(x_fp8: Tensor, scale_inv: Tensor) -> Tensor:
    """FP8 -> FP32: the value that a GEMM sees."""
    return x_fp8.float() * scale_inv


def counts(x: Tensor, scale: Tensor, x_fp8: Tensor) -> Tensor:
    """int64 [4]: elements that clipped, flushed to zero, were not finite, and all elements.

    A clipped element is finite and lies past `CLIPS_ABOVE`; a flushed one is finite, not zero, and
    became zero.
    """
    finite = torch.isfinite(x)
    clipped = finite & ((x.float() * scale).abs() > CLIPS_ABOVE[x_fp8.dtype])
    flushed = finite & (x != 0) & (x_fp8.float() == 0)
    seen = torch.full((), x.numel(), dtype=torch.int64, device=x.device)
    return torch.stack([clipped.sum(), flushed.sum(), (~finite).sum(), seen])


def quantize_rowwise(x: Tensor, dtype: torch.dtype, limit: float) -> tuple[Tensor, Tensor]:
    """x [M, K] -> (x_fp8 [M, K], scale [M, 1]), each row brought to `limit` by its own amax."""
    if x.numel() == 0:
        row_amax = torch.zeros(x.shape[0], 1, dtype=torch.float32, device=x.device)
    else:
        row_amax = x.abs().amax(dim=1, keepdim=True).float()
    scale = scale_from_amax(row_amax, limit)
    return quantize(x, scale, dtype), scale


def quantize_blockwise(
    x: Tensor, dtype: torch.dtype, block: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """x [M, K] -> (x_fp8 [M, K], scale_inv [ceil(M / bm), ceil(K / bk)]), one scale a block.

    `block` is (1, 128) for activations and gradients, (128, 128) for weights (DeepSeek-V3 report,
    section 3.3). Ragged edge blocks scale by their own amax.
    """
    rows, cols = x.shape
    bm, bk = block
    padded = torch.nn.functional.pad(x, (0, -cols % bk, 0, -rows % bm))
    blocks = padded.reshape(padded.shape[0] // bm, bm, padded.shape[1] // bk, bk)
    scale = scale_from_amax(blocks.abs().amax(dim=(1, 3)).float(), FP8_MAX[dtype])
    wide = scale.repeat_interleave(bm, 0).repeat_interleave(bk, 1)[:rows, :cols]
    return quantize(x, wide, dtype), scale.reciprocal()


def quantize_mxfp8(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """x [M, K], K a multiple of 32 -> (x_fp8 [M, K], exponent [M, K / 32] as biased E8M0 bytes).

    The block scale is the power of two at or above `amax / largest`, so nothing clips (Blackwell's
    rounding; the OCP MX text rounds down and clips). Byte e stands for 2^(e - 127), 255 for nan.

    Raises:
        ValueError: K is not a multiple of 32.
    """
    rows, cols = x.shape
    if cols % 32:
        raise ValueError(f"K={cols} is not a multiple of 32, the MXFP8 block")
    block_amax = x.reshape(rows, cols // 32, 32).abs().amax(dim=2).float()
    mantissa, exponent = torch.frexp(block_amax / FP8_MAX[dtype])
    # frexp gives mantissa in [0.5, 1): exactly 0.5 is the power of two 2^(exponent - 1) itself.
    power = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    power = torch.where(block_amax > 0, power, -127)
    scale = torch.ldexp(torch.ones_like(block_amax), -power).repeat_interleave(32, 1)
    finite = torch.isfinite(block_amax)
    return quantize(x, scale, dtype), torch.where(finite, power + 127, 255).to(torch.uint8)


def delayed_update(
    history: Tensor,
    cursor: Tensor,
    pending: Tensor,
    scale: Tensor,
    limit: Tensor,
    algo: str,
    length: Tensor | None = None,
) -> None:
    """Roll every pending amax into its history and set the scales of the next step, in place.

    Args:
        history: FP32 [S, L], a ring a slot. Zeros where nothing was written yet.
        cursor: int64 [S], how many amax were ever written; the next goes to `cursor % length`.
        pending: FP32 [S], the amax observed since the last update; zeroed here.
        scale: FP32 [S]; 0 stands for "never set".
        limit: FP32 [S], the largest FP8 value of the slot times 2^-margin.
        algo: "max" of the history, or "most_recent".
        length: int64 [S], how much of its row each ring takes up; None is L for all.

    A slot that saw nothing (pending 0) or something non-finite is left as it is: neither rolled nor
    rescaled, so one bad step can't poison a window of a thousand. The formula is Transformer
    Engine's (`limit / amax`, no rounding to a power of two, overflow to the largest FP32).
    """
    good = torch.isfinite(pending) & (pending > 0)
    place = (cursor % (history.shape[1] if length is None else length)).unsqueeze(1)
    old = history.gather(1, place)
    history.scatter_(1, place, torch.where(good.unsqueeze(1), pending.unsqueeze(1), old))
    cursor.add_(good.to(cursor.dtype))
    chosen = history.amax(dim=1) if algo == "max" else pending
    scale.copy_(torch.where(good, (limit / chosen).clamp(max=FP32_MAX), scale))
    pending.zero_()


def sqnr(reference: Tensor, actual: Tensor) -> float:
    """Signal to quantisation noise in dB, computed in FP64; inf where the two are equal."""
    ref, act = reference.double(), actual.double()
    noise = (ref - act).square().sum()
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10(ref.square().sum() / noise))
