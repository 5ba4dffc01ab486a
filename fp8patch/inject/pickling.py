"""`torch.save(model)` under `fp8patch train`: a pickle of the stock model, as without us.

A whole model, or a dict with one in it, is pickled by its classes' names. Ours must not be among
them: the script, or plain PyTorch on another machine, loads the file by the classes that it knows.
The model itself is not touched (a thread may save while it trains): the pickler writes stand-ins,
which share everything but the class and what we have put on it.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["install", "remove"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOK_FLAGS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
# How deep in lists and dicts a model is looked for.
_DEPTH = 3

_stock_save: Callable[..., None] = torch.save


class _Pickler(pickle._Pickler):
    """The one written in Python: the other can't write one object in the place of another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stand_ins: dict[int, nn.Module] = {}

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        if isinstance(obj, nn.Module) and _is_ours(obj):
            if id(obj) not in self._stand_ins:
                self._stand_ins[id(obj)] = _stock(obj)
            obj = self._stand_ins[id(obj)]
        return super().save(obj, save_persistent_id)  # type: ignore[misc]


def _is_ours(module: nn.Module) -> bool:
    return (
        hasattr(type(module), "_fp8_base")
        or any(name.startswith("_fp8_") for name in module.__dict__)
        or any(_our_hook(hook) for name in _HOOKS for hook in module.__dict__[name].values())
    )


def _our_hook(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).split(".")[0] == "fp8patch"


def _stock(module: nn.Module) -> nn.Module:
    """A module of the stock class with the same Parameters, children and hooks of others."""
    cls = getattr(type(module), "_fp8_base", type(module))
    state = {k: v for k, v in module.__dict__.items() if not k.startswith("_fp8_")}
    gone = {key for name in _HOOKS for key, hook in state[name].items() if _our_hook(hook)}
    for name in (*_HOOKS, *_HOOK_FLAGS):
        if name in state:
            left = ((key, value) for key, value in state[name].items() if key not in gone)
            state[name] = OrderedDict(left)
    other: nn.Module = cls.__new__(cls)
    other.__dict__.update(state)
    return other


def _modules_in(value: Any, depth: int = _DEPTH) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif depth and isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(item, depth - 1)


def _module() -> ModuleType:
    """`pickle` with our pickler in it: what `torch.save` takes."""
    module = ModuleType("pickle")
    module.__dict__.update(vars(pickle) | {"Pickler": _Pickler})
    return module


_plain = _module()


def _save(obj: object, f: Any, pickle_module: Any = pickle, *args: Any, **kwargs: Any) -> None:
    """Takes the place of `torch.save`."""
    if pickle_module is pickle and any(
        _is_ours(part) for module in _modules_in(obj) for part in module.modules()
    ):
        pickle_module = _plain
    _stock_save(obj, f, pickle_module, *args, **kwargs)


def install() -> None:
    """Have `torch.save` write stock models from now on."""
    global _stock_save
    if torch.save is not _save:
        _stock_save = torch.save
        torch.save = torch.serialization.save = _save


def remove() -> None:
    """Undo `install`."""
    if torch.save is _save:
        torch.save = torch.serialization.save = _stock_save
