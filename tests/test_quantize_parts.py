"""`quantize_parts`: the cast of what `torch.cat` makes of the parts, to the bit: on a CPU, under
Triton's interpreter (the kernels against those for whole matrices), and on a GPU."""

from typing import Any

import pytest
import torch
from interpreted import check_interpreted
from torch import Tensor

from fp8patch import numerics
from fp8patch.ops.quantize import mark_cold, mark_warm
from fp8patch.ops.quantize_parts import COLUMNS

# Rows and the widths of the parts; the last two are none that the kernels read.
CASES = [
    (37, (64, 64)),
    (64, (128, 128, 128)),
    (77, (128, 64, 192)),
    (1, (64, 64, 64)),
    (13, (COLUMNS - 16, COLUMNS)),
    (5, (64, 64, 64, 64)),
]


def slot(device: str = "cpu") -> tuple[Tensor, Tensor]:
    return torch.zeros((), device=device), torch.zeros(4, dtype=torch.int64, device=device)


def parts_of(
    rows: int, widths: tuple[int, ...], dtype: torch.dtype, outlier: bool = False
) -> list[Tensor]:
    """Parts of different magnitudes and strides."""
    torch.manual_seed(0)
    parts = [torch.randn(rows, w + 16 * i) * 4.0**i for i, w in enumerate(widths)]
    if outlier:
        parts[-1][-1, 3] = 9e4
    return [part.to(dtype)[:, :w] for part, w in zip(parts, widths, strict=True)]


def cast(
    parts: list[Tensor], e5m2: bool, observe: bool, transpose: bool, sums: bool, whole: bool = False
) -> list[Tensor]:
    """(rows, transpose, scale_inv, column sums, amax, counts) of the operator."""
    place = slot(parts[0].device.type)
    scale = torch.tensor(7.3, device=parts[0].device)
    limit = numerics.FP8_MAX[numerics.E5M2 if e5m2 else numerics.E4M3]
    if whole:
        outputs = torch.ops.fp8patch.quantize.default(
            torch.cat(parts, 1), scale, *place, limit, e5m2, False, observe, transpose, sums
        )
    else:
        outputs = torch.ops.fp8patch.quantize_parts.default(
            parts, scale, *place, limit, e5m2, observe, transpose, sums
        )
    return [*outputs, *place]


def as_bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in (numerics.E4M3, numerics.E5M2) else x


def assert_equal(want: list[Tensor], got: list[Tensor]) -> None:
    for a, b in zip(want, got, strict=True):
        assert a.shape == b.shape
        assert torch.equal(as_bits(a), as_bits(b))


@pytest.mark.parametrize(("rows", "widths"), CASES)
@pytest.mark.parametrize("flags", [(True, True, True), (False, False, False)])
def test_it_is_the_cast_of_the_joined_parts(
    rows: int, widths: tuple[int, ...], flags: tuple[bool, bool, bool]
) -> None:
    parts = parts_of(rows, widths, torch.bfloat16)
    assert_equal(cast(parts, True, *flags, whole=True), cast(parts, True, *flags))


def test_a_cold_scale_is_replaced() -> None:
    parts = parts_of(13, (64, 64, 64), torch.bfloat16)
    scale = torch.zeros(())
    mark_cold([scale])
    outputs = torch.ops.fp8patch.quantize_parts.default(
        parts, scale, *slot(), 448.0, False, True, True, False
    )
    mark_warm([scale])
    torch.testing.assert_close(outputs[2], torch.cat(parts, 1).abs().max().float() / 448)
    assert outputs[3].numel() == 0


def test_opcheck() -> None:
    arguments = (
        parts_of(3, (64, 64, 128), torch.bfloat16),
        torch.tensor(3.0),
        *slot(),
        448.0,
        False,
        False,
        True,
        True,
    )
    torch.library.opcheck(
        torch.ops.fp8patch.quantize_parts.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )


# -- the kernels -----------------------------------------------------------------------------------

# The interpreter is chosen when Triton is imported, so it gets a process of its own.
SCRIPT = """
import itertools
import torch
from test_quantize_parts import CASES, as_bits, parts_of, slot
from fp8patch import numerics
from fp8patch.ops.triton import column_sums
from fp8patch.ops.triton.parts import can_read, quantize_parts
from fp8patch.ops.triton.quantize import quantize

column_sums.PROGRAMS = 3
for rows, widths in ((32, (64, 64)), (77, (128, 64, 64))):
    for sums, dtype in itertools.product((True, False), (torch.bfloat16, torch.float32)):
        flags = dict(observe=True, transpose=dtype != torch.float32, column_sums=sums)
        parts = parts_of(rows, widths, dtype, outlier=True)
        assert can_read(parts)
        whole, apart = slot(), slot()
        scale = torch.tensor(7.3)
        x = torch.cat(parts, 1)
        want = quantize(x, scale, *whole, 448.0, numerics.E5M2, live=False, **flags)
        got = quantize_parts(parts, scale, *apart, 448.0, numerics.E5M2, **flags)
        for a, b in zip((*want, *whole), (*got, *apart), strict=True):
            assert a is b is None or torch.equal(as_bits(a), as_bits(b)), (rows, sums, dtype)
        # It ran, and saw the outlier in the last part.
        assert apart[1][3] == rows * sum(widths)
        assert apart[0] > 8e4
assert not any(can_read(parts_of(*case, torch.float32)) for case in CASES[-2:])
print("done")
"""


def test_kernels_under_the_interpreter() -> None:
    check_interpreted(SCRIPT)


ON_GPU = [*CASES, (25216, (1280, 1280, 1280)), (3000, (1024, 256, 256)), (4096, (768, 768))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "widths"), ON_GPU)
def test_kernel_bit_for_bit(rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    for outlier in (False, True):
        parts = [part.cuda() for part in parts_of(rows, widths, dtype, outlier)]
        for flags in ((True, True, True), (True, True, False), (True, False, False)):
            want = cast(parts, True, *flags, whole=True)
            assert_equal(want, cast(parts, True, *flags))
            assert_equal(want, cast([part.contiguous() for part in parts], True, *flags))
        # At an odd address.
        odd = [torch.cat([part.new_zeros(rows, 1), part], 1)[:, 1:] for part in parts]
        assert_equal(want, cast(odd, True, *flags))


@pytest.mark.gpu
def test_nothing_is_joined_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def cat(*args: Any) -> Any:
        raise AssertionError("torch.cat was called")

    monkeypatch.setattr(torch, "cat", cat)
    for case in CASES[:4]:
        cast([part.cuda() for part in parts_of(*case, torch.bfloat16)], True, True, True, True)
