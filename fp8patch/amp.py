"""`autocast`: opens the region in which converted modules run in FP8, and closes it."""

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from fp8patch import input_cache, messages
from fp8patch.errors import Fp8PatchError
from fp8patch.hardware import Backend, Hardware, detect, resolve_backend
from fp8patch.recipe import Recipe
from fp8patch.regions import Region, close_abandoned, new_entry, set_region, state

_P = ParamSpec("_P")
_T = TypeVar("_T")


@functools.cache
def _hardware(ask: Callable[[], Hardware]) -> Hardware:
    # Asked once: a block is opened every step, and asking CUDA goes through warning filters, which
    # makes Python repeat warnings that the user has seen.
    return ask()


class autocast:
    """Runs converted modules in FP8 inside the block. Forward only: call `backward()` outside.

    Does not touch `torch.autocast`: the rest of the model runs as it would. Write
    `with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast():` for mixed precision.
    Nests: an inner `autocast(enabled=False)` keeps a part of a model out of FP8. Also a
    decorator.

    Args:
        enabled: False runs converted modules as their stock class.
        backend: `auto` (inside an open block, what that block runs; else FP8 where the GPU has it,
            else the model's own precision, said in one line), `fp8` (or an error), `emulate` (the
            same rounding on any device, slowly), `bf16` (no FP8, and BF16 autocast unless one is
            on), `off` (nothing at all).
        recipe: Changes GEMM precisions (`fprop`, `dgrad`, `wgrad`) inside the block and nothing
            else; its other fields must be those that the model was converted with.
        calibrating: Fill the slots from forwards without gradients too; the scales are set when the
            block ends. With `enabled=False` the forward runs in the model's own precision.
        amax_reduction_group: Process group over which amax are reduced, so that all ranks scale
            alike.

    Raises:
        Fp8PatchError: A block is open in another thread.
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
        if not isinstance(enabled, bool):
            raise TypeError(
                f"autocast(enabled={enabled!r}): True or False, please. The backend is a keyword: "
                f"autocast(backend={enabled!r})."
            )
        self._enabled = enabled
        self._calibrating = calibrating
        self._group = amax_reduction_group
        self._recipe = None if recipe is None else Recipe.load(recipe)
        self._backend: Backend = backend
        self._execution = resolve_backend(backend, _hardware(detect)) if enabled else "off"
        self._outer: list[tuple[Region | None, int, list[AbstractContextManager[Any]]]] = []

    def __enter__(self) -> "autocast":
        close_abandoned()
        outer = state.region
        if outer is not None and outer.thread != threading.get_ident() and not _in_backward():
            raise Fp8PatchError(
                "autocast is open in another thread, and a process has one FP8 region: backward, "
                "which runs in threads of its own, has to find it. Use a process for each model."
            )
        state.blocks += 1
        if outer is None and not state.roots:
            new_entry(training=False)
        contexts: list[AbstractContextManager[Any]] = []
        if self._execution == "bf16":
            contexts = _bf16_autocasts()
        if self._execution == "off" and self._enabled and self._backend == "auto" and outer is None:
            messages.once(
                "auto is off",
                f"FP8 is off: {_hardware(detect).reason} To try it all the same, slowly: "
                'autocast(backend="emulate").',
            )
        self._outer.append((outer, len(state.roots), contexts))
        set_region(self._region_inside(outer))
        return self

    def _region_inside(self, outer: Region | None) -> Region | None:
        execution: Literal["fp8", "emulate", "observe"]
        inherits = self._enabled and self._backend == "auto" and outer is not None
        if inherits and outer is not None:
            execution = outer.execution
        elif self._execution == "fp8" or self._execution == "emulate":
            execution = self._execution
        elif self._calibrating:
            execution = "observe"
        else:
            return None
        region = Region(
            execution=execution,
            strict=self._backend == "fp8",
            rowwise=self._execution != "fp8" or _hardware(detect).rowwise,
            # A block inside a model's forward belongs to the forward that is running.
            training=state.roots[-1].training if state.roots else None,
            calibrating=self._calibrating,
            recipe=self._recipe,
            group=self._group,
            thread=threading.get_ident(),
        )
        if outer is None:
            return region
        return dataclasses.replace(
            region,
            strict=outer.strict if inherits else region.strict,
            rowwise=outer.rowwise if inherits else region.rowwise,
            recipe=self._recipe or outer.recipe,
            group=self._group or outer.group,
            calibrating=self._calibrating or outer.calibrating,
            training=outer.training,
            reopened=outer.reopened,
            previous=outer.previous,
            thread=outer.thread,
            banks=outer.banks if outer.calibrating else region.banks,
        )

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        outer, depth, contexts = self._outer.pop()
        state.blocks -= 1
        # Module hooks are not called for a KeyboardInterrupt: their calls are still on the list.
        while len(state.roots) > depth:
            state.roots.pop().close()
        inside = state.region
        set_region(outer)
        input_cache.forget()
        for context in reversed(contexts):
            context.__exit__(exc_type, exc, traceback)
        if inside is not None and inside.calibrating and exc_type is None:
            if outer is None or not outer.calibrating:
                for bank in inside.banks:
                    bank.update(inside.group)

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(
                f"autocast can't decorate {function.__qualname__}: it is a generator or coroutine "
                "function, whose body runs after the block has ended. Write `with` inside it."
            )

        @functools.wraps(function)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self:
                return function(*args, **kwargs)

        return wrapped


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _bf16_autocasts() -> list[AbstractContextManager[Any]]:
    contexts: list[AbstractContextManager[Any]] = []
    for device_type in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        if not torch.is_autocast_enabled(device_type):
            context = torch.autocast(device_type, torch.bfloat16)
            context.__enter__()
            contexts.append(context)
    return contexts
