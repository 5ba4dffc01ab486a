"""The capability rules, what is said about a machine, and how a backend is resolved."""

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from fp8patch import hardware as hw
from fp8patch.errors import HardwareError

NO_GPU = hw.classify("cpu", "CPU", problem="no GPU is visible to PyTorch")
A100 = hw.classify("cuda", "NVIDIA A100", (8, 0))
L4 = hw.classify("cuda", "NVIDIA L4", (8, 9))
H200 = hw.classify("cuda", "NVIDIA H200", (9, 0))


@pytest.mark.parametrize(
    ("capability", "fp8", "rowwise"),
    [
        ((7, 5), False, False),
        ((8, 0), False, False),
        ((8, 6), False, False),
        ((8, 9), True, False),
        ((9, 0), True, True),
        ((10, 0), True, True),
        ((12, 0), True, True),
    ],
)
def test_what_a_compute_capability_can_run(
    capability: tuple[int, int], fp8: bool, rowwise: bool
) -> None:
    found = hw.classify("cuda", "NVIDIA X", capability)
    assert (found.fp8, found.rowwise) == (fp8, rowwise)
    assert found.capability == capability
    assert f"{capability[0]}.{capability[1]}" in found.reason
    assert found.reason.startswith("NVIDIA X")
    assert found.reason.endswith(".")


def test_the_reason_says_what_is_missing() -> None:
    assert "no FP8 tensor cores; they came with 8.9" in A100.reason
    assert "one a row needs 9.0" in L4.reason
    assert "no GPU is visible to PyTorch" in NO_GPU.reason
    assert "this is MPS" in hw.classify("mps", "MPS").reason


def fake_cuda(
    monkeypatch: pytest.MonkeyPatch,
    *,
    available: Any = True,
    properties: Any = None,
    cuda: str | None = "13.0",
    hip: str | None = None,
) -> None:
    """Makes torch answer as on another machine; an exception is raised instead of returned."""

    def answer(value: Any) -> Any:
        if isinstance(value, Warning):
            warnings.warn(value, stacklevel=2)
            return False
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: answer(available))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: answer(properties))


def test_detect_reads_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    fake_cuda(monkeypatch, properties=properties)
    for device in (None, "cuda", "cuda:0", 0, torch.device("cuda")):
        assert hw.detect(device) == H200


def test_detect_leaves_a_cpu_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, properties=SimpleNamespace(name="NVIDIA H200", major=9, minor=0))
    found = hw.detect("cpu")
    assert (found.device_type, found.name, found.fp8) == ("cpu", "CPU", False)


@pytest.mark.parametrize(
    ("fakes", "words"),
    [
        ({"cuda": None}, "built without CUDA"),
        ({"available": False}, "no GPU is visible"),
        ({"available": UserWarning("The driver is too old. Update.")}, "The driver is too old"),
        ({"available": RuntimeError("driver\nmore")}, r"does not start \(driver\)"),
        ({"properties": RuntimeError("CUDA error: unknown")}, "does not answer .CUDA error"),
        ({"properties": AssertionError("Invalid device id")}, "Invalid device id"),
        ({"hip": "6.4", "cuda": None}, "AMD"),
    ],
)
@pytest.mark.parametrize("device", [None, "cuda:1"])
def test_detect_never_raises_and_says_why(
    monkeypatch: pytest.MonkeyPatch, fakes: dict[str, Any], words: str, device: str | None
) -> None:
    fake_cuda(monkeypatch, **fakes)
    found = hw.detect(device)
    assert not found.fp8
    assert not found.rowwise
    assert found.capability is None
    with pytest.raises(HardwareError, match=words):
        hw.resolve_backend("fp8", found)


def test_detect_on_this_machine() -> None:
    assert hw.detect() == hw.detect()


def test_the_import_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import fp8patch.hardware"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fallback", get_args(hw.ResolvedBackend))
def test_auto_is_fp8_where_the_gpu_has_it_else_the_fallback(fallback: Any) -> None:
    assert hw.resolve_backend("auto", H200, fallback) == "fp8"
    assert hw.resolve_backend("auto", L4, fallback) == "fp8"
    assert hw.resolve_backend("auto", L4, fallback, rowwise=True) == fallback
    assert hw.resolve_backend("auto", A100, fallback) == fallback
    assert hw.resolve_backend("auto", NO_GPU, fallback) == fallback


def test_the_fallback_is_off_unless_said() -> None:
    assert hw.resolve_backend("auto", NO_GPU) == "off"


@pytest.mark.parametrize("backend", ["emulate", "bf16", "off"])
@pytest.mark.parametrize("machine", [NO_GPU, A100, H200])
def test_the_others_are_literal(backend: Any, machine: hw.Hardware) -> None:
    assert hw.resolve_backend(backend, machine, "emulate") == backend


def test_fp8_is_fp8_or_a_refusal() -> None:
    assert hw.resolve_backend("fp8", H200, rowwise=True) == "fp8"
    assert hw.resolve_backend("fp8", L4) == "fp8"
    with pytest.raises(HardwareError, match=r"cores.*\. Use backend='emulate' \(--emulate\)"):
        hw.resolve_backend("fp8", A100)
    with pytest.raises(HardwareError, match="Choose a recipe that scales by tensor"):
        hw.resolve_backend("fp8", L4, rowwise=True)


def test_an_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(HardwareError, match="'fp16'. Did you mean 'bf16'.*auto, fp8, emulate"):
        hw.resolve_backend("fp16", H200)  # type: ignore[arg-type]
