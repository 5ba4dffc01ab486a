"""Casts of weights that wait until something asks for a weight.

All weights of a step are one launch where a training forward begins. But a model may read something
back before its first layer (a Llama its mask): the GPU would cast while the CPU waits, and wait
while the CPU launches what comes after. So where whoever compiled the blocks is going to ask, only
the bookkeeping is done at the door.
"""

from collections.abc import Callable

__all__ = ["LateCasts"]


class LateCasts:
    """Of one bank.

    Attributes:
        wanted: Somebody asks, in time: whoever compiled blocks does when the first is called.
        read_early: Something else is compiled, and reads weights before that: nothing waits.
        waits: Text that no other forward has where something waits, else "". What is traced reads
            it: a graph that has made the casts of one forward serves no other.
    """

    def __init__(self) -> None:
        self.wanted = self.read_early = False
        self.waits = ""
        self._forward = ""
        # (launch, undo)
        self._jobs: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def begin(self, entry: int, training: bool) -> None:
        """The casts of the outermost forward `entry` are asked for from here to `end`."""
        for _, undo in self._jobs:  # Of a forward that was interrupted; weights may have moved.
            undo()
        self._forget()
        late = training and self.wanted and not self.read_early
        self._forward = f"{entry} {id(self)}" if late else ""

    def end(self) -> None:
        """What is launched from now on does not wait."""
        self._forward = ""

    def defer(self, launch: Callable[[], None], undo: Callable[[], None]) -> None:
        """Call `launch` now, or when something asks; `undo` instead where nothing ever does."""
        if self._forward:
            self._jobs.append((launch, undo))
            self.waits = self._forward
        else:
            launch()

    def catch_up(self) -> None:
        """Something asks for a weight: launch what waits."""
        if self.waits:
            self.catch_up_while_tracing()
            self._forget()

    def catch_up_while_tracing(self) -> None:
        """As `catch_up`; what is being traced goes on seeing that there was something to do."""
        while self._jobs:
            launch, undo = self._jobs.pop(0)
            try:
                launch()
            except BaseException:
                undo()  # Noted as cast already; a script may catch this and go on.
                raise

    def _forget(self) -> None:
        self._jobs.clear()
        self.waits = ""
