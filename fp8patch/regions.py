"""The open region: the one process-global flag by which a converted module knows that it is in FP8.

It has to be process-global: recomputation of a checkpointed block runs inside backward, on CUDA
in a thread of autograd's own, long after the `with` block has ended (see backward.py).
"""

import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from fp8patch import input_cache
from fp8patch.recipe import Recipe
from fp8patch.scaling import Bank


@dataclass(frozen=True, slots=True)
class Region:
    """What a converted module does while the region is open.

    Attributes:
        execution: "fp8" on tensor cores, "emulate" in FP32 arithmetic, "observe" to run in the
            model's own precision and only look (calibration with FP8 disabled).
        strict: `backend="fp8"` was asked for by name: a module that can't is an error.
        rowwise: The hardware has GEMMs with one scale a row.
        training: Slots are written. None: no root has decided yet, so each module goes by grad
            mode.
        calibrating: Slots are written without gradients too, and casts use the live amax.
        recipe: Overrides the precision of the GEMMs, nothing else.
        group: Process group over which pending amax are reduced.
        reopened: Backward is running; this is recomputation.
        previous: What was open when backward reopened this one.
        thread: The thread that opened the region, and so the one that calls backward.
        banks: Banks that calibration has written to, in an order that is the same on every rank.
    """

    execution: Literal["fp8", "emulate", "observe"]
    strict: bool = False
    rowwise: bool = True
    training: bool | None = None
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Any = None
    reopened: bool = False
    previous: "Region | None" = None
    thread: int = 0
    banks: dict[Bank, None] = field(default_factory=dict, compare=False)


_known: dict[tuple[Any, ...], Region] = {}


def canonical(region: Region) -> Region:
    """The one object that stands for regions like this one, from step to step.

    So that a module can tell by identity that nothing has changed since its last call.
    """
    if region.calibrating or region.previous is not None:
        return region
    key = (
        region.execution,
        region.strict,
        region.rowwise,
        region.training,
        region.recipe,
        id(region.group),
        region.reopened,
        region.thread,
    )
    known = _known.get(key)
    if known is None or known.group is not region.group:
        if len(_known) > 100:  # Threads and process groups come and go.
            _known.clear()
        known = _known[key] = region
    return known


@dataclass(slots=True)
class RootCall:
    """A call of a converted root that is running, and what to put back when it ends."""

    root: nn.Module
    previous: Region
    training: bool
    # Python frames below it. A call that runs has deeper ones above it only.
    depth: int = 0
    thread: int = field(default_factory=threading.get_ident)
    contexts: list[AbstractContextManager[Any]] = field(default_factory=list)

    def close(self) -> None:
        while self.contexts:
            self.contexts.pop().__exit__(None, None, None)


@dataclass(slots=True)
class _State:
    """Of this process.

    Attributes:
        region: The open region.
        entry: Numbers the outermost entries. A bank compares it with the last one it saw.
        trained: The last entry was a training forward: weights may have moved by any means.
        roots: Calls of converted roots that are running, outermost first.
        in_backward: Banks whose backward is running.
        blocks: How many `autocast` blocks are open, whatever they do.
    """

    region: Region | None = None
    entry: int = 0
    trained: bool = False
    roots: list[RootCall] = field(default_factory=list)
    in_backward: "weakref.WeakSet[Bank]" = field(default_factory=weakref.WeakSet)
    blocks: int = 0


state = _State()


def active() -> Region | None:
    """The open region, or None where modules are to behave as their stock class."""
    region = state.region
    if region is None or torch.compiler.is_compiling():
        return region
    if region.reopened:
        # A part of a model may be what is called first after a backward that raised: no root has
        # cleaned up.
        close_abandoned()
        return state.region
    # Another thread's region is none of ours: what is called here is the stock model.
    return region if region.thread == threading.get_ident() else None


def set_region(region: Region | None) -> None:
    """Open `region`, or close whatever is open."""
    state.region = region


def new_entry(training: bool) -> None:
    """An outermost forward begins."""
    input_cache.forget()
    state.entry += 1
    state.trained = training


def close_abandoned() -> None:
    """A backward that raised never closed its region; nothing but a backward may use it.

    Seen only from the thread that called backward: others have no backward running at any time.
    """
    region = state.region
    if region is None or not region.reopened or region.thread != threading.get_ident():
        return
    if torch._C._current_graph_task_id() == -1:
        set_region(region.previous)
        state.in_backward.clear()
