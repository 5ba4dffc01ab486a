"""Examine this machine: what FP8 it runs, tested; what would be used; what stands in the way.

No torch at the top: where torch itself is missing or broken, that is the finding.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8patch import __version__
from fp8patch.doctor import machine, peers
from fp8patch.doctor.advice import Advice, advise
from fp8patch.doctor.environment import find_interference
from fp8patch.doctor.types import CastTest, Fault, GemmTest, Gpu, Interference, Package
from fp8patch.hardware import Hardware, detect
from fp8patch.messages import one_line
from fp8patch.recipe import Recipe
from fp8patch.roofline import resolve_gpu

__all__ = ["Examination", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All findings. What needs torch is empty or None where torch can't be imported.

    Attributes:
        python, driver: Versions; `driver` is None without NVIDIA's.
        cuda: The CUDA version that PyTorch was built for; None for a build without.
        packages: Installed or not, with what is wrong.
        torch_problem: Why torch, or what fp8patch needs of it, can't be imported; else empty.
        gpus: What PyTorch sees.
        hardware: What fp8patch makes of it.
        gemms, casts: What was tested.
        interference: Settings that change a run.
        faults: Of installed libraries, reproduced.
        advice: What would be used.
    """

    python: str
    driver: str | None
    cuda: str | None
    packages: list[Package]
    torch_problem: str
    gpus: list[Gpu]
    hardware: Hardware | None
    gemms: list[GemmTest]
    casts: list[CastTest]
    interference: list[Interference]
    faults: list[Fault]
    advice: Advice | None

    @property
    def usable(self) -> bool:
        """Whether anything can run: in FP8, or emulated."""
        return self.advice is not None and self.advice.usable

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-safe but for infinities."""
        return {
            "fp8patch": __version__,
            "usable": self.usable,
            **{field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)},
        }


def examine(recipe: Recipe, *, stage: Callable[[str], None] = lambda text: None) -> Examination:
    """Test everything; some seconds, most of them for the imports of the user's libraries.

    Args:
        recipe: What would be used.
        stage: Told what is being done.
    """
    installed = machine.packages()
    stage("importing libraries")
    with peers.start(installed) as reproduction:
        problem = _torch_problem()
        found = _Tested() if problem else _test(recipe, stage)
        stage("trying faults of installed libraries")
        faults, broken = reproduction.result() if reproduction is not None else ([], {})
    return Examination(
        python=machine.python_version(),
        driver=machine.driver(),
        packages=[_broken(package, broken) for package in installed],
        torch_problem=problem,
        interference=find_interference(),
        faults=faults,
        **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)},
    )


@dataclass(frozen=True, slots=True)
class _Tested:
    """What only torch can tell."""

    cuda: str | None = None
    gpus: list[Gpu] = dataclasses.field(default_factory=list)
    hardware: Hardware | None = None
    gemms: list[GemmTest] = dataclasses.field(default_factory=list)
    casts: list[CastTest] = dataclasses.field(default_factory=list)
    advice: Advice | None = None


def _torch_problem() -> str:
    try:
        import torch  # noqa: F401

        import fp8patch.doctor.casts
        import fp8patch.doctor.gemms  # noqa: F401
    except Exception as error:  # a library that does not load, a name that this release lacks
        return one_line(error)
    return ""


def _test(recipe: Recipe, stage: Callable[[str], None]) -> _Tested:
    import torch

    from fp8patch.doctor.casts import check_casts
    from fp8patch.doctor.gemms import check_gemms

    hardware = detect()
    # Before anything runs: a kernel that crashes takes CUDA along, for this process.
    gpus = machine.gpus()
    stage("running a GEMM of each kind")
    # On any GPU, also on one that is too old for FP8: tried, not read off a table.
    gemms = check_gemms("cuda" if gpus and hardware.capability is not None else None)
    stage("compiling and running the casts")
    casts = check_casts("cuda" if hardware.fp8 else "cpu")
    figures = resolve_gpu("auto", hardware)
    return _Tested(
        cuda=torch.version.cuda,
        gpus=gpus,
        hardware=hardware,
        gemms=gemms,
        casts=casts,
        advice=advise(hardware, gemms, casts, recipe, figures),
    )


def _broken(package: Package, broken: dict[str, str]) -> Package:
    if package.name not in broken or package.problem:
        return package
    return dataclasses.replace(package, problem=f"can't be imported: {broken[package.name]}")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value
