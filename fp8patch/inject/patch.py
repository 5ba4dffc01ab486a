"""The child's half of `fp8patch train`: patch a script's own models while it runs.

`arm` patches one method, `nn.Module.__call__`, and waits. At the first outermost call of a model
that trains, when it is loaded, resized, wrapped and its optimizer built, the model is planned and
converted in place, and from then on each of its outermost calls runs under BF16 and FP8 autocast.

The patch stays: a model may be evaluated through an inner module, a copy, or `generate`, each of
which is an outermost call of something that holds converted modules. Calls inside a model pay one
read of a global, and nothing is captured in a model, so that deep copies and pickles are what they
would be.

This file and what it imports at its top are loaded wherever torch is, also in data-loader workers:
everything heavy is imported at the first model.
"""

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8patch import messages
from fp8patch.compiler import skip_frame
from fp8patch.errors import Fp8PatchError
from fp8patch.inject import compat
from fp8patch.train_options import TrainOptions

if TYPE_CHECKING:
    from fp8patch.inject.run import Run

__all__ = ["arm", "disarm", "enable"]

_BF16_ENV = "ACCELERATE_MIXED_PRECISION"

_run: "Run | None" = None
# An outermost call is running. One for the process, like the region that it opens: autograd's
# threads call modules while nothing else does.
_inside = False
_stock_call: Any = nn.Module.__call__


def enable(**options: Any) -> None:
    """Run this script's own models in FP8; what `fp8patch train` does, from inside.

    The first line of a script or a notebook's first cell, before a model is called. Each model
    that trains is converted in place at its first call, which then runs under BF16 and FP8
    autocast. Does nothing but say so inside `fp8patch train`, whose options count.

    Args:
        options: `backend` (auto, fp8, emulate, bf16, off), `recipe` (a name or a file), `only`,
            `skip`, `include`, `roots` (patterns, as lists), `tokens`, `compile`, `cuda_graphs`,
            `compat`, `report` (a file), `log_every`, `track`, `check`: those of `fp8patch train`.

    Raises:
        Fp8PatchError: An unknown option, or a value that is not allowed.
    """
    if _run is not None:
        if _run.from_parent:
            messages.note("enable() is ignored: `fp8patch train` has patched this run already.")
            return
        if _run.models:
            raise Fp8PatchError(
                "enable() was called before, and a model is converted already. Call it once, as "
                "the first line."
            )
        disarm()
    arm(_options(options), from_parent=False)


def _options(values: dict[str, Any]) -> TrainOptions:
    known = {field.name for field in dataclasses.fields(TrainOptions)} - {"sets_bf16", "status_dir"}
    for key, value in list(values.items()):
        if key not in known:
            raise Fp8PatchError(
                f"enable() has no option {key!r}. Allowed: {', '.join(sorted(known))}."
            )
        if key in ("only", "skip", "include", "roots"):
            values[key] = (value,) if isinstance(value, str) else tuple(value)
    if values.get("report") is not None:
        values["report"] = os.path.abspath(values["report"])
    # The parent decides this where there is one.
    wants = values.get("backend", "auto") != "off" and _BF16_ENV not in os.environ
    if wants:
        os.environ[_BF16_ENV] = "bf16"
    return TrainOptions(**values, sets_bf16=wants)


def arm(options: TrainOptions | None = None, *, from_parent: bool = True) -> None:
    """Patch this process, as `options` (those of the environment) say; does nothing without any.

    Called when torch has just been imported, so that nothing here may start CUDA: the script has
    still to choose its device.

    Raises:
        Fp8PatchError: What was asked for can't work in any way.
    """
    global _run, _stock_call
    if _run is not None:
        return
    compat.install_excepthook()
    options = TrainOptions.from_env() if options is None else options
    if options is None:
        return
    from fp8patch.inject.run import Run

    _run = run = Run(options, from_parent)
    run.status.write(armed=True)
    if options.backend == "off":
        return
    run.refuse_early()
    if options.compat:
        compat.supply_names()
    if nn.Module.__call__ not in (_call, _call_through):
        _stock_call = nn.Module.__call__
        ours = _call if _stock_call is nn.Module._wrapped_call_impl else _call_through
        nn.Module.__call__ = ours  # type: ignore[method-assign]
    # Dynamo is to compile a model's `forward`, not these; they are called around it.
    for function in (_call, _call_through, _outermost):
        skip_frame(function)
    _outermost._torchdynamo_disable = True  # type: ignore[attr-defined]


def disarm() -> None:
    """Undo `arm`; converted models stay converted."""
    global _run
    if nn.Module.__call__ in (_call, _call_through):
        nn.Module.__call__ = _stock_call  # type: ignore[method-assign]
    compat.remove_excepthook()
    if _run is not None:
        _run.close()
        if _run.banks():
            from fp8patch.inject import pickling

            pickling.remove()
    _run = None


def _call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `nn.Module.__call__`."""
    if _inside:
        # What the stock one does, instead of calling it: no frame more than without us.
        if self._compiled_call_impl is not None:
            return self._compiled_call_impl(*args, **kwargs)
        return self._call_impl(*args, **kwargs)
    return _outermost(self, args, kwargs)


def _call_through(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """The same where somebody else has replaced `nn.Module.__call__` before us."""
    if _inside:
        return _stock_call(self, *args, **kwargs)
    return _outermost(self, args, kwargs)


def _outermost(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    global _inside
    run = _run
    # Recomputation of a checkpointed block: backward has opened the region again by itself.
    if (
        run is None
        or torch._C._current_graph_task_id() != -1
        or torch._C._get_tracing_state() is not None
    ):
        return _stock_call(module, *args, **kwargs)
    started = time.perf_counter() - run.conversion_seconds
    model = run.model_of(module, args, kwargs)
    if model is None:
        _inside = True
        try:
            return _stock_call(module, *args, **kwargs)
        finally:
            _inside = False
    contexts, cast = model.enter()
    # Less what was a conversion, which is counted by itself.
    run.overhead += time.perf_counter() - run.conversion_seconds - started
    _inside = True
    try:
        output = _stock_call(module, *args, **kwargs)
    finally:
        _inside = False
        started = time.perf_counter()
        while contexts:
            contexts.pop().__exit__(None, None, None)
    output = model.finish(output, cast)
    run.overhead += time.perf_counter() - started
    return output
