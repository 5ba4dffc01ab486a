"""Predicts what FP8 gains on one Linear: pure arithmetic, no torch, no measurement of this machine.

A training step of one Linear, M tokens, K in_features, N out_features:

    fprop  output       [M, N] = input [M, K]        @ weight [N, K]^T
    dgrad  grad_input   [M, K] = grad_output [M, N]  @ weight [N, K]
    wgrad  grad_weight  [N, K] = grad_output^T       @ input [M, K]

A GEMM takes `max(2MNK / rate, bytes / copy speed)` and a fixed time. FP8 about doubles the rate,
and in return each operand has to be cast: `input` and `grad_output` once each, read in BF16 and
written in FP8 twice (as it is for one GEMM, transposed for the other), the weight once a step.
Small layers lose by that. The weight is FP32, as a stock script keeps it, so BF16 pays for a cast
too.

Rates and fixed times come from `rates`: a table that was measured on this GPU, or the
fractions of the data sheet that were seen on one H200. With those 12288x1024x1024 takes 41 us in
BF16 and 27 us in FP8, as measured.

How far from torchao's roofline (H100 from its data sheet, fprop and backward, no fusion, eleven
shapes from 4096x768x768 to 16384x8192x28672): `delayed` is within 0.15 of its tensorwise figure on
all but the smallest shape (0.78 here, 0.45 there); `current`, `rowwise` and `rowwise_bf16_wgrad`
are up to 0.25 below their counterparts on the larger ones and as much as 0.22 above on the
smallest. There an FP8 GEMM runs at twice the BF16 rate, here at the 1.8 times that were measured;
there weights are BF16 and casts run at the speed of a copy, but every cast counts more launches.

This is one Linear by itself. Casts that siblings share (q, k and v) or that an activation before
takes over make FP8 better than that, and all else that a step does makes it matter less: of both
knows `plan/step.py`, which predicts a whole step. The CPU's time to launch kernels is in neither.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from fp8patch import hardware as hw
from fp8patch.errors import PlanError
from fp8patch.rates import Rates, from_data_sheet, measured
from fp8patch.recipe import Precision, Recipe
from fp8patch.recipe_fields import nearest

__all__ = [
    "GPUS",
    "Gpu",
    "Operand",
    "bf16_seconds",
    "fp8_seconds",
    "linear_seconds",
    "predict_gain",
    "rates_of",
    "reads_of_a_cast",
    "resolve_gpu",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Data sheet figures of one GPU, dense (without structured sparsity).

    Attributes:
        name: As `--gpu` takes it.
        title: As a person writes it.
        bf16_tflops, fp8_tflops: Peak tensor core rates with FP32 accumulation, TFLOP/s.
        memory_tbps: Memory bandwidth, TB/s.
        markers: Lower-case pieces of the device name that PyTorch reports; one has to occur.
        assumed: True when no GPU was there to ask, and this one was taken instead.
    """

    name: str
    title: str
    bf16_tflops: float
    fp8_tflops: float
    memory_tbps: float
    markers: tuple[str, ...]
    assumed: bool = False

    @property
    def label(self) -> str:
        """The title, with a remark when the GPU was assumed and not found."""
        return f"{self.title} (assumed: no CUDA GPU here)" if self.assumed else self.title


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA H100 data sheet, SXM5: 1,979 and 3,958 TFLOP/s with sparsity; HBM3.
        Gpu(
            name="h100",
            title="NVIDIA H100 SXM",
            bf16_tflops=989.4,
            fp8_tflops=1978.9,
            memory_tbps=3.35,
            markers=("h100",),
        ),
        # NVIDIA H200 data sheet, SXM: the H100's cores with HBM3e.
        Gpu(
            name="h200",
            title="NVIDIA H200 SXM",
            bf16_tflops=989.4,
            fp8_tflops=1978.9,
            memory_tbps=4.8,
            markers=("h200", "gh200"),
        ),
        # NVIDIA L4 data sheet: 242 and 485 TFLOP/s with sparsity; GDDR6.
        Gpu(
            name="l4",
            title="NVIDIA L4",
            bf16_tflops=121.0,
            fp8_tflops=242.5,
            memory_tbps=0.3,
            markers=("nvidia l4",),
        ),
        # NVIDIA Ada GPU architecture white paper, appendix A: rates with FP32 accumulation, which
        # GeForce cards run at half of those with FP16 accumulation; GDDR6X.
        Gpu(
            name="rtx4090",
            title="NVIDIA GeForce RTX 4090",
            bf16_tflops=165.2,
            fp8_tflops=330.3,
            memory_tbps=1.008,
            markers=("rtx 4090",),
        ),
        # NVIDIA HGX B200 data sheet, an eighth of its 36 and 72 PFLOP/s with sparsity; HBM3e.
        Gpu(
            name="b200",
            title="NVIDIA B200",
            bf16_tflops=2250.0,
            fp8_tflops=4500.0,
            memory_tbps=7.7,
            markers=("b200",),
        ),
    )
}
DEFAULT_GPU = "h100"

_BF16_BYTES = 2
_FP32_BYTES = 4

# What is cast each time it comes by.
Operand = Literal["input", "grad_output"]
_OPERANDS: tuple[Operand, ...] = ("input", "grad_output")


def resolve_gpu(name: str = "auto", hardware: hw.Hardware | None = None) -> Gpu | None:
    """The GPU to predict for.

    Args:
        name: One of `GPUS`, or `auto`: the CUDA GPU of this machine; without one an H100, whose
            `assumed` is then True, so that the caller can say so (`label` does).
        hardware: What `auto` looks at, instead of asking PyTorch.

    Returns:
        None when this machine's GPU has no figures in the table: nothing can be predicted for it.

    Raises:
        PlanError: No GPU of this name in the table.
    """
    key = name.strip().lower()
    if key == "auto":
        found = hw.detect() if hardware is None else hardware
        if found.capability is None:
            return replace(GPUS[DEFAULT_GPU], assumed=True)
        return next((gpu for gpu in GPUS.values() if _is(gpu, found.name)), None)
    if key in GPUS:
        return GPUS[key]
    allowed = ["auto", *GPUS]
    raise PlanError(
        f"no figures for a GPU named {name!r}.{nearest(key, allowed)} Allowed: "
        f"{', '.join(allowed)}."
    )


def predict_gain(m: int, n: int, k: int, gpu: Gpu, recipe: Recipe | None = None) -> float:
    """BF16 time over FP8 time of one Linear's forward and backward; above 1, FP8 is faster.

    Args:
        m: Tokens in a step, the product of all dimensions but the last one.
        n: out_features.
        k: in_features.
        gpu: From `resolve_gpu` or `GPUS`.
        recipe: Its scaling and its fprop, dgrad and wgrad precisions count; default `delayed`.

    Raises:
        PlanError: A size that is not at least 1.
    """
    for label, value in (("tokens", m), ("out_features", n), ("in_features", k)):
        if value < 1:
            raise PlanError(f"{label}: {value} has no predicted time. Use a number of at least 1.")
    recipe = Recipe() if recipe is None else recipe
    rates = rates_of(gpu)
    return bf16_seconds(m, n, k, rates) / fp8_seconds(m, n, k, rates, recipe)


def bf16_seconds(m: int, n: int, k: int, rates: Rates) -> float:
    """Seconds that a step of one Linear takes in BF16: three GEMMs, and the copy of its weight."""
    return _step_seconds(m, n, k, rates, ("bf16", "bf16", "bf16"), "delayed")


def fp8_seconds(
    m: int, n: int, k: int, rates: Rates, recipe: Recipe, casts: Collection[Operand] = _OPERANDS
) -> float:
    """Seconds that a step of one Linear takes as `recipe` has it; all its GEMMs may be BF16 there.

    Args:
        casts: The operands that are cast for it, where another kernel doesn't do that anyway.
    """
    precisions = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    return _step_seconds(m, n, k, rates, precisions, recipe.scaling, casts)


def linear_seconds(
    m: int, n: int, k: int, rates: Rates, *, fp8: bool, scaling: str = "delayed"
) -> float:
    """Seconds that a step of one Linear takes, all its GEMMs in FP8 or all in BF16."""
    precision: Precision = "fp8" if fp8 else "bf16"
    return _step_seconds(m, n, k, rates, (precision, precision, precision), scaling)


def rates_of(gpu: Gpu) -> Rates:
    """What was measured on this GPU, or else what its data sheet makes one expect."""
    table = measured(gpu.name)
    if table is not None:
        return table
    return from_data_sheet(gpu.bf16_tflops, gpu.fp8_tflops, gpu.memory_tbps)


def reads_of_a_cast(recipe: Recipe) -> int:
    """How often an activation is read to be cast for all the FP8 GEMMs that want it."""
    fprop, wgrad = recipe.fprop == "fp8", recipe.wgrad == "fp8"
    return sum(_passes(fprop, wgrad, recipe.scaling)) if fprop or wgrad else 0


def _is(gpu: Gpu, device_name: str) -> bool:
    # "NVIDIA L40S" is no L4: a marker ends where a word ends. PCIe, NVL and laptop parts have
    # slower clocks or memory; their ratio, which is all that counts here, is nearly the same.
    words = f"{device_name.lower().replace('-', ' ')} "
    return any(f"{marker} " in words for marker in gpu.markers)


def _step_seconds(
    m: int,
    n: int,
    k: int,
    rates: Rates,
    precisions: tuple[Precision, Precision, Precision],
    scaling: str,
    casts: Collection[Operand] = _OPERANDS,
) -> float:
    fprop, dgrad, wgrad = (precision == "fp8" for precision in precisions)
    total = sum(_gemm_seconds(m, n, k, rates, fp8) for fp8 in (fprop, dgrad, wgrad))
    # (elements, used as it is by an FP8 GEMM, used transposed by an FP8 GEMM)
    if "input" in casts:
        total += _cast_seconds(m * k, fprop, wgrad, rates, scaling)
    if "grad_output" in casts:
        total += _cast_seconds(m * n, dgrad, wgrad, rates, scaling)
    return total + _weight_seconds(n * k, fprop, dgrad, rates, scaling)


def _gemm_seconds(m: int, n: int, k: int, rates: Rates, fp8: bool) -> float:
    """One GEMM over M, N and K; its traffic is that of fprop, much the same in the others."""
    rate, fixed = (rates.fp8_tflops, rates.fp8_us) if fp8 else (rates.bf16_tflops, rates.bf16_us)
    operand_bytes = 1 if fp8 else _BF16_BYTES
    traffic = operand_bytes * (m * k + n * k) + _BF16_BYTES * m * n
    compute = 2 * m * n * k / (rate * 1e12)
    return max(compute, traffic / (rates.copy_tbps * 1e12)) + fixed * 1e-6


def _cast_seconds(
    elements: int, straight: bool, transposed: bool, rates: Rates, scaling: str
) -> float:
    """Quantising an activation or a gradient from BF16, for the GEMMs that want it."""
    outputs = int(straight) + int(transposed)
    if outputs == 0:
        return 0.0
    casts, amax_passes = _passes(straight, transposed, scaling)
    seconds = elements * (casts * _BF16_BYTES + outputs) / (rates.cast_tbps * 1e12)
    seconds += elements * amax_passes * _BF16_BYTES / (rates.copy_tbps * 1e12)
    return seconds + (casts + amax_passes) * rates.cast_us * 1e-6


def _weight_seconds(elements: int, fprop: bool, dgrad: bool, rates: Rates, scaling: str) -> float:
    """What becomes of the FP32 weight, once a step: FP8, BF16, or both when GEMMs differ.

    All weights of a model share a launch, so none is counted.
    """
    copy = rates.copy_tbps * 1e12
    seconds = 0.0
    if fprop or dgrad:
        casts, amax_passes = _passes(fprop, dgrad, scaling)
        traffic = elements * (casts * _FP32_BYTES + int(fprop) + int(dgrad))
        seconds = traffic / (rates.weight_cast_tbps * 1e12)
        seconds += elements * amax_passes * _FP32_BYTES / copy
    if not (fprop and dgrad):
        seconds += elements * (_FP32_BYTES + _BF16_BYTES) / copy
    return seconds


def _passes(straight: bool, transposed: bool, scaling: str) -> tuple[int, int]:
    """Passes that read one operand and write FP8, and passes that only read it for its amax."""
    if scaling == "rowwise":
        # A row fits into one block: one pass reads and casts. The transposed operand has scales of
        # its own, along the other dimension, and needs the amax of all columns first.
        return int(straight) + int(transposed), int(transposed)
    return 1, int(scaling == "current")
