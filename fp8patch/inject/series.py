"""A figure of every step of a run of any length, in a bounded number of points."""

from collections.abc import Iterator

__all__ = ["Series"]


class Series:
    """(step, value) of every step; once there are `most`, each point is the mean of twice as many.

    Attributes:
        each: Steps that one point stands for; the last point may have fewer.
        last: The newest value as it is; None before the first.
    """

    def __init__(self, most: int = 10_000) -> None:
        self.each = 1
        self.last: float | None = None
        self._most = most
        self._points: list[tuple[int, float]] = []
        self._open: list[float] = []
        self._step = 0

    def append(self, step: int, value: float) -> None:
        self.last, self._step = value, step
        self._open.append(value)
        if len(self._open) < self.each:
            return
        self._points.append((step, _mean(self._open)))
        self._open = []
        if len(self._points) >= self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(b[0], (a[1] + b[1]) / 2) for a, b in pairs]
            self.each *= 2

    def __len__(self) -> int:
        return len(self._points) + bool(self._open)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        yield from self._points
        if self._open:
            yield self._step, _mean(self._open)

    def values(self) -> list[float]:
        """The values alone, oldest first."""
        return [value for _, value in self]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
