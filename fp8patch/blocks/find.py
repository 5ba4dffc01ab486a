"""Where the repeated blocks of a model are: what `compile_blocks` compiles one by one.

A block is a child of a `ModuleList` or `Sequential` that holds two or more children of its class,
each with converted modules below it (or Linears, in a model without any); where there is none, the
only child of a `ModuleList`. Of nested repetitions
the inner one counts (Swin: stages of blocks), unless it holds only a small part of what the outer
one does (a list of adapters inside a layer).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Block", "find_blocks", "is_sharded", "structure", "variants"]

# Of the weights in an outer block; less, and the inner repetition is a detail of it.
_MOST = 0.5
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Block:
    """`path` in the model that was searched."""

    path: str
    module: nn.Module


def find_blocks(model: nn.Module) -> list[Block]:
    """Every block of `model`, in the order of its modules; each module once."""
    converted = any(_is_converted(module) for module in model.modules())
    wanted = _is_converted if converted else _is_linear
    blocks = _blocks_below(model, "", wanted) or list(_only_children(model, wanted))
    first: dict[int, Block] = {}
    for block in blocks:  # a layer that is shared has several paths
        first.setdefault(id(block.module), block)
    return list(first.values())


def _is_converted(module: nn.Module) -> bool:
    return hasattr(type(module), "_fp8_base")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _blocks_below(module: nn.Module, path: str, wanted: Any) -> list[Block]:
    repeated = {id(child) for child in _repeated(module, wanted)}
    found: list[Block] = []
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        inner = _blocks_below(child, where, wanted)
        if id(child) in repeated:
            inside = sum(_weights(block.module, wanted) for block in inner)
            if not inner or inside < _MOST * _weights(child, wanted):
                inner = [Block(where, child)]
        found += inner
    return found


def _repeated(module: nn.Module, wanted: Any) -> Iterator[nn.Module]:
    """The children of a container that are of one class with another one."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return
    of_class: dict[type, list[nn.Module]] = {}
    for child in module.children():
        of_class.setdefault(type(child), []).append(child)
    for children in of_class.values():
        # A Linear among Linears is a layer of an MLP; what makes a block is what is around it.
        holding = [c for c in children if not wanted(c) and any(map(wanted, c.modules()))]
        if len(holding) > 1:
            yield from holding


def _only_children(model: nn.Module, wanted: Any) -> Iterator[Block]:
    """What is alone in a list, and more than one layer; of lists in lists, the outermost."""
    inside: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            # (Each once: a list may hold one layer several times.)
            children = list(module.named_children())
            if len(children) != 1:
                continue
            ((name, child),) = children
            if sum(map(wanted, child.modules())) > 1:
                inside.update(map(id, child.modules()))
                yield Block(f"{path}.{name}" if path else name, child)


def _weights(module: nn.Module, wanted: Any) -> int:
    parts = (part for part in module.modules() if wanted(part))
    weights: Iterator[Any] = (getattr(part, "weight", None) for part in parts)
    return sum(weight.numel() for weight in weights if weight is not None)


def structure(block: nn.Module) -> tuple[Any, ...]:
    """What two blocks must share to be served by one compiled graph: classes and weights."""
    return tuple(
        (
            path,
            type(module),
            tuple(
                (name, tuple(p.shape), p.dtype, p.requires_grad)
                for name, p in module._parameters.items()
                if p is not None
            ),
        )
        for path, module in block.named_modules()
    )


def variants(blocks: list[nn.Module]) -> int:
    """How many kinds there are among blocks of one structure: by numbers and flags on the modules.

    Swin shifts the windows of every second block; Gemma looks far in every sixth. What is another
    in each block (`layer_idx`) makes no kind: it is a name.
    """
    if len(blocks) < 2:
        return len(blocks)
    described = [_scalars(block) for block in blocks]
    names = {
        key for key in described[0]
        if len({d.get(key) for d in described}) < len(blocks) or len(blocks) == 2
    }  # fmt: skip
    return len({tuple(sorted((k, repr(d.get(k))) for k in names)) for d in described})


def _scalars(block: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}": value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _SCALARS) and not name.startswith("_fp8_")
    }


def is_sharded(model: nn.Module) -> bool:
    """Has FSDP taken modules of it, or wrapped it? Then weights move from step to step."""
    return any(type(module).__name__.startswith(("FSDP", "Fully")) for module in model.modules())
