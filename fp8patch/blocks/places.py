"""Slots of a block as three inputs of its graph, instead of three for each slot.

Every tensor that a graph takes costs time at each call: it is guarded, unwrapped, handed to
autograd and saved. The rows of a block's modules lie next to each other in the bank, so the block
takes those rows, and a slot is a view of them that is made inside the graph, for nothing.

One graph serves all blocks of a structure, so a module is in the same place in each of them, or is
left as it is. (In a decoder, all layers' cross-attention reads one tensor: the slot of its input is
in the rows of the first layer.)
"""

import weakref
from typing import Any

from torch import nn

from fp8patch.modules.base import Float8Module
from fp8patch.scaling import Bank
from fp8patch.slots import Place

__all__ = ["Places"]


class Places:
    """Of the blocks of one `compile_blocks`, which are in groups of one structure."""

    def __init__(self) -> None:
        self._groups: list[list[weakref.ref[nn.Module]]] = []
        # Banks, and how often they had handed out slots.
        self._seen: list[tuple[weakref.ref[Bank], int]] | None = None

    def add(self, blocks: list[nn.Module]) -> None:
        """These have one structure."""
        self._groups.append([weakref.ref(block) for block in blocks])

    def refresh(self) -> None:
        """Where slots were handed out since the last time, find the places again."""
        if self._seen is not None and all(map(_as_seen, self._seen)):
            return
        banks: set[Bank] = set()
        for group in self._groups:
            alive = [block for reference in group if (block := reference()) is not None]
            blocks = [_modules(block) for block in alive]
            banks.update(module._fp8_bank for modules in blocks for module in modules.values())
            _place(blocks)
        self._seen = [(weakref.ref(bank), bank.layout) for bank in banks]


def _as_seen(seen: tuple[weakref.ref[Bank], int]) -> bool:
    reference, layout = seen
    bank = reference()
    return bank is not None and bank.layout == layout


def _modules(block: nn.Module) -> dict[str, Any]:
    found = block.named_modules()
    return {path: module for path, module in found if isinstance(module, Float8Module)}


def _place(blocks: list[dict[str, Any]]) -> None:
    spans = [_span(modules) for modules in blocks]
    sizes = {None if span is None else span[1] - span[0] for span in spans}
    agreed: set[str] = set()
    if blocks and len(sizes) == 1 and None not in sizes:
        found = [_within(*pair) for pair in zip(blocks, spans, strict=True)]
        agreed = {path for path, at in found[0].items() if all(f.get(path) == at for f in found)}
    for modules, span in zip(blocks, spans, strict=True):
        rows = None
        for path, module in modules.items():
            module._fp8_place = None
            if path in agreed and span is not None:
                start, stop = span
                rows = rows or module._fp8_bank.rows_on(module._fp8_device, start, stop)
                _, input, grad = module._fp8_bank.rows_of(module)
                module._fp8_place = Place(rows, input - start, grad - start)


def _span(modules: dict[str, Any]) -> tuple[int, int] | None:
    """The rows of a block's modules; None where they are not in one bank, on one device."""
    homes = {(id(module._fp8_bank), module._fp8_device) for module in modules.values()}
    if len(homes) != 1 or any(module._fp8_device is None for module in modules.values()):
        return None
    firsts = [module._fp8_bank.rows_of(module)[0] for module in modules.values()]
    return min(firsts), max(firsts) + 3


def _within(modules: dict[str, Any], span: tuple[int, int] | None) -> dict[str, tuple[int, int]]:
    """{path of a module: (row of its input, row of its grad_output)}, counted from the first."""
    assert span is not None
    start, stop = span
    found = {}
    for path, module in modules.items():
        _, input, grad = module._fp8_bank.rows_of(module)
        if start <= input < stop:
            found[path] = input - start, grad - start
    return found
