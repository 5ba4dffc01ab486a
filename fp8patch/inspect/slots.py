"""What the points of a slot say: how much clipped, flushed, how far its scale was off. No torch.

A layer is at risk where FP8 loses what matters. Each figure is compared with what healthy runs stay
under, so that a severity of 1 means "worth looking at", and layers can be ranked by one number. The
thresholds lie well above what was seen where FP8 trained as well as BF16: at most 5e-5 clipped and
7e-3 flushed in any one tensor (all-MiniLM-L6-v2, fine-tuned), 3e-5 and 2e-3 over all tensors of 500
steps of small BERTs and Llamas.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

__all__ = ["THRESHOLDS", "Layer", "Ratio", "SlotPoints", "layers_of"]

# Parts of the values cast, and dB.
THRESHOLDS = {"saturated": 1e-3, "flushed": 2e-2, "non_finite": 0.0, "sqnr": 20.0}

# Binades that a scale may be off before a format has lost half of its range: what it has normal
# numbers for is 15 (E4M3) and 30 (E5M2) binades wide. That alone does no harm, so it only ranks.
_ROOM = {"e4m3": 7.5, "e5m2": 15.0}
_DRIFT_AT_MOST = 0.9

# The part of a run that tells how it goes now, and the part at its start in which scales settle:
# their history is short then, and healthy runs clip some percent of a tensor in a step or two.
_RECENT = 0.25
_SETTLING = 0.1


@dataclass(frozen=True, slots=True)
class Ratio:
    """A part of the values cast.

    Attributes:
        whole: Over the run, but for its first tenth.
        recent: Over the last quarter of its points.
        worst: Of the worst point.
        step: Where that was; None where nothing ever was.
    """

    whole: float
    recent: float
    worst: float
    step: int | None

    @property
    def value(self) -> float:
        """What counts: a trouble that is over may have done its harm, one that grew will."""
        return max(self.whole, self.recent)


@dataclass(frozen=True, kw_only=True)
class SlotPoints:
    """One slot over a run. All lists are as long as `steps`, but for a checkpoint's.

    Attributes:
        path, role: The module, and what of it; one of `slots.ROLES`.
        scaling: `delayed`, `current` or `rowwise`: without `delayed`, `scale` says nothing.
        format: `e4m3` or `e5m2`.
        limit: What amax is scaled to.
        steps: Steps of the points. A checkpoint has no steps: its amax are of the last ones, its
            counts one total, and its scale the newest.
        amax: Largest magnitude since the point before; None where it was not finite.
        scale: Of the point's step; 0 where the tensor's own amax was used.
        saturated, flushed, non_finite, seen: Elements since the point before.
        shared_by: Other modules that read the same tensor.
        sqnr: Signal to quantisation noise in dB, where it was measured.
    """

    path: str
    role: str
    scaling: str
    format: str
    limit: float
    steps: Sequence[int]
    amax: Sequence[float | None]
    scale: Sequence[float]
    saturated: Sequence[int]
    flushed: Sequence[int]
    non_finite: Sequence[int]
    seen: Sequence[int]
    shared_by: tuple[str, ...] = ()
    sqnr: float | None = None

    @cached_property
    def ratios(self) -> dict[str, Ratio]:
        """Of saturated, flushed and non_finite."""
        return {
            name: _ratio(getattr(self, name), self.seen, self.steps)
            for name in ("saturated", "flushed", "non_finite")
        }

    @cached_property
    def fill(self) -> float | None:
        """The part of its range that a tensor reached, as a power of two, where it was worst.

        -20: the scale still fitted something a million times as large. 1: half of the range was
        missing. None where the scale is made from the tensor itself.
        """
        if self.scaling != "delayed":
            return None
        # A checkpoint has one scale, which belongs to its last amax.
        pairs = list(zip(reversed(self.amax), reversed(self.scale), strict=False))
        settled = pairs[: len(pairs) - int(_SETTLING * len(pairs))]
        off = [math.log2(a * s / self.limit) for a, s in settled if a and s]
        return max(off, key=abs, default=None)

    @cached_property
    def severity(self) -> float:
        """1 and more: worth looking at."""
        found = [ratio.value / THRESHOLDS[n] for n, ratio in self.ratios.items() if THRESHOLDS[n]]
        bad = self.ratios["non_finite"]
        # A loss scaler provokes overflows, and skips the step: those that stay are another matter.
        found.append(1.0 + bad.recent if bad.recent else 0.5 * (bad.whole > 0))
        if self.sqnr is not None:
            found.append(10 ** ((THRESHOLDS["sqnr"] - self.sqnr) / 10))
        if self.fill is not None:
            found.append(min(abs(self.fill) / _ROOM[self.format], _DRIFT_AT_MOST))
        return max(found)


@dataclass(frozen=True)
class Layer:
    """A module, and its slots; the worst first."""

    path: str
    slots: tuple[SlotPoints, ...] = field(default_factory=tuple)

    @property
    def worst(self) -> SlotPoints:
        return self.slots[0]

    @property
    def severity(self) -> float:
        return self.worst.severity


def layers_of(slots: Iterable[SlotPoints]) -> list[Layer]:
    """The layers that `slots` belong to, worst first; equals stay in the order of the model."""
    grouped: dict[str, list[SlotPoints]] = {}
    for slot in slots:
        grouped.setdefault(slot.path, []).append(slot)
    layers = [
        Layer(path, tuple(sorted(group, key=lambda slot: -slot.severity)))
        for path, group in grouped.items()
    ]
    return sorted(layers, key=lambda layer: -layer.severity)


def _ratio(counts: Sequence[int], seen: Sequence[int], steps: Sequence[int]) -> Ratio:
    first = int(_SETTLING * len(counts))
    whole = sum(counts[first:]) / max(sum(seen[first:]), 1)
    last = max(math.ceil(_RECENT * len(counts)), 1)
    recent = sum(counts[-last:]) / max(sum(seen[-last:]), 1)
    parts = [count / max(total, 1) for count, total in zip(counts, seen, strict=True)]
    worst = max(parts, default=0.0)
    known = worst > 0 and len(steps) == len(counts)
    return Ratio(whole, recent, worst, steps[parts.index(worst)] if known else None)
