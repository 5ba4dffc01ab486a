"""A calibration table from measured GEMMs and casts: rates and fixed times that fit them best.

Best is the least sum of squared logarithms of predicted over measured: a small shape that is off by
a tenth counts as much as a large one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fp8patch.rates import Rates
from fp8patch.roofline import linear_seconds

__all__ = ["fit", "predictions"]

_ACTIVATION_CASTS = ("cast_input", "cast_grad")
# Below this a copy is over before it is at full speed.
_LARGE_BYTES = 25e6


def fit(found: dict[str, Any]) -> dict[str, Any]:
    """The table for what `gemm.measure` found; JSON-safe.

    Returns:
        `rates`, what they were measured with, and for every shape what a step of a Linear took in
        BF16 and in FP8, and what the rates predict.
    """
    rows = found["rows"]
    copy = _best(row["tbps"] for row in rows if row["op"] == "copy" and _moved(row) >= _LARGE_BYTES)
    bf16 = _gemm_fit([row for row in rows if row["op"].startswith("bf16_")], copy, 2)
    fp8 = _gemm_fit([row for row in rows if row["op"].startswith("fp8_")], copy, 1)
    cast = _fit([(_moved(r), r["us"]) for r in rows if r["op"] in _ACTIVATION_CASTS], _linear)
    weights = [row["tbps"] for row in rows if row["op"] == "cast_weight"]
    rates = Rates(
        bf16_tflops=bf16[0],
        bf16_us=bf16[1],
        fp8_tflops=fp8[0],
        fp8_us=fp8[1],
        copy_tbps=copy,
        cast_tbps=cast[0],
        cast_us=cast[1],
        # In one launch for all: what a large one reaches.
        weight_cast_tbps=_best(weights),
    )
    about = {key: value for key, value in found.items() if key != "rows"}
    return {
        "rates": {name: round(value, 4) for name, value in rates.to_dict().items()},
        "measured": {**about, "command": "fp8patch bench --gemm --json"},
        "shapes": predictions(rows, rates),
    }


def predictions(rows: Sequence[dict[str, Any]], rates: Rates) -> list[dict[str, Any]]:
    """Measured and predicted microseconds of a step of one Linear, for each shape in `rows`."""
    shapes = dict.fromkeys((row["m"], row["n"], row["k"]) for row in rows)
    us = {(r["m"], r["n"], r["k"], r["op"]): r["us"] for r in rows}
    found = []
    for shape in shapes:
        line: dict[str, Any] = dict(zip("mnk", shape, strict=True))
        for precision in ("bf16", "fp8"):
            parts = [f"{precision}_{gemm}" for gemm in ("fprop", "dgrad", "wgrad")]
            parts += ["weight_to_bf16"] if precision == "bf16" else []
            parts += [*_ACTIVATION_CASTS, "cast_weight"] if precision == "fp8" else []
            line[f"{precision}_us"] = round(sum(us[*shape, part] for part in parts), 2)
            seconds = linear_seconds(*shape, rates, fp8=precision == "fp8")
            line[f"{precision}_predicted_us"] = round(1e6 * seconds, 2)
        found.append(line)
    return found


def _moved(row: dict[str, Any]) -> float:
    return float(row["tbps"] * row["us"] * 1e6)


def _best(values: Iterable[float]) -> float:
    """The median of the upper half."""
    ordered = sorted(values)
    upper = ordered[len(ordered) // 2 :]
    return upper[len(upper) // 2]


def _gemm_fit(
    rows: list[dict[str, Any]], copy_tbps: float, operand_bytes: int
) -> tuple[float, float]:
    """(TFLOP/s, fixed us) of `max(FLOPs / rate, bytes / copy) + fixed`, as `roofline` has it."""
    floor = {}
    for row in rows:
        m, n, k = row["m"], row["n"], row["k"]
        moved = operand_bytes * (m * k + n * k) + 2 * m * n
        floor[2.0 * m * n * k, row["us"]] = moved / copy_tbps / 1e6
    points = list(floor)
    return _fit(points, lambda size, us, rate: max(_linear(size, us, rate), floor[size, us]))


def _linear(size: float, us: float, rate: float) -> float:
    """Microseconds for `size` bytes or FLOPs at `rate` in 10^12 a second."""
    return size / rate / 1e6


def _fit(
    points: Sequence[tuple[float, float]], time: Callable[[float, float, float], float]
) -> tuple[float, float]:
    """(rate, fixed us) with the least error over (size, us); a search in ever finer steps."""
    fastest = max(size / us / 1e6 for size, us in points)
    rate, fixed = fastest, 1.0
    rate_step, fixed_step = 0.5 * fastest, 8.0
    for _ in range(12):
        candidates = [
            (rate + i * rate_step / 8, fixed + j * fixed_step / 8)
            for i in range(-8, 9)
            for j in range(-8, 9)
        ]
        rate, fixed = min(
            (c for c in candidates if c[0] > 0.05 * fastest and c[1] >= 0.0),
            key=lambda c: sum(
                math.log((time(size, us, c[0]) + c[1]) / us) ** 2 for size, us in points
            ),
        )
        rate_step, fixed_step = 0.6 * rate_step, 0.6 * fixed_step
    return rate, fixed
