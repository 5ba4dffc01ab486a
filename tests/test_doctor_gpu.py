"""`doctor` on a GPU with FP8: all that should run runs right, and a misplaced scale is seen."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from directories import run

from fp8patch.doctor import casts, gemms, machine
from fp8patch.doctor.examine import examine
from fp8patch.recipe import Recipe, builtin_names

pytestmark = pytest.mark.gpu


def test_every_kind_that_the_gpu_is_to_have_runs_right() -> None:
    capability = torch.cuda.get_device_capability()
    for test in gemms.check_gemms("cuda"):
        assert test.hardware is not None
        if test.expected(capability):
            assert test.hardware.ok, f"{test.kind}: {test.hardware.detail}"
            assert (test.hardware.db or 0) >= gemms.BAR_DB
        else:
            assert not test.hardware.ran, f"{test.kind} runs, and is said to need {test.needs}"
            assert test.hardware.detail


@pytest.mark.parametrize("kind", gemms.KINDS[2:5], ids=lambda kind: kind.name)
def test_scales_that_belong_to_other_blocks_are_seen(kind: gemms.Kind) -> None:
    def moved(operand: Any) -> Any:
        return dataclasses.replace(operand, scale_inv=operand.scale_inv.roll(1, 0))

    def wrong(a: Any, b_t: Any, device: str) -> Any:
        return kind.hardware(a, moved(b_t), device)

    test = gemms._check(dataclasses.replace(kind, hardware=wrong), "cuda")
    assert test.hardware is not None
    assert test.hardware.ran
    assert not test.hardware.ok
    assert (test.hardware.db or 0) < 20


def test_the_kernels_equal_the_oracle() -> None:
    for test in casts.check_casts("cuda"):
        assert test.outcome.ok, f"{test.name}: {test.outcome.detail}"


def test_a_kernel_that_is_a_bit_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = casts.quantize

    def off(*args: Any) -> Any:
        values, *rest = right(*args)
        values.view(torch.uint8)[5, 7] ^= 1
        return values, *rest

    monkeypatch.setattr(casts, "quantize", off)
    details = [test.outcome.detail for test in casts.check_casts("cuda")]
    assert details == ["not equal to the oracle: values"] * 3 + [""] * 4


def test_the_examination() -> None:
    found = examine(Recipe())
    assert found.usable
    assert found.advice is not None
    assert found.advice.backend == "fp8"
    rows = {row.recipe: row.runs for row in found.advice.rows}
    assert set(rows) == set(builtin_names())
    assert rows["delayed"] == "fp8"
    assert (rows["rowwise"] == "fp8") == (torch.cuda.get_device_capability() >= (9, 0))
    assert found.cuda == torch.version.cuda
    assert [gpu.name for gpu in found.gpus][:1] == [torch.cuda.get_device_name(0)]
    driver = machine.driver()
    assert driver is not None, "neither /proc/driver/nvidia/version nor nvidia-smi says a version"
    assert re.fullmatch(r"\d+(\.\d+)+", driver)


def test_the_command() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "FAILED" not in result.stdout
    assert "GPU 0" in result.stdout
    assert "delayed runs in FP8." in result.stdout
