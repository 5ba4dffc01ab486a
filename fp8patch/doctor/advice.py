"""From what was tested to what will be used: which backend, which recipe, and why not a faster one.

Pure: the machine is given, nothing is asked or run.
"""

from dataclasses import dataclass

from fp8patch.doctor.types import CastTest, GemmTest
from fp8patch.hardware import Hardware, resolve_backend
from fp8patch.recipe import Recipe, builtin_names
from fp8patch.roofline import Gpu, predict_gain

__all__ = ["Advice", "Row", "advise"]

# The layer that gains are predicted for: large enough to show what a recipe can give.
SIZE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recipe on this machine.

    Attributes:
        runs: "fp8", "emulated" or "no": what it can run as.
        gain: Predicted for one layer of SIZE^3, against BF16; None where there are no figures.
        reason: Why it does not run in FP8; empty if it does.
    """

    recipe: str
    runs: str
    gain: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What would be used.

    Attributes:
        backend: What `auto` becomes: "fp8", or "off".
        recipe: The recipe that was asked for.
        gpu: What gains are predicted for; None where they are not.
        rows: It and the built-in ones, the fastest first where gains are predicted.
        sentences: Why this and not something faster, and what to do where something is wrong.
        usable: Something runs: in FP8, or emulated.
    """

    backend: str
    recipe: str
    gpu: str | None
    rows: tuple[Row, ...]
    sentences: tuple[str, ...]
    usable: bool


def advise(
    hardware: Hardware,
    gemms: list[GemmTest],
    casts: list[CastTest],
    recipe: Recipe,
    gpu: Gpu | None,
) -> Advice:
    """What to expect on `hardware`, whose tests gave `gemms` and `casts`.

    Args:
        recipe: The one that would be used.
        gpu: Figures to predict gains with; None where there are none.
    """
    known = [Recipe.load(name) for name in builtin_names()]
    own, *others = [
        _row(each, hardware, gemms, casts, gpu)
        for each in (recipe, *(each for each in known if each != recipe))
    ]
    rows = sorted([own, *others], key=lambda row: -(row.gain or 0))
    backend = resolve_backend("auto", hardware, "off", rowwise=recipe.scaling == "rowwise")
    sentences = [_main(backend, own, hardware), *_faster(own, rows, gemms, hardware)]
    return Advice(
        backend=backend,
        recipe=recipe.name,
        gpu=None if gpu is None else gpu.label,
        rows=tuple(rows),
        sentences=tuple(sentence for sentence in sentences if sentence),
        usable=own.runs != "no",
    )


def _row(
    recipe: Recipe,
    hardware: Hardware,
    gemms: list[GemmTest],
    casts: list[CastTest],
    gpu: Gpu | None,
) -> Row:
    rowwise = recipe.scaling == "rowwise"
    mine = [test for test in gemms if test.kind.startswith("rowwise" if rowwise else "per tensor")]
    gain = None if gpu is None else predict_gain(SIZE, SIZE, SIZE, gpu, recipe)
    emulated = bool(mine) and all(test.emulated.ok for test in mine)
    runs, reason = ("emulated" if emulated else "no"), ""
    if not (hardware.rowwise if rowwise else hardware.fp8):
        reason = hardware.reason
    elif broken := [test for test in mine if test.hardware is None or not test.hardware.ok]:
        detail = "not run" if broken[0].hardware is None else broken[0].hardware.detail
        reason = f"its GEMM ({broken[0].kind}) does not work here: {detail}."
    elif failed := [c for c in casts if not c.outcome.ok and c.by_row in (None, rowwise)]:
        reason = f"a kernel of it does not work here: {failed[0].name}: {failed[0].outcome.detail}."
    else:
        runs = "fp8"
    return Row(recipe=recipe.name, runs=runs, gain=gain, reason=reason)


def _main(backend: str, own: Row, hardware: Hardware) -> str:
    if own.runs == "fp8":
        return f"{own.recipe} runs in FP8. {hardware.reason}"
    other = "--emulate computes the same rounding on any device, slowly."
    if own.runs == "no":
        other = "Nothing runs here, not even emulated: install PyTorch again."
    if backend == "fp8":
        return (
            f"{own.recipe} would be used in FP8, and {own.reason} --no-fp8 trains in BF16. {other}"
        )
    return f"FP8 is off: {own.reason} Scripts keep their own precision. {other}"


def _faster(own: Row, rows: list[Row], gemms: list[GemmTest], hardware: Hardware) -> list[str]:
    """Why nothing faster is used."""
    if own.runs != "fp8":
        return []
    said = []
    better = [r for r in rows if r.runs == "fp8" and (r.gain or 0) > (own.gain or 0)]
    if better:
        first = better[0]
        said.append(
            f"{first.recipe} is predicted to be faster: {first.gain:.2f}x over BF16, and "
            f"{own.recipe} {own.gain:.2f}x (one layer of {SIZE}x{SIZE} at M={SIZE}). "
            f"{own.recipe} was asked for."
        )
    else:
        said.append("No built-in recipe is predicted to be faster here.")
    blocks = [test for test in gemms if test.kind.startswith("1x128")]
    if blocks and all(test.hardware is not None and test.hardware.ok for test in blocks):
        said.append("GEMMs with 1x128 blocks run here, and no recipe uses them yet.")
    for test in gemms:
        if test.kind.startswith("MXFP8") and not test.expected(hardware.capability):
            said.append("MXFP8 needs compute capability 10.0, and no recipe uses it yet.")
    return said
