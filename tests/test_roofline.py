"""The roofline against what was measured, against reason, and against its limits."""

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8patch import hardware as hw
from fp8patch import rates, roofline
from fp8patch.errors import PlanError
from fp8patch.recipe import Recipe, builtin_names
from fp8patch.roofline import GPUS, Gpu, predict_gain, resolve_gpu

H100, H200 = GPUS["h100"], GPUS["h200"]
SHEET = rates.from_data_sheet(H200.bf16_tflops, H200.fp8_tflops, H200.memory_tbps)
BF16 = Recipe(fprop="bf16", dgrad="bf16", wgrad="bf16")


@pytest.fixture(autouse=True)
def _from_data_sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked here holds without any table of measurements."""
    monkeypatch.setattr(roofline, "measured", lambda gpu: None)


def test_the_gemm_that_was_measured() -> None:
    # One H200, 12288x1024x1024: 41 us in BF16, 27 us in FP8.
    bf16 = roofline._gemm_seconds(12288, 1024, 1024, SHEET, False)
    fp8 = roofline._gemm_seconds(12288, 1024, 1024, SHEET, True)
    assert bf16 == pytest.approx(41e-6, rel=0.05)
    assert fp8 == pytest.approx(27e-6, rel=0.05)
    # The casts eat most of that.
    assert 0.9 < predict_gain(12288, 1024, 1024, H200) < 1.15


def test_the_casts_of_bert_large_that_were_measured() -> None:
    # 24 layers at M = 12288: q, k, v and o, up, down. 8.9 ms in 288 casts.
    m, d, f = 12288, 1024, 4096
    sizes = [(d, d)] * 4 + [(d, f), (f, d)]
    seconds = 24 * sum(
        roofline._cast_seconds(m * width, True, True, SHEET, "delayed")
        for size in sizes
        for width in size
    )
    assert seconds == pytest.approx(8.9e-3, rel=0.1)
    gemms = 24 * sum(3 * roofline._gemm_seconds(m, n, k, SHEET, True) for k, n in sizes)
    assert gemms == pytest.approx(18.0e-3, rel=0.1)


def test_the_weights_that_were_measured() -> None:
    # 305 M FP32 weights in one launch: 1.0 ms.
    seconds = roofline._weight_seconds(305_000_000, True, True, SHEET, "delayed")
    assert seconds == pytest.approx(1.0e-3, rel=0.05)


@pytest.mark.parametrize("gpu", [H100, H200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(("n", "k"), [(768, 768), (3072, 768), (768, 3072)])
def test_bert_base_is_predicted_to_lose(gpu: Gpu, n: int, k: int) -> None:
    assert predict_gain(4096, n, k, gpu) < 1.0


@pytest.mark.parametrize("gpu", [H100, H200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (14336, 4096), (4096, 14336)])
def test_llama_8b_is_predicted_to_win(gpu: Gpu, n: int, k: int) -> None:
    assert predict_gain(4096, n, k, gpu) > 1.2


# M, K, N -> torchao's roofline on an H100, tensorwise without fusion.
TORCHAO = {
    (4096, 768, 3072): 0.78,
    (8192, 1024, 1024): 0.72,
    (8192, 1024, 4096): 0.99,
    (8192, 2048, 2048): 1.09,
    (8192, 2048, 8192): 1.29,
    (8192, 4096, 1024): 0.99,
    (8192, 4096, 4096): 1.36,
    (8192, 4096, 14336): 1.50,
    (8192, 8192, 28672): 1.63,
    (16384, 8192, 28672): 1.71,
}


@pytest.mark.parametrize("shape", TORCHAO, ids=lambda shape: "x".join(map(str, shape)))
def test_it_is_near_torchaos_roofline(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    gain = predict_gain(m, n, k, H100)
    assert abs(gain - TORCHAO[shape]) <= 0.15, f"{m=} {k=} {n=}: {gain:.2f}"


sizes = st.integers(1, 65536)


@given(m=sizes, n=sizes, k=sizes, gpu=st.sampled_from([*GPUS.values()]))
def test_a_gain_is_a_sane_number(m: int, n: int, k: int, gpu: Gpu) -> None:
    for name in builtin_names():
        gain = predict_gain(m, n, k, gpu, Recipe.load(name))
        assert math.isfinite(gain)
        assert 0.1 < gain < 2.0
    assert predict_gain(m, n, k, gpu, BF16) == 1.0


@given(m=st.integers(256, 32768), n=sizes, k=sizes)
def test_more_passes_never_help(m: int, n: int, k: int) -> None:
    delayed = predict_gain(m, n, k, H100)
    current = predict_gain(m, n, k, H100, Recipe.load("current"))
    rowwise = predict_gain(m, n, k, H100, Recipe.load("rowwise"))
    assert delayed > current > rowwise


def test_more_tokens_help() -> None:
    gains = [predict_gain(m, 4096, 4096, H100) for m in (64, 512, 4096, 32768)]
    assert gains == sorted(gains)


def test_a_bf16_wgrad_saves_casts_where_they_dominate() -> None:
    plain, careful = Recipe.load("rowwise"), Recipe.load("rowwise_bf16_wgrad")
    assert predict_gain(4096, 768, 768, H100, careful) > predict_gain(4096, 768, 768, H100, plain)
    big = (16384, 28672, 8192, H100)
    assert predict_gain(*big, careful) < predict_gain(*big, plain)


@pytest.mark.parametrize(
    ("size", "word"),
    [((0, 8, 8), "tokens"), ((8, -1, 8), "out_features"), ((8, 8, 0), "in_features")],
)
def test_a_size_below_one_is_refused(size: tuple[int, int, int], word: str) -> None:
    with pytest.raises(PlanError, match=f"{word}: -?[01] .*at least 1"):
        predict_gain(*size, H100)


def test_the_table() -> None:
    assert list(GPUS) == ["h100", "h200", "l4", "rtx4090", "b200"]
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert not gpu.assumed
        assert gpu.label == gpu.title
        assert gpu.fp8_tflops / gpu.bf16_tflops == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "h200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_auto_takes_the_gpu_of_this_machine(device_name: str, name: str | None) -> None:
    gpu = resolve_gpu("auto", hw.classify("cuda", device_name, (9, 0)))
    assert gpu == (GPUS[name] if name else None)


def test_auto_without_a_gpu_says_what_it_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hw, "_probe", lambda device: hw._Probe("cpu", "CPU", None, "none is here"))
    gpu = resolve_gpu()
    assert gpu is not None
    assert gpu.name == "h100"
    assert gpu.assumed
    assert gpu.label == "NVIDIA H100 SXM (assumed: no CUDA GPU here)"


def test_a_named_gpu_is_taken_and_an_unknown_one_refused() -> None:
    assert resolve_gpu("H200") == H200
    with pytest.raises(PlanError, match="'rtx4080'. Did you mean 'rtx4090'.*auto, h100"):
        resolve_gpu("rtx4080")


def test_a_named_gpu_asks_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert resolve_gpu("l4") == GPUS["l4"]
