"""What `doctor` finds out, as data: no torch in here, and nothing is tested here."""

from dataclasses import dataclass

__all__ = ["CastTest", "Fault", "GemmTest", "Gpu", "Interference", "Outcome", "Package"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of running something once.

    Attributes:
        ok: It ran and equals the oracle.
        ran: It ran at all.
        db: How near to the oracle, signal to noise; None where nothing was measured.
        detail: What is wrong, or what the library said; empty if nothing.
    """

    ok: bool
    ran: bool
    db: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTest:
    """One kind of FP8 GEMM.

    Attributes:
        kind, operands: How it scales, and its formats.
        needs: Least compute capability that has it.
        hardware: On the GPU; None without one.
        emulated: The same product in FP32, on the CPU.
        rounding_db: What FP8 itself costs here: the oracle against the product without rounding.
    """

    kind: str
    operands: str
    needs: tuple[int, int]
    hardware: Outcome | None
    emulated: Outcome
    rounding_db: float

    def expected(self, capability: tuple[int, int] | None) -> bool:
        """Whether a GPU of this compute capability is to run it."""
        return capability is not None and capability >= self.needs


@dataclass(frozen=True, slots=True, kw_only=True)
class CastTest:
    """One kernel that is no GEMM, where a run would use it: on the GPU, else on the CPU.

    Attributes:
        by_row: Recipes that scale by row use it alone (True), all others do (False), all (None).
    """

    name: str
    by_row: bool | None
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as PyTorch sees it; `memory` is in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A library of the user's; `problem` says what is wrong with it, or is empty."""

    name: str
    version: str | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """A setting of the user's that changes what fp8patch does."""

    name: str
    value: str
    effect: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of an installed library, seen here a moment ago, with the way around it."""

    libraries: str
    fault: str
    seen: str
    way_around: str
