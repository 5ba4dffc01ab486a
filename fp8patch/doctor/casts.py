"""The casts and the update of scales against `numerics`, bit for bit; norms against FP64.

On a GPU these are Triton kernels, compiled at their first use: does each compile, and is it right?
Elsewhere they are plain PyTorch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fp8patch import numerics
from fp8patch.doctor.types import CastTest, Outcome
from fp8patch.messages import one_line
from fp8patch.numerics import E4M3, E5M2, FP8_MAX
from fp8patch.ops.fused import delayed_update, many_casts
from fp8patch.ops.norm import norm
from fp8patch.ops.quantize import padded, quantize, quantize_rowwise

__all__ = ["check_casts"]

# Odd in both dimensions, so that tiles are ragged and the transpose is padded.
_SHAPE = (67, 131)
_EPS = 1e-5
# One rounding to BF16 leaves 51 dB and more.
_NORM_DB = 50.0


def check_casts(device: str) -> list[CastTest]:
    """Run every form of the cast, the update and the norms on `device`."""
    return [
        CastTest(name=name, by_row=by_row, outcome=_outcome(form, device))
        for name, (by_row, form) in _FORMS.items()
        if form is not _weights or device != "cpu"
    ]


def _outcome(form: Callable[[str], list[str]], device: str) -> Outcome:
    try:
        differ = form(device)
    except Exception as error:  # a compiler can fail in any way
        return Outcome(ok=False, ran=False, detail=one_line(error))
    detail = f"not equal to the oracle: {', '.join(differ)}" if differ else ""
    return Outcome(ok=not differ, ran=True, detail=detail)


def _data(live: bool) -> Tensor:
    x = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, :8] = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 300.0, -300.0, 2.0**-9, 2.0**-10])
    if not live:  # a live amax that is not finite says nothing about the scale
        x[1, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    return x


def _by_tensor(device: str, dtype: torch.dtype, *, live: bool) -> list[str]:
    x = _data(live)
    limit = FP8_MAX[dtype]
    # 300 clips, 1e-9 is flushed.
    scale = torch.tensor(limit / 8)
    used = numerics.scale_from_amax(numerics.amax(x), limit) if live else scale
    x_fp8 = numerics.quantize(x, used, dtype)
    amax, counts = _slot(device)
    *found, sums = quantize(
        x.to(device), scale.to(device), amax, counts, limit, dtype == E5M2, live, True, True, True
    )
    expected = (_padded(x_fp8), _transposed(x_fp8), used.reciprocal())
    names = ("values", "transpose", "scale_inv")
    wrong = _differ(names, tuple(found), expected)
    # A sum of FP32 in any order: right to the last digits, and nan where there is one.
    exact = x.double().sum(0)
    assert sums is not None
    if not torch.allclose(sums.cpu().double(), exact, rtol=1e-4, atol=1e-3, equal_nan=True):
        wrong.append("column sums")
    return wrong + _slot_differs(x, used, x_fp8, amax, counts)


def _by_row(device: str) -> list[str]:
    x, limit = _data(live=True), FP8_MAX[E4M3]
    x_fp8, scale = numerics.quantize_rowwise(x, E4M3, limit)
    by_column, scale_t = numerics.quantize_rowwise(x.t(), E4M3, limit)
    amax, counts = _slot(device)
    found = quantize_rowwise(x.to(device), amax, counts, limit, False, True, True)
    values, transpose, inverse, inverse_t = found
    columns = len(scale_t)
    expected = (_padded(x_fp8), by_column, scale.reciprocal(), scale_t.reciprocal())
    here = (values, transpose[:columns, : _SHAPE[0]], inverse, inverse_t[:columns])
    names = ("values", "transpose", "scale_inv", "scale_inv of the transpose")
    return _differ(names, here, expected) + _slot_differs(x, scale, x_fp8, amax, counts)


def _update(device: str) -> list[str]:
    """Slots of every kind: within the history, past its end, never written, not finite."""
    generator = torch.Generator().manual_seed(0)
    history = torch.rand(5, 16, generator=generator)
    history[3] = 0
    cursor = torch.tensor([3, 16, 37, 0, 5])
    pending = torch.tensor([0.5, 3e-39, 2.0, 0.25, torch.nan])
    scale, limit = torch.ones(5), torch.full((5,), FP8_MAX[E4M3])
    lengths = torch.tensor([16, 16, 4, 16, 1])
    wrong = []
    for algo, length in (("max", None), ("most_recent", None), ("max", lengths)):
        results = []
        for update, where in ((numerics.delayed_update, "cpu"), (delayed_update, device)):
            h, c, p, s = (x.to(where, copy=True) for x in (history, cursor, pending, scale))
            mixed = None if length is None else length.to(where)
            update(h, c, p, s, limit.to(where), algo, mixed)
            results.append((h, c, p, s))
        names = tuple(f"{name} ({algo})" for name in ("history", "cursor", "pending", "scale"))
        wrong += _differ(names, results[1], results[0])
    return wrong


def _norms(device: str) -> list[str]:
    """BF16 in and out, FP32 parameters: one rounding of the result, to BF16."""
    x = _data(live=True)
    weight, bias = torch.linspace(0.5, 2, _SHAPE[1]), torch.linspace(-1, 1, _SHAPE[1])
    exact = x.double()
    centered = exact - exact.mean(1, keepdim=True)
    expected = {
        "LayerNorm": _over_rms(centered) * weight.double() + bias.double(),
        "RMSNorm": _over_rms(exact) * weight.double(),
    }
    wrong = []
    for name, result in expected.items():
        center = name == "LayerNorm"
        shift = bias.to(device) if center else None
        y, *_ = norm(x.to(device), weight.to(device), shift, _EPS, center, False, torch.bfloat16)
        if not numerics.sqnr(result, y.cpu()) >= _NORM_DB:
            wrong.append(name)
    return wrong


def _over_rms(x: Tensor) -> Tensor:
    return x * (x.square().mean(1, keepdim=True) + _EPS).rsqrt()


def _weights(device: str) -> list[str]:
    """Two weights in one launch, with a given scale."""
    weights = [x.float() for x in (_data(live=True)[:64, :128], _data(live=True)[:48, 3:19])]
    limit = FP8_MAX[E4M3]
    scale = torch.tensor(limit / 8)
    wrong, jobs, seen = [], [], []
    for weight in weights:
        x_fp8 = numerics.quantize(weight, scale, E4M3)
        expected = (x_fp8, _transposed(x_fp8), scale.reciprocal())
        found = tuple(torch.empty_like(x, device=device) for x in expected)
        slot = _slot(device)
        jobs.append((weight.contiguous().to(device), *found, scale.to(device), *slot))
        seen.append((weight, x_fp8, expected, found, slot))
    casts = many_casts(jobs)
    if casts is None:  # without Triton they are cast one by one
        return []
    casts.run(limit, live=False, observe=True)
    for weight, x_fp8, expected, found, slot in seen:
        wrong += _differ(("values", "transpose", "scale_inv"), found, expected)
        wrong += _slot_differs(weight, scale, x_fp8, *slot)
    return wrong


def _slot(device: str) -> tuple[Tensor, Tensor]:
    amax = torch.zeros((), device=device)
    return amax, torch.zeros(4, dtype=torch.int64, device=device)


def _slot_differs(
    x: Tensor, scale: Tensor, x_fp8: Tensor, amax: Tensor, counts: Tensor
) -> list[str]:
    expected = numerics.counts(x, scale, x_fp8)
    return _differ(("amax", "counts"), (amax, counts), (numerics.amax(x), expected))


def _differ(
    names: tuple[str, ...], found: tuple[Tensor, ...], expected: tuple[Tensor, ...]
) -> list[str]:
    pairs = zip(names, found, expected, strict=True)
    return [name for name, a, b in pairs if not _equal(a.cpu(), b)]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; of nan there is one."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype in FP8_MAX:
        same = a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)
        return bool((same | (a.float().isnan() & b.float().isnan())).all())
    return bool(torch.equal(a, b) or ((a == b) | (a.isnan() & b.isnan())).all())


def _padded(x_fp8: Tensor, rows: int | None = None) -> Tensor:
    """[M, K] with zeros up to [rows, padded K]."""
    out = torch.zeros(rows or x_fp8.shape[0], padded(x_fp8.shape[1]), dtype=torch.uint8)
    out[: x_fp8.shape[0], : x_fp8.shape[1]] = x_fp8.view(torch.uint8)
    return out.view(x_fp8.dtype)


def _transposed(x_fp8: Tensor) -> Tensor:
    columns = x_fp8.view(torch.uint8).t().contiguous().view(x_fp8.dtype)
    return _padded(columns, padded(x_fp8.shape[1]))


# {name: (by_row, what runs it)}
_FORMS: dict[str, tuple[bool | None, Callable[[str], list[str]]]] = {
    "cast to E4M3": (False, lambda device: _by_tensor(device, E4M3, live=False)),
    "cast to E5M2": (False, lambda device: _by_tensor(device, E5M2, live=False)),
    "cast by its own amax": (False, lambda device: _by_tensor(device, E4M3, live=True)),
    "cast by rows": (True, _by_row),
    "update of scales": (None, _update),
    "norms": (None, _norms),
    "weights in one launch": (False, _weights),
}
