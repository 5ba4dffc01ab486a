"""GEMMs and casts by shape, and the calibration table that is made from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from fp8patch import rates, roofline
from fp8patch.bench.fit import fit, predictions
from fp8patch.bench.gemm import OPERATIONS, SHAPES, measure, text
from fp8patch.errors import PlanError
from fp8patch.rates import Rates
from fp8patch.roofline import GPUS, predict_gain, rates_of

TABLES = sorted((Path(rates.__file__).parent / "calibration").glob("*.json"))
PLANTED = Rates(
    bf16_tflops=700.0,
    fp8_tflops=1200.0,
    bf16_us=5.0,
    fp8_us=6.0,
    copy_tbps=4.1,
    cast_tbps=3.2,
    cast_us=1.5,
    weight_cast_tbps=2.9,
)


def _us(op: str, m: int, n: int, k: int) -> float:
    """What `op` takes on the planted GPU, in microseconds."""
    moved = OPERATIONS[op].moved(m, n, k)
    if op.startswith(("bf16", "fp8")):
        width, rate, fixed = (2, 700, 5) if op.startswith("bf16") else (1, 1200, 6)
        traffic = width * (m * k + n * k) + 2 * m * n
        return max(2 * m * n * k / rate, traffic / 4.1) / 1e6 + fixed
    if op in ("cast_input", "cast_grad"):
        return moved / 3.2 / 1e6 + 1.5
    return moved / (2.9 if op == "cast_weight" else 4.1) / 1e6


def _found() -> dict[str, Any]:
    rows = []
    for m, n, k in SHAPES:
        for op in OPERATIONS:
            us = _us(op, m, n, k)
            tbps = OPERATIONS[op].moved(m, n, k) / us / 1e6
            rows.append({"op": op, "m": m, "n": n, "k": k, "us": us, "tbps": tbps})
    return {"gpu": "planted", "rows": rows}


def test_a_fit_finds_the_rates_that_were_planted() -> None:
    table = fit(_found())
    assert table["rates"] == pytest.approx(PLANTED.to_dict(), rel=0.01)
    assert table["measured"]["gpu"] == "planted"
    for line in table["shapes"]:
        assert line["bf16_predicted_us"] == pytest.approx(line["bf16_us"], rel=0.01)
        assert line["fp8_predicted_us"] == pytest.approx(line["fp8_us"], rel=0.01)


def test_a_table_is_what_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_FOLDER", tmp_path)
    rates._read.cache_clear()
    gpu, shape = GPUS["h200"], (4096, 768, 768)
    without = predict_gain(*shape, gpu)
    (tmp_path / "h200.json").write_text(json.dumps(fit(_found())))
    rates._read.cache_clear()
    m, n, k = shape
    bf16 = [_us(f"bf16_{gemm}", m, n, k) for gemm in ("fprop", "dgrad", "wgrad")]
    fp8 = [_us(f"fp8_{gemm}", m, n, k) for gemm in ("fprop", "dgrad", "wgrad")]
    bf16.append(_us("weight_to_bf16", m, n, k))
    fp8 += [_us(cast, m, n, k) for cast in ("cast_input", "cast_grad", "cast_weight")]
    assert predict_gain(*shape, gpu) == pytest.approx(sum(bf16) / sum(fp8), rel=0.01)
    assert predict_gain(*shape, gpu) != pytest.approx(without, rel=0.01)
    # Another GPU has no table there.
    assert rates_of(GPUS["h100"]) == roofline.from_data_sheet(989.4, 1978.9, 3.35)
    rates._read.cache_clear()


@pytest.mark.parametrize("content", ["", "[]", '{"rates": {}}', '{"rates": {"bf16_tflops": "x"}}'])
def test_a_broken_table_is_said(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h200.json").write_text(content)
    monkeypatch.setattr(rates, "_FOLDER", tmp_path)
    rates._read.cache_clear()
    with pytest.raises(PlanError, match="calibrate_gpu.py"):
        predict_gain(4096, 768, 768, GPUS["h200"])
    rates._read.cache_clear()


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.stem)
def test_packaged_tables_predict_what_they_measured(file: Path) -> None:
    table = json.loads(file.read_text())
    assert file.stem in GPUS
    assert {"gpu", "torch", "commit", "date", "command"} <= set(table["measured"])
    found = Rates(**table["rates"])
    for line in table["shapes"]:
        shape = line["m"], line["n"], line["k"]
        bf16 = roofline.linear_seconds(*shape, found, fp8=False)
        fp8 = roofline.linear_seconds(*shape, found, fp8=True)
        assert bf16 / fp8 == pytest.approx(line["bf16_us"] / line["fp8_us"], rel=0.15), shape


def test_every_operation_is_timed_at_every_shape() -> None:
    shapes = ((32, 16, 16), (64, 32, 16))
    found = measure(shapes, device="cpu")
    assert len(found["rows"]) == len(shapes) * len(OPERATIONS)
    assert all(row["us"] > 0 for row in found["rows"])
    assert {row["op"] for row in found["rows"] if row["tflops"]} == {
        f"{p}_{gemm}" for p in ("bf16", "fp8") for gemm in ("fprop", "dgrad", "wgrad")
    }
    assert text(found).count("\n| ") == len(shapes)
    lines = predictions(found["rows"], PLANTED)
    assert [(line["m"], line["n"], line["k"]) for line in lines] == list(shapes)
