"""Keeping Dynamo out of what looks at or moves state, without importing it."""

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def nothing_compiles() -> bool:
    """Is this plain Python, whose frames no compiler looks at? Costs 0.2 us."""
    if "torch._dynamo" not in sys.modules:
        return True
    try:
        callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    except AttributeError:
        return False
    return callback is None


def outside_compiler(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`torch.compiler.disable`, for a function that looks at or moves state.

    That one imports the compiler, which takes a second, whether anything is compiled or not; so it
    is asked when the compiler is there. The name stays importable: hooks travel in pickled models.
    """
    disabled: list[Callable[_P, _T]] = []

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if nothing_compiles():
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    # Neither inlined into a graph nor compiled as a frame of its own.
    call.__dict__["_torchdynamo_disable"] = True
    skip_frame(call)
    return call


def skip_frame(function: Any) -> None:
    """Let Dynamo not compile the frame of `function`; what it calls, it may.

    Through the C functions: importing torch._dynamo takes a second, which most scripts never spend.
    """
    try:
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, skip)
    except AttributeError:
        pass  # Another version: Dynamo then looks at the frame first, and only compiles longer.


nothing_compiles.__dict__["_torchdynamo_disable"] = True
skip_frame(nothing_compiles)
