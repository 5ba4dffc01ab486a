"""One block's training forward: which graph runs it, and what happens where there can't be one.

Each structure (blocks that one graph can serve) is compiled twice at most: for the first shapes
that it meets, and once for all others. Left to itself, Dynamo makes a graph for each dimension that
starts to move: a new length, then a smaller last batch.

Everything is compiled with `fullgraph=True`. A block that can't be is then known before anything of
it has run, and runs eagerly as a whole, by name; a graph break inside would leave it slower than
either, in silence.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from fp8patch import messages, regions
from fp8patch.blocks import compiling, memory
from fp8patch.blocks.replay import Replayed, arguments_of
from fp8patch.modules.base import Float8Module
from fp8patch.modules.weights import prepare
from fp8patch.structures import map_tensors

__all__ = ["COMPILED", "EAGER", "GRAPHS", "BlockCall", "Mode", "Structure"]

Mode = Literal["eager", "compiled", "graphs"]
EAGER: Mode = "eager"
COMPILED: Mode = "compiled"
GRAPHS: Mode = "graphs"

# Graphs are recorded anew for every shape; beyond so many a structure, shapes run without.
_MOST_SHAPES = 8
# Graphs for one kind of block: static and dynamic, each with an attention mask and without.
_GRAPHS_A_VARIANT = 4
# A block's calls that can't be compiled, beside others that were, until it is left eager.
_MOST_ODD_CALLS = 4


class Structure:
    """Blocks that one compiled graph can serve.

    Attributes:
        name: What messages call it: "model.layers.0 to model.layers.11 (LlamaDecoderLayer)".
        first: What the static graphs are for: {number of dimensions of each tensor: its shapes}.
        failed: {dynamic: why} of what can't be compiled.
    """

    def __init__(
        self, name: str, backend: str | Callable[..., Any], variants: int, graphs: bool = False
    ) -> None:
        self.name = name
        self.first: dict[tuple[int, ...], tuple[torch.Size, ...]] = {}
        self.failed: dict[bool, str] = {}
        # `dynamic` of what has run compiled.
        self.worked: set[bool] = set()
        self._backend = self._with_graphs if graphs and backend == "inductor" else backend
        self._limit = _GRAPHS_A_VARIANT * variants
        self._compiled: dict[bool, Callable[..., Any]] = {}
        # What CUDA graphs are recorded of; empty where none were asked for.
        self._replayed: list[Replayed] = []
        self._shapes: set[tuple[torch.Size, ...]] = set()

    def choose(self, shapes: tuple[torch.Size, ...], graphs: bool) -> tuple[bool, bool]:
        """(dynamic, graphs) for a call with tensors of these shapes."""
        # With a mask and without are graphs of their own, each with its first shapes.
        form = tuple(len(shape) for shape in shapes)
        dynamic = self.first.setdefault(form, shapes) != shapes
        if graphs and dynamic and shapes not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                messages.once(
                    f"shapes {self.name}",
                    f"{self.name}: more than {_MOST_SHAPES} shapes, so further ones run compiled "
                    "but without a CUDA graph: pad batches to a few lengths.",
                )
                return True, False
            self._shapes.add(shapes)
        return dynamic, graphs

    def compiled(self, dynamic: bool) -> Callable[..., Any]:
        """A function of (block, args, kwargs)."""
        function = self._compiled.get(dynamic)
        if function is None:
            function = self._compiled[dynamic] = compiling.compile_forward(
                dynamic, self._backend, self._limit
            )
        return function

    def _with_graphs(self, graph: Any, inputs: Any) -> Replayed:
        """Inductor, as `torch.compile` calls a backend; what it makes can run as CUDA graphs."""
        compiled = compiling.inductor(graph, inputs, keep_less=False)
        replayed = Replayed(compiled, self.name)
        self._replayed.append(replayed)
        return replayed

    def renew(self) -> None:
        """Record CUDA graphs anew."""
        for replayed in self._replayed:
            replayed.forget()


class BlockCall:
    """What `block(...)` calls. It stands in the block's `_compiled_call_impl`, which copies and
    pickles leave out."""

    def __init__(
        self,
        path: str,
        block: nn.Module,
        structure: Structure,
        mode: Callable[[], Mode],
        wrote: Callable[[Any], None] | None,
    ) -> None:
        self.path = path
        self.structure = structure
        self.left: str | None = None
        self._block = weakref.ref(block)
        self._mode = mode
        self._odd_calls = 0
        self._wrote = wrote
        # Its modules whose weights are whole in a forward only, after the block's hooks (FSDP): a
        # graph can't quantise them.
        self._gathered: list[nn.Module] | None = None
        self._through_hooks = (
            functools.partial(self._forward, False),
            self._for_hooks,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block: Any = self._block()
        mode = self._mode()
        if mode is EAGER or self.left is not None:
            return block._call_impl(*args, **kwargs)
        if "forward" in block.__dict__:
            self._leave("another forward was set on the instance (a hook of accelerate's?)")
            return block._call_impl(*args, **kwargs)
        graphs = mode is GRAPHS and not (_saved_through_hooks() or _anomalies_are_sought())
        if not _hooked(block):
            return self._forward(graphs, *args, **kwargs)
        # Hooks on the block itself (FSDP's, or those that collect outputs) run as they are, around
        # the compiled forward, and may keep what they are given.
        if graphs:
            args, kwargs = map_tensors((args, kwargs), memory.owned)
        block.__dict__["forward"] = self._through_hooks[graphs]
        try:
            return block._call_impl(*args, **kwargs)
        finally:
            block.__dict__.pop("forward", None)

    def _forward(self, graphs: bool, /, *args: Any, **kwargs: Any) -> Any:
        gathered: list[Any] = [] if regions.active() is None else self._modules_gathered()
        for module in gathered:
            prepare(module, observe=True)
            module._fp8_weight_state.ahead = True
        try:
            return self._compiled_or_not(graphs, args, kwargs)
        finally:
            for module in gathered:
                module._fp8_weight_state.ahead = False

    def _for_hooks(self, /, *args: Any, **kwargs: Any) -> Any:
        return map_tensors(self._forward(True, *args, **kwargs), torch.Tensor.clone)

    def _modules_gathered(self) -> list[nn.Module]:
        if self._gathered is None:
            block: Any = self._block()
            self._gathered = [m for m in block.modules() if _is_gathered(m)]
        return self._gathered

    def _compiled_or_not(self, graphs: bool, args: Any, kwargs: Any) -> Any:
        block: Any = self._block()
        structure = self.structure
        dynamic, graphs = structure.choose(_shapes(args, kwargs), graphs)
        failure: Exception | None = None
        if dynamic not in structure.failed:
            try:
                with arguments_of((args, kwargs) if graphs else None):
                    output = structure.compiled(dynamic)(block, args, kwargs)
            except _failures() as error:
                # Raised while compiling, before anything has run.
                failure = error
            except RuntimeError as error:
                if "no compiled frames" not in str(error):
                    raise
                self._leave("there is nothing in it to compile")
            else:
                structure.worked.add(dynamic)
                if graphs and self._wrote is not None:
                    self._wrote(output)
                return output
        output = type(block).forward(block, *args, **kwargs)
        # Not where this raised as well: that is the model's own doing, and the next call may not.
        if failure is not None:
            self._give_up(dynamic, failure)
        return output

    def _give_up(self, dynamic: bool, error: Exception) -> None:
        if type(error).__name__ == "FailOnRecompileLimitHit":
            self._leave("too many graphs: something in it changes from call to call")
            return
        why = compiling.reason(error)
        if "ContextVar" in str(error):
            why += " (a hook that collects hidden states or attentions?)"
        structure = self.structure
        self._odd_calls += 1
        if dynamic in structure.worked and self._odd_calls < _MOST_ODD_CALLS:
            # What was compiled for other calls may serve the next one.
            messages.once(
                f"odd call {structure.name}",
                f"{structure.name}: a call ran eagerly, it can't be compiled: {why}.",
            )
            return
        which = " for shapes other than the first" if dynamic else ""
        if why in structure.failed.values():
            messages.warn(f"{structure.name}: left eager{which} as well.")
        else:
            messages.warn(f"{structure.name}: left eager{which}, it can't be compiled: {why}.")
        structure.failed[dynamic] = why

    def _leave(self, why: str) -> None:
        self.left = why
        messages.warn(f"{self.path}: left eager, {why}.")


@functools.cache
def _failures() -> tuple[type[Exception], ...]:
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def _is_gathered(module: Any) -> bool:
    return isinstance(module, Float8Module) and module._fp8_weight_state.gathered


def _saved_through_hooks() -> bool:
    """Does something else keep what is saved for backward (checkpointing, offloading)?

    Checkpointing drops it, and the memory that a graph was recorded to read is gone at its replay.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return False
    messages.once(
        "saved through hooks",
        "what blocks save for backward goes through hooks (checkpointing that is not reentrant, "
        "offloading): such blocks run compiled, but without CUDA graphs.",
    )
    return True


def _anomalies_are_sought() -> bool:
    """Then autograd reads every gradient back, which a graph can't be recorded of."""
    if not torch.is_anomaly_enabled():
        return False
    messages.once(
        "anomalies", "anomaly detection is on: blocks run compiled, but without CUDA graphs."
    )
    return True


def _hooked(block: Any) -> bool:
    return bool(
        block._forward_hooks
        or block._forward_pre_hooks
        or block._backward_hooks
        or block._backward_pre_hooks
    )


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Size, ...]:
    values = (*args, *kwargs.values())
    return tuple(value.shape for value in values if isinstance(value, torch.Tensor))
