"""A compiled block as two CUDA graphs, forward and backward.

Dynamo's guards run as ever, and hand over the tensors that the block reads; recorded.py says where
from. Instead of what the compiler has its outputs and 30 to 40 saved tensors go through, a call is
a replay then: what backward needs stays inside.

A call that is met for the first time runs without graphs, forward and backward, and loads and tunes
what it launches. After that it is recorded, by the rules of memory.py.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor

from fp8patch import messages
from fp8patch.blocks import memory
from fp8patch.blocks.recorded import Recorded
from fp8patch.structures import tensors_in

__all__ = ["Replayed", "arguments_of"]

# What the running call of a block was given; None where no graphs may run.
_given: Any = None

# Calls that may be met: blocks of a structure by shapes. With more, what they read must lie
# elsewhere in every step (what another library gathers or swaps in).
_MOST_CALLS = 4096


class arguments_of:
    """Inside, a compiled block is called with the tensors in `structure`, and may replay graphs;
    None: it may not. (A class, and no generator: it is entered for every block.)"""

    __slots__ = ("_before", "_structure")

    def __init__(self, structure: Any) -> None:
        self._structure = structure

    def __enter__(self) -> None:
        global _given
        self._before, _given = _given, self._structure

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _given
        _given = self._before


class Replayed:
    """What Dynamo calls with the inputs of one graph of a block's structure."""

    def __init__(self, compiled: Callable[..., Any], name: str) -> None:
        """`name`: what messages call the structure."""
        self._compiled = compiled
        self._name = name
        # By where the inputs are; and where they were when a call was first met.
        self._records: dict[Any, Recorded] = {}
        self._seen: set[Any] = set()
        self._moving: list[int] | None = None
        self._impossible = False

    def forget(self) -> None:
        """Record everything anew."""
        self._records.clear()
        self._seen.clear()

    def __call__(self, *inputs: Any) -> Any:
        if _given is None or self._impossible:
            return self._compiled(*inputs)
        if self._moving is None:
            given = {id(tensor) for tensor in tensors_in(_given)}
            self._moving = [i for i, t in enumerate(inputs) if id(t) in given]
        step = memory.step()
        met, key = _keys(inputs, self._moving)
        # A block that is called twice in a step (two inputs, one encoder) has memory for each call.
        call = id(self), key
        step.turns[call] = turn = step.turns.get(call, 0) + 1
        key = key, turn
        record = self._records.get(key)
        if record is not None and record.session.dropped:
            del self._records[key]
            record = None
        if not self._may_run(step, record, met, inputs):
            outputs = self._compiled(*inputs)
            hindrance = _hindrance(inputs, outputs)
            if hindrance is not None:
                self._without(hindrance)
            elif met not in self._seen:
                self._see(met, outputs)
            return outputs
        if record is None:
            session = step.session
            assert session is not None
            try:
                record = Recorded(self._compiled, inputs, self._moving, session, self._give_up)
            except Exception as error:
                # Nothing of it has run yet.
                self._give_up(error)
                step.diverged = True
                return self._compiled(*inputs)
            known = self._records.items()
            self._records = {k: other for k, other in known if not other.session.dropped}
            self._records[key] = record
        return record.run(inputs)

    def _give_up(self, error: Exception) -> None:
        session = memory.step().session
        if session is not None:
            session.dropped = True
        self._without(messages.one_line(error))

    def _without(self, why: str) -> None:
        self._impossible = True
        messages.warn(
            f"{self._name}: no CUDA graph can be recorded, {why}. It runs compiled, without "
            "(`--compile` does so from the start)."
        )

    def _see(self, met: Any, outputs: Any) -> None:
        """A call has run, and is seen once its backward has."""
        if len(self._seen) >= _MOST_CALLS:
            self._seen.clear()
            self._without("what it reads lies elsewhere in every step")
            return
        node = next((t.grad_fn for t in outputs if getattr(t, "grad_fn", None) is not None), None)
        if node is None:
            self._seen.add(met)
        else:
            node.register_hook(lambda *_: self._seen.add(met))

    def _may_run(
        self, step: memory.Step, record: Recorded | None, met: Any, inputs: tuple[Any, ...]
    ) -> bool:
        """Does this call run as graphs? Decides for the whole step, where it is the first."""
        if record is not None and not step.plain:
            step.session = step.session or record.session
            if record.session is step.session and not step.diverged and record.may_run(inputs):
                return True
            step.session.missed = step.diverged = True
            return False
        if step.plain or met not in self._seen:
            step.plain = step.session is None
            step.diverged = step.session is not None
            return False
        if step.session is None:
            step.session = memory.new_session()
            step.plain, step.recording = step.session is None, step.session is not None
            if step.session is None:
                return False
        if not step.recording:
            step.session.missed = step.diverged = True
        return step.recording


def _keys(inputs: tuple[Any, ...], moving: list[int]) -> tuple[Any, Any]:
    """Where everything is that is not copied, and numbers (sizes that move): without, and with what
    graphs of this step have written."""
    written = memory.step().written
    found = [t.data_ptr() if isinstance(t, Tensor) else t for t in inputs]
    inside = []
    for i in moving:
        if found[i] in written:
            inside.append((i, found[i]))
        found[i] = 0
    met = tuple(found)
    return met, (met, tuple(inside))


def _hindrance(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> str | None:
    """What a graph could not take or return."""
    for values, classes in ((inputs, (Tensor, int, float)), (outputs, (Tensor,))):
        for value in values:
            if not isinstance(value, classes):
                verb = "takes" if values is inputs else "returns"
                return f"it {verb} a {type(value).__name__}"
    devices = {str(t.device) for t in (*inputs, *outputs) if isinstance(t, Tensor)}
    if len(devices) != 1 or not next(iter(devices)).startswith("cuda"):
        return f"its tensors are on {', '.join(sorted(devices))}, which is not one GPU"
    return None
