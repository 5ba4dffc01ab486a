"""`compile_blocks`: compile the repeated blocks of a model, each on its own, for training.

Blocks and not the model: one graph serves all of one structure, so that it compiles in seconds, and
what is between the blocks (an embedding, a loss, a script's own Python) may do as it likes.
"""

import importlib
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from fp8patch import messages
from fp8patch.blocks.calls import Caller, takes_cache, unwatch, watch
from fp8patch.blocks.find import Block, find_blocks, structure, variants
from fp8patch.blocks.graphs import Graphs
from fp8patch.blocks.places import Places
from fp8patch.blocks.run import BlockCall, Structure
from fp8patch.errors import Fp8PatchError

__all__ = ["CompiledBlocks", "compile_blocks"]

_compiled: "weakref.WeakKeyDictionary[nn.Module, CompiledBlocks]" = weakref.WeakKeyDictionary()


def compile_blocks(
    model: nn.Module, *, cuda_graphs: bool = False, backend: str | Callable[..., Any] = "inductor"
) -> "CompiledBlocks":
    """Compile the repeated blocks of `model` for training, in place.

    Nothing is compiled here: that happens in the second training step (the first one is watched),
    and once more when a batch has other shapes. Forwards without gradients (evaluation, `generate`)
    run eagerly as before. Training forwards of Hugging Face models run with `use_cache=False`
    unless they are given the argument. A block that can't be compiled is left eager, and named.

    Call it when the model is loaded and converted; wrap it (DDP) before or after. Not needed for
    FP8: without converted modules it compiles the blocks that hold Linears.

    Args:
        cuda_graphs: Replay each block as a CUDA graph, where the model is on a GPU.
        backend: What `torch.compile` calls a backend.

    Returns:
        What was found; its `undo()` gives the model back as it was.

    Raises:
        Fp8PatchError: `model` is no `nn.Module`.

    With CUDA graphs, `backward` raises RuntimeError where it would read or write memory that is in
    use again: through a forward for a second time, in another order than before, or where somebody
    holds what it writes. (And once, where it can't be recorded.)
    """
    if not isinstance(model, nn.Module):
        raise Fp8PatchError(
            f"compile_blocks takes a torch.nn.Module, not {type(model).__name__} ({model!r:.60})."
        )
    # A converted root prepares for compiled blocks where the compiler is loaded.
    importlib.import_module("torch._dynamo")

    known = _compiled.get(model)
    if known is not None:
        known.undo()
    found = CompiledBlocks(model, find_blocks(model), cuda_graphs, backend)
    if not found.names:
        messages.note(
            f"{type(model).__name__}: nothing to compile, it has no list of blocks with the "
            "same class, nor one with a single layer."
        )
    _compiled[model] = found
    return found


class CompiledBlocks:
    """The blocks of one model.

    Attributes:
        names: Paths of the blocks.
        structures: {name of a structure: how many blocks it has}; each is compiled by itself.
        cuda_graphs: CUDA graphs were asked for.
        without_cache: Training forwards run with `use_cache=False`.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        cuda_graphs: bool,
        backend: str | Callable[..., Any],
    ) -> None:
        self.cuda_graphs = cuda_graphs
        self._calls: list[tuple[weakref.ref[nn.Module], BlockCall]] = []
        self._taken: dict[str, str] = {}
        self._parts: list[weakref.ref[nn.Module]] = []
        self._graphs = graphs = Graphs(model) if cuda_graphs else None
        places = Places()
        caller = Caller(graphs, places)
        wrote = None if graphs is None else graphs.wrote
        groups: dict[Any, list[Block]] = {}
        for block in blocks:
            if block.module._compiled_call_impl is not None:
                self._taken[block.path] = "compiled already, by somebody else"
            else:
                groups.setdefault(structure(block.module), []).append(block)
        for group in groups.values():
            places.add([block.module for block in group])
            kinds = variants([block.module for block in group])
            shared = Structure(_name(group), backend, kinds, cuda_graphs)
            if graphs is not None:
                graphs.structures.append(shared)
            for block in group:
                call = BlockCall(block.path, block.module, shared, caller.mode, wrote)
                block.module.__dict__["_compiled_call_impl"] = call
                self._calls.append((weakref.ref(block.module), call))
        self.names = tuple(call.path for _, call in self._calls)
        self.structures = {_name(group): len(group) for group in groups.values()}
        parts = _around(model, [block.module for group in groups.values() for block in group])
        self.without_cache = any(map(takes_cache, parts))
        for part in parts:
            watch(part, caller)
            self._parts.append(weakref.ref(part))
        self._banks: weakref.WeakSet[Any] = weakref.WeakSet()
        if not self._taken and not _compiled_elsewhere(model, self._calls):
            found = {id(bank): bank for m in model.modules() if (bank := _bank(m)) is not None}
            for bank in found.values():
                bank.late.wanted = True
                self._banks.add(bank)

    def __repr__(self) -> str:
        found = [f"{name}: {count}" for name, count in self.structures.items()]
        left = [f"{name} left eager: {why}" for name, why in self.left.items()]
        return f"CompiledBlocks({'; '.join([*found, *left]) or 'no blocks'})"

    @property
    def ran_graphs(self) -> bool:
        """Did a training forward run as CUDA graphs, by now? Not on a CPU, nor under FSDP."""
        return self._graphs is not None and self._graphs.used

    @property
    def compiled(self) -> dict[str, int]:
        """{name of a structure: blocks that run compiled, the first shapes at least}."""
        found: dict[str, int] = {}
        for _, call in self._calls:
            failed = any(not dynamic for dynamic in call.structure.failed)
            if call.left is None and not failed:
                found[call.structure.name] = found.get(call.structure.name, 0) + 1
        return found

    @property
    def left(self) -> dict[str, str]:
        """{path of a block, or name of a structure: why it is left eager}, by now."""
        found = dict(self._taken)
        for _, call in self._calls:
            if call.left is not None:
                found[call.path] = call.left
            for why in call.structure.failed.values():
                found[call.structure.name] = why
        return found

    def undo(self) -> None:
        """Give the blocks back as they were."""
        for reference, call in self._calls:
            block = reference()
            if block is not None and block.__dict__.get("_compiled_call_impl") is call:
                block.__dict__["_compiled_call_impl"] = None
        for part in self._parts:
            module = part()
            if module is not None:
                unwatch(module)
        for bank in self._banks:
            bank.late.wanted = False
        if self._graphs is not None:
            self._graphs.end()
        self._calls, self._parts, self.names, self.structures = [], [], (), {}


def _bank(module: nn.Module) -> Any:
    return getattr(module, "_fp8_bank", None)


def _compiled_elsewhere(model: nn.Module, calls: list[Any]) -> bool:
    """Is something else in it compiled, which would read weights that nobody has asked for?"""
    ours = [reference() for reference, _ in calls]
    compiled = [m for m in model.modules() if m._compiled_call_impl is not None]
    return any(all(module is not block for block in ours) for module in compiled)


def _name(group: list[Block]) -> str:
    first, last = group[0], group[-1]
    where = first.path if first is last else f"{first.path} to {last.path}"
    return f"{where} ({type(first.module).__name__})"


def _around(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """The modules that hold blocks, and that can be called."""
    wanted = {id(block) for block in blocks}
    found: list[nn.Module] = []

    def holds(module: nn.Module) -> bool:
        below = [id(child) in wanted or holds(child) for child in module.children()]
        if any(below) and type(module) is not nn.ModuleList:
            found.append(module)
        return any(below)

    holds(model)
    return found
