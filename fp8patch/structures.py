"""The tensors in what a model returns, replaced."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change(tensor)` for each of its tensors, in a structure of the same type.

    What is no tensor, dict, tuple, list or dataclass (a cache) is passed on as it is, and so is a
    structure in which nothing changes (`change` returns the same object). No structure of the
    model's is written to.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _changed_mapping(value, change)
    if isinstance(value, tuple | list):
        new = [map_tensors(item, change) for item in value]
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*new)
        return type(value)(new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((k, v, map_tensors(v, change)) for k, v in _attributes(value))
        changes = {k: new for k, v, new in pairs if new is not v}
        if not changes:
            return value
        other = copy.copy(value)
        for name, new in changes.items():
            object.__setattr__(other, name, new)  # frozen ones too
        return other
    return value


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Of a dataclass; with slots it has no `__dict__`."""
    if hasattr(value, "__dict__"):
        return list(vars(value).items())
    names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _changed_mapping(value: Mapping[Any, Any], change: Callable[[Tensor], Tensor]) -> Any:
    pairs = ((k, v, map_tensors(v, change)) for k, v in value.items())
    changes = {k: new for k, v, new in pairs if new is not v}
    if not changes:
        return value
    # A copy and not type(value)(...): transformers' outputs are dicts and dataclasses in one, whose
    # keys and attributes follow each other.
    other: Any = copy.copy(value)
    for key, new in changes.items():
        other[key] = new
    return other


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a structure of tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for _, item in _attributes(value):
            yield from tensors_in(item)
