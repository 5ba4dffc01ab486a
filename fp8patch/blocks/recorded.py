"""What was recorded of one call of a block: its forward and backward, and where they read.

What lies where it lay (parameters, quantised weights, slots) is read there; what moves from call to
call (the block's arguments) is copied to where the graph reads it, unless a graph of this step has
written it there.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8patch import messages
from fp8patch.blocks import memory

__all__ = ["Recorded"]

_HELD = (
    "a backward that runs as CUDA graphs comes in another order than it was recorded in, or would "
    "overwrite what somebody still holds (a block's output?): keep a copy of that, or run without "
    "CUDA graphs (--compile, or cuda_graphs=False)."
)


class Recorded:
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
        give_up: Callable[[Exception], None],
    ) -> None:
        """Record the forward.

        Args:
            give_up: Called where the backward can't be recorded.

        Raises:
            RuntimeError: It can't be. Nothing of it has run yet.
        """
        self.session = session
        self._give_up = give_up
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
        versions = [own[i]._version for i in moving]
        self._forward = memory.Graph(lambda: tuple(compiled(*own)), self._device, session)
        if [own[i]._version for i in moving] != versions:
            raise RuntimeError("it writes to what it is given")
        outputs = self._forward.results
        self._outputs = [memory.Result(output) for output in outputs]
        self._differentiable = [output.requires_grad for output in outputs]
        again = self._read_in_backward(own, outputs)
        self._read_again = [i for i in again if i not in self._moving]
        self._read_inside = [i for i in again if i in self._moving]
        # Until backward is recorded: outputs, and inputs that have a gradient.
        self._history: list[Any] = []
        if any(self._differentiable):
            with_gradient = [output for output in outputs if output.requires_grad]
            self._history += [with_gradient, [own[i] for i in self._wrt]]
            session.histories.append(self._history)
        self._backward: memory.Graph | None = None
        self._grads_in: list[Tensor | memory.Result] = []
        self._grads_out: list[memory.Result | None] = []

    def _where_it_is_read(self, i: int, tensor: Tensor) -> Tensor:
        """`tensor` itself where a graph of this step has written it, else a copy of its own."""
        if tensor.data_ptr() in memory.step().written:
            found = tensor.detach()
        else:
            found = self._buffers[i] = _copied(tensor)
        return found.requires_grad_(tensor.requires_grad)

    def _read_in_backward(self, own: list[Any], outputs: tuple[Tensor, ...]) -> list[int]:
        """Inputs that are read where they lie, and in backward again."""
        saved = _saved_by(outputs)
        return [
            i
            for i, tensor in enumerate(own)
            if isinstance(tensor, Tensor)
            and i not in self._buffers
            and (saved is None or tensor.untyped_storage().data_ptr() in saved)
        ]

    def may_run(self, inputs: tuple[Any, ...]) -> bool:
        """Is nothing that it would write held by anybody, or wanted by another backward?"""
        filled = memory.step().filled
        for i, buffer in self._buffers.items():
            known = filled.get(id(buffer))
            if known is not None and not _is(inputs[i], known):
                return False
        return self._forward.may_run()

    def run(self, inputs: tuple[Any, ...]) -> Any:
        memory.step().calls += 1
        for i, buffer in self._buffers.items():
            _copied(inputs[i], buffer)
        if any(self._differentiable) and torch.is_grad_enabled():
            written = memory.step().written
            kept = [inputs[i] for i in self._read_again]
            # Of what graphs have written, whoever holds it is counted.
            places = [written[inputs[i].data_ptr()] for i in self._read_inside]
            inner = [inputs[i] for i in self._wrt]
            return _Replay.apply(self, kept, places, *inner)  # type: ignore[no-untyped-call]
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
            try:
                self._backward = self._record_backward(wanted)
            except Exception as error:
                # (What its forward saved is let go by now: it can't run otherwise either.)
                self._give_up(error)
                raise RuntimeError(
                    "the backward of a block could not be recorded as a CUDA graph "
                    f"({messages.one_line(error)}): go on from a checkpoint, or run without CUDA "
                    "graphs (--compile, or cuda_graphs=False)."
                ) from error
        else:
            if not self._backward.may_run():
                raise RuntimeError(_HELD)
            for place, grad in zip(self._grads_in, wanted, strict=True):
                _put(grad, place)
        self._backward.replay()
        return _handed_out(self._backward, self._grads_out, self.session)

    def _record_backward(self, grads: list[Tensor]) -> memory.Graph:
        outputs, wrt = self._history
        written = memory.step().written
        read: list[Tensor] = []
        places: list[Tensor | memory.Result] = []
        for output, grad in zip(outputs, grads, strict=True):
            place = written.get(grad.data_ptr())
            if place is not None and place.is_gradient and grad.stride() == output.stride():
                places.append(place)
                read.append(grad.detach())
            else:
                buffer = torch.empty_like(output).copy_(grad)
                places.append(buffer)
                read.append(buffer)

        def differentiate() -> tuple[Tensor | None, ...]:
            return tuple(torch.autograd.grad(outputs, wrt, read, allow_unused=True))

        with torch.enable_grad():
            graph = memory.Graph(differentiate, self._device, self.session)
        self.session.kept += [grad for grad in graph.results if grad is not None]
        self._grads_in = places
        self._grads_out = [
            None if grad is None else memory.Result(grad, is_gradient=True)
            for grad in graph.results
        ]
        # From here on, what was saved and what was returned is memory of the session.
        self._history.clear()
        return graph


def _saved_by(outputs: tuple[Tensor, ...]) -> set[int] | None:
    """Where what autograd saved for the backward of `outputs` lies; None: that is not known."""
    for output in outputs:
        node: Any = output.grad_fn
        if node is not None and hasattr(node, "saved_tensors"):
            return {t.untyped_storage().data_ptr() for t in node.saved_tensors if t is not None}
    return None


def _handed_out(graph: memory.Graph, places: list[Any], session: memory.Session) -> list[Any]:
    """What lies at `places`; the first time, what `graph` was recorded with."""
    results, graph.results = graph.results, None
    if results is None:
        return [None if place is None else place.hand_out() for place in places]
    session.held += [place for place in places if place is not None]
    pairs = zip(places, results, strict=True)
    return [None if place is None else place.hand_out(result) for place, result in pairs]


class _Replay(torch.autograd.Function):
    """(record, what backward reads where it lies, what it reads of other graphs, inputs that have a
    gradient) -> the block's outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        record: Recorded,
        kept: list[Tensor],
        places: list[memory.Result],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.record, ctx.replayed = record, False
        ctx.kept, ctx.places, ctx.versions = kept, places, _versions(kept, places)
        outputs = record.forward()
        ctx.mark_non_differentiable(*record.without_gradient(outputs))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.replayed:
            raise RuntimeError(
                "Trying to backward through a block a second time: it ran as a CUDA graph, whose "
                "memory is used again. Run without CUDA graphs (--compile, or cuda_graphs=False)."
            )
        versions = _versions(ctx.kept, ctx.places)
        if versions != ctx.versions:
            read = [*ctx.kept, *(place.tensor() for place in ctx.places)]
            written = zip(read, ctx.versions, versions, strict=True)
            tensor, then, now = next(each for each in written if each[1] != each[2])
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tensor.type()} {list(tensor.shape)}, which a block read, "
                f"is at version {now}; expected version {then} instead."
            )
        ctx.replayed = True
        try:
            return None, None, None, *ctx.record.backward(grads)
        finally:
            # Not before: what is allocated meanwhile would lie where backward reads.
            ctx.kept, ctx.places = (), ()


def _versions(kept: list[Tensor], places: list[memory.Result]) -> list[int]:
    """Of all that backward reads: some 40 tensors, twice a call."""
    try:
        found = [tensor._version for tensor in kept]
    except RuntimeError:  # One made under inference_mode has none.
        found = [0 if tensor.is_inference() else tensor._version for tensor in kept]
    return found + [place.version() for place in places]


def _is(tensor: Tensor, known: tuple[weakref.ref[Tensor], int]) -> bool:
    reference, version = known
    return reference() is tensor and version == tensor._version


def _copied(tensor: Tensor, buffer: Tensor | None = None) -> Tensor:
    """Where `tensor` was copied to in this step, which is `buffer` if that is given.

    An argument that all blocks are given (a mask) is copied once.
    """
    step = memory.step()
    known = step.copies.get(id(tensor))
    if known is not None:
        reference, version, place = known
        if _is(tensor, (reference, version)) and (buffer is None or place is buffer):
            return place
    with torch.no_grad():
        dense = _without_repeats(tensor)
        if buffer is None:
            found = torch.empty_strided(
                dense.shape, dense.stride(), dtype=tensor.dtype, device=tensor.device
            )
            buffer = found.expand(tensor.shape)
        _without_repeats(buffer).copy_(dense)
    reference = weakref.ref(tensor)
    step.copies[id(tensor)] = reference, tensor._version, buffer
    step.filled[id(buffer)] = reference, tensor._version
    return buffer


def _without_repeats(tensor: Tensor) -> Tensor:
    """`tensor` before it was expanded: no two of its elements may lie in one place."""
    if 0 not in tensor.stride():
        return tensor.detach()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.detach().as_strided([n if s else min(n, 1) for n, s in pairs], tensor.stride())


def _put(grad: Tensor, place: "Tensor | memory.Result") -> None:
    """`grad` to where backward reads it."""
    if isinstance(place, Tensor):
        place.copy_(grad)
    elif grad.data_ptr() == place.address:
        if grad.stride() != (target := place.tensor()).stride():
            target.copy_(grad.clone())
    elif place.is_free():
        place.tensor().copy_(grad)
    else:
        raise RuntimeError(_HELD)
