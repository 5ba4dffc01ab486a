"""What a GPU really reaches: fractions of its data sheet, or a table that was measured on one.

A table is `calibration/<gpu>.json` in this package, made by `scripts/calibrate_gpu.py` from a run
of `fp8patch bench --gemm --json`; it keeps what was measured, where and with what.
"""

import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from fp8patch.errors import PlanError

__all__ = ["Rates", "from_data_sheet", "measured"]

_FOLDER = Path(__file__).resolve().parent / "calibration"

# From one H200 (torch 2.11): large GEMMs reach 780 and 1390 TFLOP/s, a copy 4.28 TB/s, a cast 58 %
# of that, the cast of all weights 43 %; 8 us a GEMM and 2 us a further kernel.
_BF16_FRACTION = 0.79
_FP8_FRACTION = 0.70
_COPY_FRACTION = 0.89
_CAST_OF_COPY = 0.58
_WEIGHT_CAST_OF_COPY = 0.43
_GEMM_US = 8.0
_LAUNCH_US = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What kernels reach on one GPU.

    Attributes:
        bf16_tflops, fp8_tflops: Of large GEMMs.
        bf16_us, fp8_us: What each GEMM takes besides.
        copy_tbps: A plain copy, bytes read and written, TB/s.
        cast_tbps, cast_us: Quantising an activation: bytes read and written, and what each takes
            besides.
        weight_cast_tbps: Quantising FP32 weights, all in one launch.
    """

    bf16_tflops: float
    fp8_tflops: float
    bf16_us: float
    fp8_us: float
    copy_tbps: float
    cast_tbps: float
    cast_us: float
    weight_cast_tbps: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def from_data_sheet(bf16_tflops: float, fp8_tflops: float, memory_tbps: float) -> Rates:
    """The fractions that were measured on one GPU, taken to hold on another."""
    copy = memory_tbps * _COPY_FRACTION
    return Rates(
        bf16_tflops=bf16_tflops * _BF16_FRACTION,
        fp8_tflops=fp8_tflops * _FP8_FRACTION,
        bf16_us=_GEMM_US,
        fp8_us=_GEMM_US,
        copy_tbps=copy,
        cast_tbps=copy * _CAST_OF_COPY,
        cast_us=_LAUNCH_US,
        weight_cast_tbps=copy * _WEIGHT_CAST_OF_COPY,
    )


def measured(gpu: str) -> Rates | None:
    """The rates in the table of this GPU; None where there is none.

    Raises:
        PlanError: There is one, and it cannot be read.
    """
    return _read(_FOLDER / f"{gpu}.json")


@cache
def _read(file: Path) -> Rates | None:
    if not file.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["rates"]
        rates = Rates(**{item.name: float(values[item.name]) for item in fields(Rates)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{file}: not a calibration table ({error!r:.100}). Reinstall fp8patch, or make it "
            "again with scripts/calibrate_gpu.py."
        ) from None
    if min(rates.to_dict().values()) < 0 or not all(
        rates.to_dict()[name] > 0 for name in rates.to_dict() if not name.endswith("_us")
    ):
        raise PlanError(f"{file}: a rate in it is not above 0. Make it again.")
    return rates
