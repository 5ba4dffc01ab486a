"""A compiled block as two CUDA graphs, forward and backward.

Dynamo's guards run as ever, and hand over the tensors that the block reads. What lies where it lay
(parameters, quantised weights, slots) is found by address; what moves from call to call (the
block's arguments) is copied to where the graph reads it, unless a graph of this step has written it
there. Instead of what the compiler has its outputs and 30 to 40 saved tensors go through, a call is
a replay then: what backward needs stays inside.

A call that is met for the first time runs without graphs, and loads and tunes what it launches. The
second time it is recorded, by the rules of memory.py.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8patch import messages
from fp8patch.blocks import memory
from fp8patch.structures import tensors_in

__all__ = ["Replayed", "arguments_of"]

# Ids of the tensors that the running call of a block was given; None where no graphs may run.
_given: set[int] | None = None


@contextmanager
def arguments_of(structure: Any) -> Iterator[None]:
    """Inside, a compiled block is called with the tensors in `structure`, and may replay graphs;
    None: it may not."""
    global _given
    given = None if structure is None else {id(tensor) for tensor in tensors_in(structure)}
    before, _given = _given, given
    try:
        yield
    finally:
        _given = before


class Replayed:
    """What Dynamo calls with the inputs of one graph of a block's structure."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled = compiled
        # By where the inputs are; and where they were when a call was first met.
        self._records: dict[Any, _Recorded] = {}
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
            self._moving = [i for i, t in enumerate(inputs) if _is_moving(t)]
        met, key = _keys(inputs, self._moving)
        record = self._records.get(key)
        if record is not None and record.session.dropped:
            del self._records[key]
            record = None
        step = memory.step()
        if not self._may_run(step, record, met):
            outputs = self._compiled(*inputs)
            self._impossible = not _on_one_gpu((*inputs, *outputs))
            return outputs
        if record is None:
            assert step.session is not None
            try:
                record = _Recorded(self._compiled, inputs, self._moving, step.session)
            except RuntimeError as error:
                # Nothing of it has run yet.
                self._impossible = True
                messages.warn(
                    f"no CUDA graph could be recorded of a block: {messages.one_line(error)}. It "
                    "runs compiled, without."
                )
                return self._compiled(*inputs)
            self._records[key] = record
        return record.run(inputs)

    def _may_run(self, step: memory.Step, record: "_Recorded | None", met: Any) -> bool:
        """Does this call run as graphs? Decides for the whole step, where it is the first."""
        if record is not None and not step.plain:
            step.session = step.session or record.session
            runs = record.session is step.session and not step.diverged and record.may_run()
            step.diverged = step.diverged or not runs
            return runs
        if step.plain or met not in self._seen:
            self._seen.add(met)
            step.plain = step.session is None
            step.diverged = step.session is not None
            return False
        if step.session is None:
            step.session, step.recording = memory.Session(), True
        if not step.recording:
            step.session.missed = step.diverged = True
        return step.recording


def _is_moving(value: Any) -> bool:
    return isinstance(value, Tensor) and _given is not None and id(value) in _given


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


def _on_one_gpu(values: tuple[Any, ...]) -> bool:
    """Is there nothing in it that a graph could not take or return?"""
    tensors = [value for value in values if isinstance(value, Tensor)]
    numbers = all(isinstance(value, Tensor | int | float) for value in values)
    return numbers and len({t.device for t in tensors}) == 1 and tensors[0].is_cuda


class _Recorded:
    """One block's forward and backward, for inputs at certain addresses.

    Attributes:
        session: It belongs to.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        inputs: tuple[Any, ...],
        moving: list[int],
        session: memory.Session,
    ) -> None:
        self.session = session
        self._buffers: dict[int, Tensor] = {}
        self._moving = frozenset(moving)
        self._device = next(t.device for t in inputs if isinstance(t, Tensor))
        # What autograd has to know.
        self._wrt = [i for i, t in enumerate(inputs) if isinstance(t, Tensor) and t.requires_grad]
        own = list(inputs)
        # Leaves of their own: a parameter's is bound to the stream that it was first used on.
        for i in self._wrt:
            own[i] = inputs[i].detach().requires_grad_()
        for i in moving:
            own[i] = self._where_it_is_read(i, inputs[i])
        self._forward = memory.Graph(lambda: tuple(compiled(*own)), self._device, session)
        outputs = self._forward.results
        self._outputs = [memory.Place(output) for output in outputs]
        self._differentiable = [output.requires_grad for output in outputs]
        # Until backward is recorded: outputs, and inputs that have a gradient.
        self._history: list[Any] = []
        if any(self._differentiable):
            with_gradient = [output for output in outputs if output.requires_grad]
            self._history += [with_gradient, [own[i] for i in self._wrt]]
            session.histories.append(self._history)
        self._backward: memory.Graph | None = None
        self._grads_in: list[Tensor | memory.Place] = []
        self._grads_out: list[memory.Place | None] = []

    def _where_it_is_read(self, i: int, tensor: Tensor) -> Tensor:
        """`tensor` itself where a graph of this step has written it, else a copy of its own."""
        if tensor.data_ptr() in memory.step().written:
            found = tensor.detach()
        else:
            found = self._buffers[i] = _copied(tensor)
        return found.requires_grad_(tensor.requires_grad)

    def may_run(self) -> bool:
        return self._forward.may_run()

    def run(self, inputs: tuple[Any, ...]) -> Any:
        memory.step().calls += 1
        for i, buffer in self._buffers.items():
            _copied(inputs[i], buffer)
        if any(self._differentiable) and torch.is_grad_enabled():
            inner = [inputs[i] for i in self._wrt]
            return _Replay.apply(self, *inner)  # type: ignore[no-untyped-call]
        return self.forward()

    def forward(self) -> tuple[Tensor, ...]:
        self._forward.replay()
        return tuple(_handed_out(self._forward, self._outputs, self.session))

    def without_gradient(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Those of `outputs` that have none."""
        pairs = zip(outputs, self._differentiable, strict=True)
        return [output for output, has in pairs if not has]

    def backward(self, grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        pairs = zip(grads, self._differentiable, strict=True)
        wanted = [grad for grad, has in pairs if has]
        if self._backward is None:
            self._backward = self._record_backward(wanted)
        elif not self._backward.may_run():
            raise RuntimeError(
                "a backward that runs as CUDA graphs would overwrite what somebody still holds, "
                "and did not when it was recorded (a block's output?): keep a copy of it, or run "
                "with compiled blocks and without CUDA graphs."
            )
        else:
            for place, grad in zip(self._grads_in, wanted, strict=True):
                _put(grad, place)
        self._backward.replay()
        return _handed_out(self._backward, self._grads_out, self.session)

    def _record_backward(self, grads: list[Tensor]) -> memory.Graph:
        outputs, wrt = self._history
        read = []
        for output, grad in zip(outputs, grads, strict=True):
            if grad.data_ptr() in memory.step().written and grad.stride() == output.stride():
                self._grads_in.append(memory.Place(grad))
                read.append(grad.detach())
            else:
                buffer = torch.empty_like(output).copy_(grad)
                self._grads_in.append(buffer)
                read.append(buffer)

        def differentiate() -> tuple[Tensor | None, ...]:
            return tuple(torch.autograd.grad(outputs, wrt, read, allow_unused=True))

        with torch.enable_grad():
            graph = memory.Graph(differentiate, self._device, self.session)
        pairs = zip(self._wrt, graph.results, strict=True)
        self.session.kept += [g for i, g in pairs if g is not None and i not in self._moving]
        self._grads_out = [None if each is None else memory.Place(each) for each in graph.results]
        # From here on, what was saved and what was returned is memory of the session.
        self._history.clear()
        return graph


def _handed_out(graph: memory.Graph, places: list[Any], session: memory.Session) -> list[Any]:
    """What lies at `places`; the first time, what `graph` was recorded with."""
    results, graph.results = graph.results, None
    if results is None:
        return [None if place is None else place.hand_out() for place in places]
    session.held += [place for place in places if place is not None]
    pairs = zip(places, results, strict=True)
    return [None if place is None else place.hand_out(result) for place, result in pairs]


class _Replay(torch.autograd.Function):
    """(record, inputs that have a gradient) -> the block's outputs."""

    @staticmethod
    def forward(ctx: Any, record: _Recorded, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.record, ctx.replayed = record, False
        outputs = record.forward()
        ctx.mark_non_differentiable(*record.without_gradient(outputs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.replayed:
            raise RuntimeError(
                "Trying to backward through a block a second time: it ran as a CUDA graph, whose "
                "memory is used again. Run with compiled blocks and without CUDA graphs."
            )
        ctx.replayed = True
        return None, *ctx.record.backward(grads)


def _copied(tensor: Tensor, buffer: Tensor | None = None) -> Tensor:
    """Where `tensor` was copied to in this step, which is `buffer` if that is given.

    An argument that all blocks are given (a mask) is copied once.
    """
    copies = memory.step().copies
    known = copies.get(id(tensor))
    if known is not None:
        reference, version, place = known
        same = reference() is tensor and version == tensor._version
        if same and (buffer is None or place is buffer):
            return place
    with torch.no_grad():
        dense = _without_repeats(tensor)
        if buffer is None:
            found = torch.empty_strided(
                dense.shape, dense.stride(), dtype=tensor.dtype, device=tensor.device
            )
            buffer = found.expand(tensor.shape)
        _without_repeats(buffer).copy_(dense)
    copies[id(tensor)] = weakref.ref(tensor), tensor._version, buffer
    return buffer


def _without_repeats(tensor: Tensor) -> Tensor:
    """`tensor` before it was expanded: no two of its elements may lie in one place."""
    if 0 not in tensor.stride():
        return tensor.detach()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.detach().as_strided([n if s else min(n, 1) for n, s in pairs], tensor.stride())


def _put(grad: Tensor, place: "Tensor | memory.Place") -> None:
    if isinstance(place, Tensor):
        place.copy_(grad)
    elif grad.data_ptr() != place.address:
        place.tensor().copy_(grad)
