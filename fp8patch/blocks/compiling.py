"""How a block's forward is handed to `torch.compile`: once for the first sizes, once for any."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8patch import messages
from fp8patch.blocks import partial_sums, wide_rows

__all__ = ["compile_forward", "for_inductor", "inductor", "reason"]

_FUSING = "post_grad_custom_pre_pass"
# What isn't done where somebody else's pass is in the place of ours.
_UNDONE = {
    "joint_custom_post_pass": "blocks keep transposes that only backward reads",
    _FUSING: "activations are not computed by the casts that read them",
}


def compile_forward(
    dynamic: bool, backend: str | Callable[..., Any], limit: int
) -> Callable[..., Any]:
    """A function of (block, args, kwargs), compiled when it is called.

    Args:
        dynamic: For any sizes, and not for those that it meets.
        limit: How many graphs it may have.
    """
    if backend == "inductor":
        backend = functools.partial(inductor, keep_less=True)
    options: dict[str, Any] = {"fullgraph": True, "backend": backend}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = max(limit, torch._dynamo.config.recompile_limit)
    elif torch._dynamo.config.recompile_limit < limit:
        torch._dynamo.config.recompile_limit = limit
    compiled: Callable[..., Any] = torch.compile(_own_code(), **options)
    return _for_any_shape(compiled) if dynamic else compiled


def inductor(graph: Any, inputs: Any, *, keep_less: bool) -> Callable[..., Any]:
    """Inductor, as `torch.compile` calls a backend, with what is ours in it."""
    from torch._inductor.compile_fx import compile_fx

    options = for_inductor(keep_less)
    inner = wide_rows.compile_inner
    if _FUSING in options:
        # By this pass Inductor's cache tells such code from anybody else's.
        inner = partial_sums.added_here()(inner)
    compiled: Any = compile_fx(graph, inputs, inner_compile=inner, config_patches=options)
    return compiled  # type: ignore[no-any-return]


def for_inductor(keep_less: bool) -> dict[str, Any]:
    """Options with our passes over its graphs, where nobody else's are.

    Args:
        keep_less: For memory, and up to 2 % of a step; CUDA graphs are asked for speed.
    """
    import torch._inductor

    from fp8patch.blocks.fuse import FUSE_CASTS
    from fp8patch.blocks.keep_less import KEEP_LESS

    options: dict[str, Any] = {}
    passes: dict[str, Any] = {_FUSING: FUSE_CASTS}
    if keep_less:
        passes["joint_custom_post_pass"] = KEEP_LESS
    for place, ours in passes.items():
        if getattr(torch._inductor.config, place) is None:
            options[place] = ours
        else:
            messages.once(place, f"Inductor has a {place} already, so {_UNDONE[place]}.")
    return options


def reason(error: Exception) -> str:
    """Why something can't be compiled, and which line of the model Dynamo came to. (The rest of its
    text is of hints and settings, for those who compile.)"""
    text = str(error)
    told: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith(_ASIDES):
            break
        if line and not (line.startswith("backend=") and line.endswith("raised:")):
            told.append(line.removeprefix("Explanation: ").rstrip(".:"))
    # What the model itself raised stands among the asides.
    told += re.findall(r"Developer debug context: (raised exception .+)", text)
    what = messages.one_line(": ".join(told) or error)
    _, _, trace = text.partition("from user code:")
    frames = [found for found in _FRAME.findall(trace) if not _is_a_librarys(found[0])]
    if not frames:
        return what
    file, line, function = frames[-1]
    return f"{what}, at {function} in {Path(file).name}, line {line}"


# What begins a line that is no cause.
_ASIDES = (
    *("Hint:", "Developer debug", "For more details", "from user code", "Set TORCH"),
    *("File ", "# File ", "Caused by:"),
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')


def _is_a_librarys(file: str) -> bool:
    ours = Path(__file__).parents[1]
    return any(Path(file).is_relative_to(path) for path in (ours, Path(torch.__file__).parent))


def _own_code() -> Callable[..., Any]:
    """A function whose graphs, recompiles and record of moving sizes are its own: Dynamo keeps them
    by code object, and `block.compile()` would have all classes of all models share one."""

    def forward(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return type(block).forward(block, *args, **kwargs)

    number = next(_numbers)
    # The sizes that move are kept by name and line.
    forward.__code__ = forward.__code__.replace(
        co_name=f"fp8patch_block_{number}", co_firstlineno=forward.__code__.co_firstlineno
    )
    return forward


_numbers = iter(range(1 << 62))


def _for_any_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have every size of every tensor be able to move, and sizes that are equal by chance (1024
    tokens of 1024 features) be told apart. `dynamic=True` would do the same to the numbers on the
    modules, which then costs a second tracing."""
    import torch.fx.experimental._config as config

    apart = config.patch(use_duck_shape=False)  # type: ignore[attr-defined]

    def call(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _mark(args)
        _mark(kwargs.values())
        with apart:
            return function(block, args, kwargs)

    return call


def _mark(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            # A mask is the same object for every block.
            if not hasattr(value, "_dynamo_weak_dynamic_indices"):
                moving = [i for i, size in enumerate(value.shape) if size > 1]
                torch._dynamo.maybe_mark_dynamic(value, moving)
        elif isinstance(value, tuple | list):
            _mark(value)
