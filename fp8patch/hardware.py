"""What this machine can run in FP8, and why not more.

`detect` asks PyTorch, `classify` applies the rules to what it answered, and `resolve_backend` turns
the user's wish into what will run. torch is imported inside `_probe` only; a test that wants
another machine replaces that, or builds a `Hardware` with `classify`.
"""

import difflib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from fp8patch.errors import HardwareError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Backend",
    "Hardware",
    "ResolvedBackend",
    "classify",
    "detect",
    "least_capability",
    "resolve_backend",
]

Backend = Literal["auto", "fp8", "emulate", "bf16", "off"]
ResolvedBackend = Literal["fp8", "emulate", "bf16", "off"]

# FP8 tensor cores came with Ada (8.9). Per-row scales need the kernels of Hopper (9.0): Ada's
# scaled GEMM takes one scale a tensor.
_FP8_CAPABILITY = (8, 9)
_ROWWISE_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, and what it can do.

    Attributes:
        device_type: torch's name of the device's type: `cuda`, `cpu`, `mps`, ...
        name: What the device calls itself, as `NVIDIA H200`; `CPU` without one.
        capability: CUDA compute capability, as (9, 0); None for everything but an NVIDIA GPU.
        fp8: FP8 GEMMs with one scale a tensor run here.
        rowwise: FP8 GEMMs with one scale a row run here.
        reason: One sentence on why `fp8` and `rowwise` are what they are.
    """

    device_type: str
    name: str
    capability: tuple[int, int] | None
    fp8: bool
    rowwise: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Probe:
    """What PyTorch answered; `problem` says why there is no usable CUDA GPU, or is empty."""

    device_type: str
    name: str
    capability: tuple[int, int] | None = None
    problem: str = ""


def detect(device: "torch.device | str | int | None" = None) -> Hardware:
    """What `device` can run; without one, the current CUDA device, else the CPU.

    Never raises because of a missing GPU, a missing driver or a broken one: the reason says so.
    """
    probe = _probe(device)
    return classify(probe.device_type, probe.name, probe.capability, problem=probe.problem)


def classify(
    device_type: str, name: str, capability: tuple[int, int] | None = None, *, problem: str = ""
) -> Hardware:
    """The rules: what a device with this compute capability can run.

    Args:
        device_type: torch's name of the device's type.
        name: What the device calls itself.
        capability: CUDA compute capability; None for everything but an NVIDIA GPU.
        problem: Why the device cannot be used as a CUDA GPU, as a clause; empty if it can.
    """
    fp8 = rowwise = False
    if problem:
        reason = f"FP8 needs an NVIDIA GPU of compute capability 8.9 or newer, and {problem}."
    elif device_type != "cuda" or capability is None:
        reason = f"FP8 needs an NVIDIA GPU of compute capability 8.9 or newer; this is {name}."
    else:
        major, minor = capability
        fp8 = capability >= _FP8_CAPABILITY
        rowwise = capability >= _ROWWISE_CAPABILITY
        known = f"{name} (compute capability {major}.{minor})"
        if rowwise:
            reason = f"{known} runs FP8 GEMMs with one scale a tensor or a row."
        elif fp8:
            reason = f"{known} runs FP8 GEMMs with one scale a tensor; one a row needs 9.0."
        else:
            reason = f"{known} has no FP8 tensor cores; they came with 8.9."
    return Hardware(
        device_type=device_type,
        name=name,
        capability=capability,
        fp8=fp8,
        rowwise=rowwise,
        reason=reason,
    )


def least_capability(*, rowwise: bool) -> tuple[int, int]:
    """The oldest compute capability whose FP8 GEMMs take one scale a row, or one a tensor."""
    return _ROWWISE_CAPABILITY if rowwise else _FP8_CAPABILITY


def resolve_backend(
    backend: Backend,
    hardware: Hardware,
    fallback: ResolvedBackend = "off",
    *,
    rowwise: bool = False,
) -> ResolvedBackend:
    """What runs on `hardware` when the user said `backend`.

    Args:
        backend: `auto` is `fp8` where the hardware has it, else `fallback`; the others are literal.
        hardware: From `detect`.
        fallback: What `auto` becomes without FP8. The caller says so in one line.
        rowwise: The recipe scales by row, which fewer GPUs can run.

    Raises:
        HardwareError: No such backend, or `fp8` where it cannot run.
    """
    if backend not in get_args(Backend):
        close = difflib.get_close_matches(str(backend), get_args(Backend), n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        allowed = ", ".join(get_args(Backend))
        raise HardwareError(f"unknown backend {backend!r}.{hint} Allowed: {allowed}.")
    capable = hardware.rowwise if rowwise else hardware.fp8
    if backend == "auto":
        return "fp8" if capable else fallback
    if backend == "fp8" and not capable:
        fix = "Use backend='emulate' (--emulate) for the same rounding on any device, slowly"
        if rowwise and hardware.fp8:
            fix = "Choose a recipe that scales by tensor, or u" + fix[1:]
        raise HardwareError(
            f"backend='fp8' (--fp8) was asked for, but it cannot run here: {hardware.reason} "
            f"{fix}; or backend='auto' (neither flag) to go on without FP8."
        )
    return backend


def _probe(device: "torch.device | str | int | None") -> _Probe:
    import torch

    if device is None:
        wanted, index = "cuda", None
    else:
        # An int is a CUDA ordinal here; torch.device(0) would ask for the current accelerator,
        # which a CPU build does not have.
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        wanted, index = parsed.type, parsed.index
    if wanted != "cuda":
        return _Probe(wanted, wanted.upper())
    if torch.version.hip is not None:
        # ROCm calls itself cuda and answers (9, 4) on an MI300, whose FP8 numbers are others
        # (fnuz): not ours to run.
        return _Probe("cuda", "an AMD GPU", problem="this PyTorch is built for AMD GPUs (ROCm)")
    problem = _cuda_problem()
    if not problem:
        try:
            properties = torch.cuda.get_device_properties(index)
            capability = (int(properties.major), int(properties.minor))
            return _Probe("cuda", str(properties.name), capability)
        except (RuntimeError, AssertionError, ValueError) as error:
            problem = f"the GPU does not answer ({_first_line(error)})"
    if device is None:
        return _Probe("cpu", "CPU", problem=problem)
    return _Probe("cuda", "an unusable GPU", problem=problem)


def _cuda_problem() -> str:
    """Why PyTorch sees no CUDA GPU, as a clause, or ''."""
    import torch

    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    with warnings.catch_warnings(record=True) as caught:
        # A driver that is too old is only a warning, and the sentence that the user needs.
        warnings.simplefilter("always")
        try:
            available = torch.cuda.is_available()
        except (RuntimeError, AssertionError) as error:
            return f"CUDA does not start ({_first_line(error)})"
    if available:
        return ""
    if caught:
        return f"CUDA does not start ({_first_line(caught[0].message)})"
    return "no GPU is visible to PyTorch (no driver, or CUDA_VISIBLE_DEVICES hides it)"


def _first_line(error: object) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")[:200]
