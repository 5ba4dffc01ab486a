"""Which call of a model is running, and what its blocks are to run as.

Decided once at each outermost call, where it begins, as roots.py does: training is where gradients
are enabled. Recomputation of a checkpointed block runs inside backward, where no call is running,
and does what the last training forward did.
"""

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp8patch import messages, regions
from fp8patch.blocks.graphs import Graphs
from fp8patch.blocks.places import Places
from fp8patch.blocks.run import COMPILED, EAGER, GRAPHS, Mode
from fp8patch.compiler import outside_compiler

__all__ = ["Caller", "takes_cache", "unwatch", "watch"]

_CACHES = ("cache", "past_key_values", "past_key_value")


@dataclass(slots=True)
class _Call:
    module: nn.Module
    depth: int
    training: bool
    # The caller wants keys and values back, or brought some.
    caching: bool
    thread: int = field(default_factory=threading.get_ident)


@dataclass(slots=True)
class _State:
    """Of this process.

    Attributes:
        calls: Calls of watched modules that are running, outermost first; all in one thread. What
            another thread calls beside them runs eagerly.
        entry: Numbers the outermost ones.
    """

    calls: list[_Call] = field(default_factory=list)
    entry: int = 0


_state = _State()


class Caller:
    """Decides for the blocks of one `compile_blocks`; with `graphs`, where those were asked for."""

    def __init__(self, graphs: Graphs | None, places: Places) -> None:
        self.graphs, self._places = graphs, places
        self._entry = -1
        self._mode = self._last_training = EAGER
        self._begun = False

    def mode(self) -> Mode:
        """What a block that is called now runs as."""
        if not _state.calls or _elsewhere():
            in_backward = torch._C._current_graph_task_id() != -1
            return self._last_training if in_backward else EAGER
        # For each block: what holds several converted roots is decided for once.
        for call in regions.state.roots:
            bank: Any = call.root._fp8_bank
            bank.late.catch_up()
        if self._entry != _state.entry:
            self._entry = _state.entry
            self._mode = EAGER
            if _state.calls[0].training:
                self._mode = self._last_training = self._decide()
        if self._mode is not EAGER and regions.state.roots:
            self._places.refresh()
        return self._mode

    def _decide(self) -> Mode:
        if any(call.caching for call in _state.calls):
            messages.once(
                "caching",
                "a training forward was asked for a cache of keys and values: its blocks run "
                "eagerly.",
            )
            return EAGER
        region = regions.state.region
        if region is not None:
            banks: list[Any] = [call.root._fp8_bank for call in regions.state.roots]
            # The first step is watched, which a graph can't be. Without a root that is known to
            # the region, a converted module has to find out in its own forward.
            watched = any(bank.observation is not None for bank in banks)
            unknown = not banks and any(map(_is_converted, _state.calls[0].module.modules()))
            if watched or unknown or region.calibrating:
                return EAGER
        if not self._begun:
            self._begun = True
            _give_back()
        return COMPILED if self.graphs is None else self.graphs.begin()

    def ran_graphs(self) -> bool:
        """Did the call that is running use CUDA graphs?"""
        return self._entry == _state.entry and self._mode is GRAPHS


def _give_back() -> None:
    """What is free of the eager steps' memory: it is cut to other sizes than compiled blocks want,
    and would be held beside theirs (0.7 GiB of a Llama of four layers)."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _is_converted(module: nn.Module) -> bool:
    return hasattr(type(module), "_fp8_base")


# Hooks are module-level functions that find what they need here: a copy of a model is not in it,
# and runs as if nothing had been compiled.
_callers: "weakref.WeakKeyDictionary[nn.Module, Caller]" = weakref.WeakKeyDictionary()


def watch(module: nn.Module, caller: Caller) -> None:
    """Calls of `module` are calls of a model with compiled blocks."""
    _callers[module] = caller
    module.register_forward_pre_hook(_enter, with_kwargs=True)
    module.register_forward_hook(_leave, always_call=True)


def unwatch(module: nn.Module) -> None:
    """Undo `watch`."""
    _callers.pop(module, None)
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _enter:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key, hook in list(module._forward_hooks.items()):
        if hook is _leave:
            del module._forward_hooks[key]
            module._forward_hooks_always_called.pop(key, None)


def takes_cache(module: nn.Module) -> bool:
    """Does its forward have the argument `use_cache` (a Hugging Face model)?"""
    return _takes_cache(type(module).forward)


@functools.cache
def _takes_cache(forward: Callable[..., Any]) -> bool:
    return "use_cache" in inspect.signature(forward).parameters


def _elsewhere() -> bool:
    """Are the calls that are running those of another thread?"""
    return bool(_state.calls) and _state.calls[-1].thread != threading.get_ident()


@outside_compiler
def _enter(module: Any, args: Any, kwargs: Any) -> Any:
    depth = _drop_interrupted()
    if module not in _callers or _elsewhere():
        return None
    if not _state.calls:
        _state.entry += 1
    training = _state.calls[0].training if _state.calls else torch.is_grad_enabled()
    # What the script asks for; what a model then hands on comes from its config.
    asked = _state.calls[0].caching if _state.calls else bool(kwargs.get("use_cache"))
    cached = asked or any(kwargs.get(name) is not None for name in _CACHES)
    _state.calls.append(_Call(module, depth, training, cached))
    # With a cache, each block would see another Python number (its index in the cache), and have a
    # graph of its own.
    if training and not cached and kwargs.get("use_cache") is not False:
        if "use_cache" in kwargs or takes_cache(module):
            return args, {**kwargs, "use_cache": False}
    return None


def _drop_interrupted() -> int:
    """Forget calls that ended without their hook (a KeyboardInterrupt runs none); the depth."""
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    while _state.calls and _state.calls[-1].depth >= depth and not _elsewhere():
        _state.calls.pop()
    return depth


@outside_compiler
def _leave(module: Any, args: Any, output: Any) -> Any:
    if not _state.calls or _state.calls[-1].module is not module or _elsewhere():
        return None
    caller = _callers.get(module)
    outermost = len(_state.calls) == 1
    ran = caller is not None and caller.ran_graphs()
    _state.calls.pop()
    if not outermost or not ran:
        return None
    assert caller is not None
    assert caller.graphs is not None
    return caller.graphs.finish(output)
