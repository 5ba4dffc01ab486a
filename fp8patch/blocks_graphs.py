"""CUDA graphs: when the memory of the last step may be used again.

A graph writes the same memory at every replay: what a block returned, what it saved for backward,
and the gradients, which autograd takes as they are for a parameter that has none. PyTorch's graph
trees know what of it is still alive while they *record*, but at a *replay* of a new step
(`cudagraph_mark_step_begin`) they overwrite whatever it is, and the second micro-batch would add
its gradients to themselves (pytorch#96693, #169545). So a step begins here only when nothing is
alive any more:

- gradients that are still somebody's `.grad` (accumulation) are copied out, once a step;
- what the model returns is copied out where a graph wrote it (returned hidden states);
- whatever else is alive (a forward whose backward is to come, as in a GAN; gradients that the
  script keeps in a list) leaves the step open: the trees then go on after what is there. Where that
  does not end, forwards run eagerly.
"""

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch import messages
from fp8patch.blocks_run import COMPILED, EAGER, GRAPHS, Mode, Structure
from fp8patch.modules.base import Float8Module
from fp8patch.modules.gemms import Quantized
from fp8patch.ops.quantize import is_cold, preserved_version
from fp8patch.structures import map_tensors, tensors_in

__all__ = ["Graphs"]

# Forwards after another that may pile up before backward.
_MOST_OPEN = 4

# All models share the memory.
_all: "weakref.WeakSet[Graphs]" = weakref.WeakSet()
_open = 0


class Graphs:
    """The CUDA graphs of one model's blocks; `structures` are what they are recorded of."""

    def __init__(self, model: nn.Module) -> None:
        self.structures: list[Structure] = []
        self._model = weakref.ref(model)
        self._modules: list[weakref.ref[Any]] = []
        self._weights: weakref.WeakKeyDictionary[Any, Quantized] = weakref.WeakKeyDictionary()
        self._written: set[int] = set()
        self._cold: set[int] | None = None
        _all.add(self)

    def begin(self) -> Mode:
        """An outermost training forward begins: how may it run?"""
        global _open
        self._written.clear()
        model = self._model()
        if model is None or not _on_gpu(model):
            messages.once("no GPU for graphs", "the model is on no GPU: compiled, no CUDA graphs.")
            return COMPILED
        modules = self._converted(model)
        if not self._scales_stand(modules):
            return EAGER
        self._keep_addresses(modules)
        if (alive := _alive()) and not _rescue_gradients(alive):
            _open += 1
            if _open < _MOST_OPEN:
                return GRAPHS
            messages.once(
                "graphs stay open",
                f"{_MOST_OPEN} training forwards in a row had outputs or gradients of CUDA graphs "
                "still in use when they began: such forwards run eagerly (is this an evaluation "
                "without torch.no_grad()?).",
            )
            return EAGER
        _open = 0
        torch.compiler.cudagraph_mark_step_begin()
        return GRAPHS

    def _converted(self, model: nn.Module) -> list[Any]:
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
        """A block that ran as a graph has returned `output`."""
        self._written.update(t.untyped_storage().data_ptr() for t in tensors_in(output))

    def finish(self, output: Any) -> Any:
        """What the model returns, without memory of the graphs."""
        written = self._written

        def copied(tensor: Tensor) -> Tensor:
            strided = type(tensor) is Tensor and tensor.layout is torch.strided
            inside = strided and tensor.untyped_storage().data_ptr() in written
            return tensor.clone() if inside else tensor

        return map_tensors(output, copied) if written else output

    def parameters(self) -> Iterator[nn.Parameter]:
        model = self._model()
        if model is not None:
            yield from model.parameters()


def _on_gpu(model: nn.Module) -> bool:
    parameter = next(model.parameters(), None)
    return parameter is not None and parameter.is_cuda


def _alive() -> set[int]:
    """Addresses of what the graphs of the last step have written, and somebody still holds."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return set()
    containers = trees.get_obj(trees.local, "tree_manager_containers")
    managers = [container.tree_manager for container in containers.values()]
    nodes = [m.current_node for m in managers if m is not None and m.current_node is not None]
    return {ref.data_ptr() for node in nodes for ref in node.path_live_weakrefs()}


def _rescue_gradients(alive: set[int]) -> bool:
    """Copy gradients out of the graphs' memory; returns whether nothing else is alive there."""
    _copy_out([p for graphs in list(_all) for p in graphs.parameters() if _is_inside(p, alive)])
    return not _alive()


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
    for parameter, copy in zip(parameters, copies, strict=True):
        parameter.grad = copy
