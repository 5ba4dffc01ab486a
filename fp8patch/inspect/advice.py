"""What to do about a layer at risk: the lines of a recipe that keep its numbers. No torch.

Two things go wrong, and each has its own remedy. A scale from earlier steps that no longer fits
clips or flushes a tensor that FP8 could hold: a scale from the tensor itself, one a row, never
does. A tensor whose own values lie further apart than the format reaches can't be held by any
scale: its layer stays in BF16.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fp8patch.inspect.slots import THRESHOLDS, Layer, SlotPoints

__all__ = [
    "Advice",
    "Remedy",
    "advise",
    "exact",
    "fields_of",
    "overrides",
    "patterns",
    "percent",
    "recipe_line",
    "recipe_lines",
    "remedies",
    "what_is_wrong",
]

Remedy = Literal["rowwise", "bf16", "none"]

_LINES: dict[Remedy, tuple[str, ...]] = {
    "rowwise": ("scaling: rowwise",),
    "bf16": ("fprop: bf16", "dgrad: bf16", "wgrad: bf16"),
    "none": (),
}
# Binades that a scale has to be off to be what flushes: with less, the tensor itself is too wide.
_STALE = 4.0

_NOUNS = {"input": "inputs", "weight": "weight", "grad_output": "gradients"}


@dataclass(frozen=True, slots=True)
class Advice:
    """On one layer.

    Attributes:
        path: The layer; every module that shares its input is in `also`.
        why: One clause.
        remedy: `rowwise`, `bf16`, or `none` where no recipe helps.
    """

    path: str
    why: str
    remedy: Remedy
    also: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.also)


def advise(layers: Iterable[Layer]) -> list[Advice]:
    """What to do about every layer with a severity of 1 and more, in the order given."""
    found = []
    for layer in layers:
        bad = [slot for slot in layer.slots if slot.severity >= 1]
        if not bad:
            continue
        remedies = [_remedy(slot) for slot in bad]
        order: tuple[Remedy, ...] = ("bf16", "rowwise")
        remedy: Remedy = next((each for each in order if each in remedies), "none")
        also = {path for slot in bad for path in slot.shared_by}
        why = "; ".join(what_is_wrong(slot) for slot in bad)
        found.append(Advice(layer.path, why, remedy, tuple(sorted(also))))
    return found


def _remedy(slot: SlotPoints) -> Remedy:
    names = ("saturated", "flushed")
    over = {name for name in names if slot.ratios[name].value >= THRESHOLDS[name]}
    low = slot.sqnr is not None and slot.sqnr <= THRESHOLDS["sqnr"]
    if not over and not low:
        return "none"
    if slot.scaling == "rowwise":
        return "bf16"
    # A scale that has to move faster than it does: one from the tensor itself can't be late.
    late = slot.fill is not None and ("saturated" in over or abs(slot.fill) >= _STALE)
    return "rowwise" if late or not over else "bf16"


def what_is_wrong(slot: SlotPoints, *, times: float = 1.5) -> str:
    """A clause on a slot: "3.1% of the gradients flushed to zero (at worst 100%, step 40)".

    Args:
        times: How much worse than the whole the worst point has to be, to be told of.
    """
    parts = []
    names = {"saturated": "clipped", "flushed": "flushed to zero", "non_finite": "not finite"}
    for name, said in names.items():
        ratio = slot.ratios[name]
        if ratio.value == 0 or ratio.value < THRESHOLDS[name]:
            continue
        text = f"{percent(ratio.value)} of the {_NOUNS[slot.role]} {said}"
        if ratio.step is not None and ratio.worst >= times * ratio.value:
            text += f" (at worst {percent(ratio.worst)}, step {ratio.step})"
        parts.append(text)
    if slot.sqnr is not None and slot.sqnr <= THRESHOLDS["sqnr"]:
        parts.append(f"the {_NOUNS[slot.role]} at {slot.sqnr:.1f} dB")
    if parts and slot.fill is not None and abs(slot.fill) >= 1:
        parts[-1] += f", as they reached 2^{slot.fill:.0f} of the range"
    return ", ".join(parts)


def overrides(advice: Iterable[Advice], known: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """{pattern: fields, as "scaling: rowwise"} of a recipe that follows `advice`.

    Args:
        known: Paths of all converted layers: where all those that differ in numbers alone are
            advised the same, one pattern stands for them.
    """
    wanted: dict[str, Remedy] = {}
    for path, remedy in remedies(advice).items():
        # A recipe is for all models of a run: one that needs BF16 decides, as between tensors.
        if wanted.get(_in_its_model(path)) != "bf16":
            wanted[_in_its_model(path)] = remedy
    found = patterns(wanted, [_in_its_model(path) for path in known])
    return {
        exact(pattern) if pattern in wanted else pattern: _LINES[remedy]
        for pattern, remedy in found.items()
    }


def _in_its_model(path: str) -> str:
    """Without the "Name#2:" that tells the models of one run apart (source.py)."""
    return path.rpartition(":")[2]


def remedies(advice: Iterable[Advice]) -> dict[str, Remedy]:
    """{path: what helps it}, without the layers that no recipe helps."""
    wanted: dict[str, Remedy] = {}
    for item in advice:
        for path in item.paths:
            # Whoever needs BF16 for one tensor gets it, whatever another asks for.
            if item.remedy != "none" and wanted.get(path) != "bf16":
                wanted[path] = item.remedy
    return wanted


def fields_of(remedy: Remedy) -> dict[str, str]:
    """The fields of an override that is this remedy."""
    return dict(line.split(": ") for line in _LINES[remedy])


def recipe_lines(chosen: Mapping[str, Sequence[str]]) -> list[str]:
    """`overrides` as lines of a recipe's YAML; none without any."""
    lines = ["overrides:"]
    for pattern, fields in chosen.items():
        lines += [f"  {json.dumps(pattern)}:", *(f"    {field}" for field in fields)]
    return lines if chosen else []


def recipe_line(chosen: Mapping[str, Sequence[str]]) -> str:
    """The same on one line."""
    each = [f"{json.dumps(pattern)}: {{{', '.join(fields)}}}" for pattern, fields in chosen.items()]
    return f"overrides: {{{', '.join(each)}}}"


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def patterns(wanted: Mapping[str, Remedy], known: Sequence[str]) -> dict[str, Remedy]:
    """`wanted`, with one pattern for paths that differ in numbers alone and are wanted the same."""
    alike: dict[str, list[str]] = {}
    for path in dict.fromkeys([*known, *wanted]):
        alike.setdefault(_NUMBER.sub("*", path), []).append(path)
    found: dict[str, Remedy] = {}
    for path, remedy in wanted.items():
        generic = _NUMBER.sub("*", path)
        group = alike[generic]
        whole = len(group) > 1 and all(wanted.get(member) == remedy for member in group)
        # What a name holds of a pattern's signs is escaped where it stands alone.
        whole = whole and not set(path) & set("*?[")
        found[generic if whole else path] = remedy
    return found


def exact(path: str) -> str:
    """A pattern that chooses `path`; a model that is one layer has no name."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in path) or "*"


def percent(ratio: float) -> str:
    """0.0312 as "3.1%"."""
    return "0" if ratio == 0 else f"{100 * ratio:.2g}%" if ratio < 0.995 else "100%"
