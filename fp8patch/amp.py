"""`autocast`: the region in which converted modules run in FP8, and how it reaches into backward.

The region is one process-global flag. It has to be: recomputation of a checkpointed block runs
inside backward, on CUDA in a thread of autograd's own, long after the `with` block has ended. So
the outermost training forward leaves a hook on its outputs that opens the region again when
backward starts, and backward's last act closes it.

Whether a forward is a *training* forward is decided once, where the outermost one begins, by
whether gradients are enabled there: reentrant checkpointing runs its blocks without gradients the
first time, and what they see must be observed all the same. `module.training` is not consulted: a
model in eval mode can be trained, and dropout has nothing to do with FP8.
"""

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fp8patch import messages
from fp8patch.hardware import Backend, detect, resolve_backend
from fp8patch.observation import WatchReaders
from fp8patch.recipe import Recipe
from fp8patch.scaling import Bank

_P = ParamSpec("_P")
_T = TypeVar("_T")


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
    banks: dict[Bank, None] = field(default_factory=dict, compare=False)


_region: Region | None = None
# Numbers the outermost entries. A bank compares it with the last one it saw.
_entry = 0
# A training forward has begun since the last entry: weights may have moved by any means.
_trained = False
# Calls of converted roots that are running, outermost first.
_roots: list["_RootCall"] = []
# Banks whose backward is running.
_in_backward: "weakref.WeakSet[Bank]" = weakref.WeakSet()


@dataclass(slots=True)
class _RootCall:
    root: nn.Module
    previous: Region
    training: bool
    contexts: list[AbstractContextManager[Any]] = field(default_factory=list)

    def close(self) -> None:
        while self.contexts:
            self.contexts.pop().__exit__(None, None, None)


def active() -> Region | None:
    """The open region, or None where modules are to behave as their stock class."""
    # A part of a model may be what is called first after a backward that raised: no root cleans up.
    if _region is not None and _region.reopened and not torch.compiler.is_compiling():
        _close_abandoned()
    return _region


def _set(region: Region | None) -> None:
    global _region
    _region = region


def _new_entry(training: bool) -> None:
    global _entry, _trained
    _entry += 1
    _trained = training


def _close_abandoned() -> None:
    """A backward that raised never closed its region; nothing but a backward may use it."""
    if _region is not None and _region.reopened and torch._C._current_graph_task_id() == -1:
        _set(None)


class autocast:
    """Runs converted modules in FP8 inside the block. Forward only: call `backward()` outside.

    Does not touch `torch.autocast`: the rest of the model runs as it would. Write
    `with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast():` for mixed precision.
    Nests: an inner `autocast(enabled=False)` keeps a part of a model out of FP8. Also a
    decorator.

    Args:
        enabled: False runs converted modules as their stock class.
        backend: `auto` (FP8 where the GPU has it, else the model's own precision, said in one
            line), `fp8` (or an error), `emulate` (the same rounding on any device, slowly),
            `bf16` (no FP8, and BF16 autocast unless one is on), `off` (nothing at all).
        recipe: Changes GEMM precisions (`fprop`, `dgrad`, `wgrad`) inside the block and nothing
            else; its other fields must be those that the model was converted with.
        calibrating: Fill the slots from forwards without gradients too; the scales are set when the
            block ends. With `enabled=False` the forward runs in the model's own precision.
        amax_reduction_group: Process group over which amax are reduced, so that all ranks scale
            alike.

    Raises:
        HardwareError: `backend="fp8"` where the hardware has none, or an unknown backend.
        RecipeError: The recipe can't be loaded.
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        backend: Backend = "auto",
        recipe: Recipe | str | None = None,
        calibrating: bool = False,
        amax_reduction_group: Any = None,
    ) -> None:
        self._enabled = enabled
        self._calibrating = calibrating
        self._group = amax_reduction_group
        self._recipe = None if recipe is None else Recipe.load(recipe)
        self._backend: Backend = backend
        self._execution = resolve_backend(backend, detect()) if enabled else "off"
        self._outer: list[tuple[Region | None, int, list[AbstractContextManager[Any]]]] = []

    def __enter__(self) -> "autocast":
        _close_abandoned()
        outer = _region
        if outer is None and not _roots:
            _new_entry(training=False)
        contexts: list[AbstractContextManager[Any]] = []
        if self._execution == "bf16":
            contexts = _bf16_autocasts()
        if self._execution == "off" and self._enabled and self._backend == "auto":
            messages.once("auto is off", f"FP8 is off: {detect().reason}")
        self._outer.append((outer, len(_roots), contexts))
        _set(self._region_inside(outer))
        return self

    def _region_inside(self, outer: Region | None) -> Region | None:
        execution: Literal["fp8", "emulate", "observe"]
        if self._execution == "fp8" or self._execution == "emulate":
            execution = self._execution
        elif self._calibrating:
            execution = "observe"
        else:
            return None
        region = Region(
            execution=execution,
            strict=self._backend == "fp8",
            rowwise=self._execution != "fp8" or detect().rowwise,
            # A block inside a model's forward belongs to the forward that is running.
            training=_roots[-1].training if _roots else None,
            calibrating=self._calibrating,
            recipe=self._recipe,
            group=self._group,
        )
        if outer is None:
            return region
        return dataclasses.replace(
            region,
            recipe=self._recipe or outer.recipe,
            group=self._group or outer.group,
            calibrating=self._calibrating or outer.calibrating,
            training=outer.training,
            reopened=outer.reopened,
            banks=outer.banks,
        )

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        outer, depth, contexts = self._outer.pop()
        # Module hooks are not called for a KeyboardInterrupt: their calls are still on the list.
        while len(_roots) > depth:
            _roots.pop().close()
        inside = _region
        _set(outer)
        for context in reversed(contexts):
            context.__exit__(exc_type, exc, traceback)
        if inside is not None and inside.calibrating and exc_type is None:
            if outer is None or not outer.calibrating:
                for bank in inside.banks:
                    bank.update(inside.group)

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self:
                return function(*args, **kwargs)

        return wrapped


def _bf16_autocasts() -> list[AbstractContextManager[Any]]:
    contexts: list[AbstractContextManager[Any]] = []
    for device_type in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        if not torch.is_autocast_enabled(device_type):
            context = torch.autocast(device_type, torch.bfloat16)
            context.__enter__()
            contexts.append(context)
    return contexts


# -- the root of a model ------------------------------------------------------------------------


def watch_root(root: nn.Module) -> None:
    """Let the calls of `root` mark where a forward begins and ends. `root._fp8_bank` must be set.

    Also for a direct child that holds most of a model: PEFT calls the `forward` of a model that it
    wraps, past the hooks of the root but not past those of its children.

    Both hooks are module-level functions that capture nothing: a closure would make a deep copy of
    the model compute with the original's weights.
    """
    root.register_forward_pre_hook(enter_root)
    root.register_forward_hook(leave_root, always_call=True)


def unwatch_root(root: nn.Module) -> None:
    """Undo `watch_root`."""
    for hooks in (root._forward_pre_hooks, root._forward_hooks):
        for key, hook in list(hooks.items()):
            if hook in (enter_root, leave_root):
                del hooks[key]
                root._forward_hooks_always_called.pop(key, None)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def enter_root(root: Any, args: Any) -> None:
    """Forward pre-hook of a converted root."""
    _close_abandoned()
    region = _region
    if region is None:
        return
    bank: Bank = root._fp8_bank
    bank.attach_root(root)
    if region.reopened or _roots:
        training = True if region.training is None else region.training
    else:
        training = torch.is_grad_enabled()
        if training or _trained:
            _new_entry(training)
    call = _RootCall(root, region, training)
    if not region.reopened:
        bank.enter(_entry, training, region.group)
        if "torch._dynamo" in sys.modules and not bank.all_bound:
            _bind_compiled(root, bank, training)
        if training and bank.observation is not None and not _roots:
            call.contexts = _observing(bank)
    _roots.append(call)
    _set(dataclasses.replace(region, training=training))


def _bind_compiled(root: nn.Module, bank: Bank, training: bool) -> None:
    """What a compiled block may call before any eager forward did: it can't bind it by itself."""
    for block in root.modules():
        if block._compiled_call_impl is not None:
            for module in block.modules():
                if getattr(module, "_fp8_bank", None) is bank and hasattr(module, "first_use"):
                    first_use: Any = module.first_use
                    first_use(training)


def _observing(bank: Bank) -> list[AbstractContextManager[Any]]:
    assert bank.observation is not None
    contexts: list[AbstractContextManager[Any]] = [WatchReaders(bank.observation)]
    if "torch._dynamo" in sys.modules:
        contexts.append(torch.compiler.set_stance("force_eager"))
    for context in contexts:
        context.__enter__()
    return contexts


@torch.compiler.disable  # type: ignore[untyped-decorator]
def leave_root(root: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a converted root; runs after a failed forward too."""
    if not _roots or _roots[-1].root is not root:
        return
    call = _roots.pop()
    call.close()
    region = _region
    _set(call.previous)
    if call.training and not _roots and region is not None and not region.reopened:
        bank: Any = root._fp8_bank
        if bank.observation is not None:
            bank.observation.saw_result(output)
        armed = arm_backward(output, bank, region)
        if not armed and any(parameter.requires_grad for parameter in root.parameters()):
            messages.once(
                f"output of {type(root)}",
                f"no gradient can reach what {type(root).__name__} returns, so its backward will "
                "not be noticed: return the tensors that the loss is computed from (gradient "
                "checkpointing would recompute without FP8 otherwise).",
            )


# -- backward -----------------------------------------------------------------------------------


def arm_backward(output: Any, bank: Bank, region: Region) -> bool:
    """Open the region again when a gradient reaches `output` (a tensor, or a structure of them).

    Returns whether anything in `output` can have a gradient.
    """
    hook = functools.partial(_reopen, weakref.ref(bank), dataclasses.replace(region, reopened=True))
    # Objects of unknown classes only where nothing else is: a cache of keys and values is one.
    tensors = _differentiable(output, opaque=False) or _differentiable(output, opaque=True)
    for tensor in tensors:
        tensor.register_hook(hook)
    return bool(tensors)


def _differentiable(output: Any, opaque: bool) -> list[Tensor]:
    found: list[Tensor] = []
    pending, seen = [output], dict[int, Any]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            # A leaf (CLIP's logit scale, say) would keep the hook for every backward to come.
            found.extend([value] if value.requires_grad and not value.is_leaf else [])
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, (type, nn.Module, ModuleType)):
            continue
        elif opaque or dataclasses.is_dataclass(value):
            pending.extend(getattr(value, "__dict__", {}).values())
    return found


def _reopen(bank: "weakref.ref[Bank]", region: Region, grad: Tensor) -> None:
    alive = bank()
    if alive is not None:
        _in_backward.add(alive)
    previous = _region
    if previous is not None and previous.reopened:
        return
    _set(region)
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(functools.partial(_finish_backward, previous))


def _finish_backward(previous: Region | None) -> None:
    _set(previous)
    for bank in list(_in_backward):
        bank.saw_backward()
    _in_backward.clear()


# -- modules ------------------------------------------------------------------------------------


def enter_module(bank: Bank, region: Region) -> bool:
    """A converted module of `bank` is about to run in eager; returns whether it is observed.

    Most of the time its root has done all this; it has not where a part of the model is called by
    itself, or where a wrapper calls the root's `forward` past its hooks (PEFT does).
    """
    if region.reopened:
        return True
    training = torch.is_grad_enabled() if region.training is None else region.training
    if training and not _roots and bank.due:
        _new_entry(training)
    bank.enter(_entry, training, region.group)
    if region.calibrating:
        region.banks[bank] = None
    return training or region.calibrating


def inside_root() -> bool:
    """Is a converted root being called (so that its outputs will be armed)?"""
    return bool(_roots)
