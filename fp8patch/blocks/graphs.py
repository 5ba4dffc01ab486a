"""CUDA graphs: when a training forward may replay them.

A graph writes the same memory at every replay: what a block returned, what it saved for backward,
and the gradients, which autograd takes as they are for a parameter that has none. So a step begins
only when nothing of the last one is held any more:

- gradients that are still somebody's `.grad` (accumulation) are copied out, once a step;
- what the model returns is copied out where a graph wrote it (returned hidden states);
- while a forward waits for its backward (a GAN's, two views of one batch), and while the script
  keeps gradients or what a hook was given, other forwards run compiled but without graphs.
"""

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch import messages, regions
from fp8patch.backward import differentiable
from fp8patch.blocks import memory
from fp8patch.blocks.find import is_sharded
from fp8patch.blocks.run import COMPILED, EAGER, GRAPHS, Mode, Structure
from fp8patch.modules.base import Float8Module
from fp8patch.modules.gemms import Quantized
from fp8patch.ops.quantize import is_cold, preserved_version
from fp8patch.structures import map_tensors, tensors_in

__all__ = ["Graphs"]

# All models share the memory.
_all: "weakref.WeakSet[Graphs]" = weakref.WeakSet()


class _Forward:
    """One that ran as graphs; dies with what autograd keeps of it."""

    backward_begun = False


@dataclass(slots=True)
class _Step:
    """What has run since the memory was last given free.

    Attributes:
        nodes: What autograd knows the graphs' forwards by; they hold what is saved for backward.
        forwards: Those of whole models.
    """

    nodes: list[weakref.ref[Any]] = field(default_factory=list)
    forwards: list[weakref.ref[_Forward]] = field(default_factory=list)

    def waits(self) -> bool:
        """Is there a backward to come?"""
        forwards = (reference() for reference in self.forwards)
        if any(forward is not None and not forward.backward_begun for forward in forwards):
            return True
        return any(not _is_freed(reference()) for reference in self.nodes)


_step = _Step()

# What autograd calls the backward of a compiled block, and of a replayed one.
_NODES = ("CompiledFunctionBackward", "_ReplayBackward")


class Graphs:
    """The CUDA graphs of one model's blocks.

    Attributes:
        structures: What they are recorded of.
        used: A block has run as a graph, by now.
    """

    def __init__(self, model: nn.Module) -> None:
        self.structures: list[Structure] = []
        self.used = False
        self._model = weakref.ref(model)
        self._modules: list[weakref.ref[Any]] = []
        self._weights: weakref.WeakKeyDictionary[Any, Quantized] = weakref.WeakKeyDictionary()
        self._cold: set[int] | None = None
        self._sharded: bool | None = None
        _all.add(self)

    def begin(self) -> Mode:
        """An outermost training forward begins: how may it run?"""
        model = self._model()
        if model is None or not _on_gpu(model):
            messages.once("no GPU for graphs", "the model is on no GPU: compiled, no CUDA graphs.")
            return COMPILED
        if self._sharded is None:
            self._sharded = is_sharded(model)
        if self._sharded:
            messages.once(
                "sharded",
                f"{type(model).__name__} is sharded (FSDP), and its weights lie elsewhere in every "
                "step: compiled, without CUDA graphs.",
            )
            return COMPILED
        modules = self._converted(model)
        if not self._scales_stand(modules):
            return EAGER
        self._keep_addresses(modules)
        global _step
        waits = _step.waits()
        if not waits:
            memory.abandon()
        if waits or ((alive := memory.alive()) and not _rescue_gradients(alive)):
            messages.once(
                "graphs are in use",
                "a training forward began while another one waited for its backward, or while its "
                "gradients were kept: such forwards run compiled, but without CUDA graphs.",
            )
            return COMPILED
        _step = _Step()
        memory.begin()
        return GRAPHS

    def _converted(self, model: nn.Module) -> list[Any]:
        if regions.state.region is None:
            return []  # no FP8
        if not self._modules:  # found once: walking a model takes its time
            found = (m for m in model.modules() if isinstance(m, Float8Module))
            self._modules = [weakref.ref(module) for module in found]
        modules = (reference() for reference in self._modules)
        return [m for m in modules if m is not None and vars(m).get("_fp8_weight_q") is not None]

    def _scales_stand(self, modules: list[Any]) -> bool:
        """Are the slots as they were when the graphs were recorded: set, or never used?

        One that was forgotten (other weights were loaded) has to be seen eagerly first. One that
        was used, and has been set since, was recorded with its first use's look at the tensor.
        """
        cold = {
            slot.scale.data_ptr()
            for module in modules
            for slot in (module._fp8_input_slot, module._fp8_grad_slot)
            if is_cold(slot.scale)
        }
        before = cold if self._cold is None else self._cold
        if cold - before:
            return False
        if before - cold:
            for structure in self.structures:
                structure.renew()
        self._cold = cold
        return True

    def _keep_addresses(self, modules: list[Any]) -> None:
        """A graph reads a quantised weight where it lay when it was recorded.

        A weight that nobody announces changes of (a frozen one, that an adapter may be merged into)
        is quantised into new memory for every forward.
        """
        for module in modules:
            new: Quantized = module._fp8_weight_q
            kept = self._weights.get(module)
            if kept is new:
                continue
            if kept is None or [(t.shape, t.device) for t in kept] != [
                (t.shape, t.device) for t in new
            ]:
                self._weights[module] = new
                continue
            # A backward that is to come has saved these; what it finds is what it saved, unless
            # the weight has changed in between.
            with torch.no_grad(), preserved_version(*kept):
                for target, source in zip(kept, new, strict=True):
                    target.copy_(source)
            module._fp8_weight_q = kept

    def wrote(self, output: Any) -> None:
        """A block that may run as a graph has returned `output`."""
        self.used = self.used or memory.step().calls > 0
        for tensor in tensors_in(output):
            node = _compiled_node(tensor.grad_fn)
            if node is not None:
                _step.nodes.append(weakref.ref(node))

    def finish(self, output: Any) -> Any:
        """What the model returns, without memory of the graphs."""
        memory.end_forward()
        forward = _Forward()
        begun = functools.partial(_backward_begins, forward)
        for tensor in differentiable(output):
            tensor.register_hook(begun)
        _step.forwards.append(weakref.ref(forward))
        return map_tensors(output, memory.owned)

    def end(self) -> None:
        """No forward is to come."""
        if not _step.waits():
            memory.let_go()

    def parameters(self) -> Iterator[nn.Parameter]:
        model = self._model()
        if model is not None:
            yield from model.parameters()


def _on_gpu(model: nn.Module) -> bool:
    parameter = next(model.parameters(), None)
    return parameter is not None and parameter.is_cuda


def _backward_begins(forward: _Forward, gradient: Tensor) -> None:
    forward.backward_begun = True


def _compiled_node(node: Any) -> Any:
    """The backward node of a compiled function, below the views that its outputs may be."""
    for _ in range(4):
        if node is None or type(node).__name__ in _NODES:
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _is_freed(node: Any) -> bool:
    """Did backward run through it, and give free what was saved?"""
    if node is None or getattr(node, "replayed", False):
        return True
    try:
        return node.saved_tensors is None
    except RuntimeError as error:
        return "second time" in str(error)


def _rescue_gradients(alive: set[int]) -> bool:
    """Copy gradients out of the graphs' memory; returns whether nothing else is alive there.

    One that somebody has a view of stays: the view would not follow.
    """
    movable = alive - memory.viewed()
    _copy_out([p for graphs in list(_all) for p in graphs.parameters() if _is_inside(p, movable)])
    return not memory.alive()


def _is_inside(parameter: Tensor, alive: set[int]) -> bool:
    gradient = parameter.grad
    if gradient is None or type(gradient) is not Tensor:
        return False
    return gradient.layout is torch.strided and gradient.untyped_storage().data_ptr() in alive


def _copy_out(parameters: list[nn.Parameter]) -> None:
    if not parameters:
        return
    gradients: Any = [parameter.grad for parameter in parameters]
    copies = [torch.empty_like(gradient) for gradient in gradients]
    torch._foreach_copy_(copies, gradients)
    # The objects stay: a script may have kept them in a list.
    for gradient, copy in zip(gradients, copies, strict=True):
        gradient.data = copy
