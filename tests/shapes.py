"""The one generator of shapes and tensors for numerics tests. Nothing here is random between runs.

    @pytest.mark.parametrize("case", params(TENSORS))
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_cast(case: TensorCase, dtype: torch.dtype) -> None:
        x = case.build(dtype)

    @pytest.mark.parametrize("gemm", params(GEMMS))
    def test_fprop(gemm: GemmCase) -> None:
        input, weight, grad_output = gemm.build(torch.bfloat16)

M tokens, K in_features, N out_features.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TensorCase:
    """A named 2-D tensor [rows, columns] that a cast has to get right.

    Attributes:
        name: For test ids.
        make: FP32 values on the CPU, from a seeded generator; may be a non-contiguous view.
        finite: No inf and no nan in it, in any of DTYPES.
    """

    name: str
    make: Callable[[torch.Generator], Tensor]
    finite: bool = True

    def build(
        self, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
    ) -> Tensor:
        """The tensor, the same bits on every call and every device; strides are those of `make`."""
        values = self.make(_generator(self.name))
        if self.finite:
            # FP16 would turn what is huge in the other types into inf.
            limit = torch.finfo(dtype).max
            values = _keep_strides(values, values.clamp(-limit, limit).to(dtype))
        else:
            values = _keep_strides(values, values.to(dtype))
        return _keep_strides(values, values.to(device))


@dataclass(frozen=True)
class GemmCase:
    """A named Linear: `input` [M, K], `weight` [N, K], `grad_output` [M, N].

    Attributes:
        aligned: N and K are multiples of 16, as an FP8 GEMM wants them; M may be anything.
    """

    name: str
    m: int
    n: int
    k: int

    @property
    def aligned(self) -> bool:
        return self.n % 16 == 0 and self.k % 16 == 0

    def build(
        self, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normal values at the sizes training has: weights small, gradients smaller by 2^-12."""
        generator = _generator(self.name)
        input = torch.randn(self.m, self.k, generator=generator)
        weight = torch.randn(self.n, self.k, generator=generator) * self.k**-0.5
        grad_output = torch.randn(self.m, self.n, generator=generator) * 2**-12
        return (
            input.to(device, dtype),
            weight.to(device, dtype),
            grad_output.to(device, dtype),
        )


def params(cases: Iterable[Any]) -> list[Any]:
    """Cases with their names as test ids, for `pytest.mark.parametrize`."""
    return [pytest.param(case, id=case.name) for case in cases]


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def _keep_strides(like: Tensor, values: Tensor) -> Tensor:
    """`values` laid out in memory like `like`, gaps included; `.to` alone would close them."""
    if values.stride() == like.stride():
        return values
    size = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) + 1
    # The gaps hold a value that no test uses: a kernel that reads them is found out.
    room = torch.full((size,), float("nan"), dtype=values.dtype, device=values.device)
    view = target = room.as_strided(like.shape, like.stride())
    for dim, stride in enumerate(like.stride()):
        if stride == 0:  # expanded: one place in memory, so it is written once
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)
    return view


def _normal(rows: int, columns: int, scale: float = 1.0) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randn(rows, columns, generator=g) * scale


def _with(values: Sequence[float], rows: int = 17, columns: int = 48) -> Callable[..., Tensor]:
    """Normal values with `values` put at places spread over the tensor, first and last included."""

    def make(generator: torch.Generator) -> Tensor:
        x = torch.randn(rows, columns, generator=generator)
        places = torch.linspace(0, x.numel() - 1, max(2, 2 * len(values))).long()
        for i, place in enumerate(places):
            x.view(-1)[place] = values[i % len(values)]
        return x

    return make


def _log_uniform(rows: int, columns: int, low: int, high: int) -> Callable[..., Tensor]:
    """Signs and magnitudes 2^low to 2^high, each binade as often as any other."""

    def make(generator: torch.Generator) -> Tensor:
        exponent = torch.empty(rows, columns).uniform_(low, high, generator=generator)
        sign = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
        return torch.exp2(exponent) * sign

    return make


def _halfway(_: torch.Generator) -> Tensor:
    """Ties between neighbours of E4M3 and E5M2, where round to nearest even decides."""
    e4m3 = [m + 0.5 for m in range(8, 16)]  # between the eight values of [8, 16)
    e5m2 = [m + 0.5 for m in range(4, 8)]
    # 464 lies halfway between E4M3's largest, 448, and the 480 that it lacks.
    values = torch.tensor([*e4m3, *e5m2, 31.0, 33.0, 47.0, 448.0, 464.0, 480.0])
    return torch.cat([values, -values]).repeat(8).reshape(-1, 16)


def _every_other(generator: torch.Generator) -> Tensor:
    return torch.randn(33, 128, generator=generator)[:, ::2]


def _gapped_rows(generator: torch.Generator) -> Tensor:
    return torch.randn(33, 80, generator=generator)[:, 16:64]


def _zero_rows(generator: torch.Generator) -> Tensor:
    return torch.randn(16, 32, generator=generator) * (torch.arange(16) % 3 != 0).unsqueeze(1)


def _nan_among_zeros(_: torch.Generator) -> Tensor:
    x = torch.zeros(3, 5)
    x[:, 2] = _NAN
    return x


_INF, _NAN = float("inf"), float("nan")

# Rows and columns that a tile of 16, 32, 64 or 128 fits or does not fit.
_SIZES: tuple[tuple[int, int], ...] = (
    (1, 16),
    (1, 1),
    (2, 64),
    (3, 7),
    (16, 16),
    (17, 33),
    (31, 129),
    (64, 128),
    (127, 65),
    (128, 128),
    (129, 257),
    (197, 192),
    (1, 1024),
    (1024, 1),
)

TENSORS: tuple[TensorCase, ...] = (
    *(TensorCase(f"{rows}x{columns}", _normal(rows, columns)) for rows, columns in _SIZES),
    TensorCase("no_rows", _normal(0, 64)),
    TensorCase("no_columns", _normal(16, 0)),
    TensorCase("zeros", lambda g: torch.zeros(17, 48)),
    TensorCase("negative_zeros", lambda g: torch.full((17, 48), -0.0)),
    TensorCase("some_negative_zeros", _with([-0.0, 0.0])),
    TensorCase("one_value", lambda g: torch.full((16, 16), 0.3)),
    TensorCase("zero_rows_among_others", _zero_rows),
    TensorCase("one_outlier", _with([30000.0, -1e-6])),
    TensorCase("negative_amax", _with([-1000.0])),
    TensorCase("halfway", _halfway),
    TensorCase("huge", _normal(17, 48, 1e4)),
    # The largest of each type: amax times anything overflows.
    TensorCase("largest", _with([3.3e38, -3.3e38])),
    TensorCase("tiny", _normal(17, 48, 2**-20)),
    # Below FP16's smallest: zeros there, ordinary numbers in BF16 and FP32.
    TensorCase("tinier", _normal(17, 48, 2**-100)),
    # Subnormal in BF16 and FP32; fp8_max / amax overflows.
    TensorCase("subnormal", _normal(17, 48, 2**-130)),
    # Subnormal in FP16.
    TensorCase("subnormal_fp16", _normal(17, 48, 2**-18)),
    TensorCase("wide", _log_uniform(64, 64, -24, 10)),
    TensorCase("wider", _log_uniform(64, 64, -120, 120)),
    TensorCase("transposed", lambda g: _normal(48, 33)(g).t()),
    TensorCase("every_other_column", _every_other),
    TensorCase("gapped_rows", _gapped_rows),
    TensorCase("expanded", lambda g: _normal(1, 48)(g).expand(17, 48)),
    TensorCase("inf", _with([_INF, -_INF]), finite=False),
    TensorCase("nan", _with([_NAN]), finite=False),
    TensorCase("inf_and_nan", _with([_INF, _NAN, -_INF]), finite=False),
    TensorCase("all_nan", lambda g: torch.full((16, 16), _NAN), finite=False),
    TensorCase("all_inf", lambda g: torch.full((16, 16), _INF), finite=False),
    TensorCase("nan_among_zeros", _nan_among_zeros, finite=False),
)

FINITE: tuple[TensorCase, ...] = tuple(case for case in TENSORS if case.finite)

GEMMS: tuple[GemmCase, ...] = tuple(
    GemmCase(f"{m}x{n}x{k}", m, n, k)
    for m, n, k in (
        (1, 16, 16),
        (1, 64, 128),
        (2, 32, 64),
        (0, 32, 16),
        (16, 16, 16),
        (17, 48, 32),
        (128, 128, 128),
        (197, 192, 64),  # a ViT's tokens
        (130, 16, 1024),
        (33, 1024, 16),
        (64, 10, 32),  # N not aligned
        (64, 32, 20),  # K not aligned
        (5, 7, 3),
    )
)
