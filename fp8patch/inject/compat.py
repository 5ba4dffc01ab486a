"""Scripts of other library versions, and how an uncaught error looks.

Two gaps between versions stop most scripts, and neither has to do with training. `--compat` fills
them; without it, the error is followed by a line that names the option.
"""

import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from fp8patch import messages
from fp8patch.errors import Fp8PatchError

__all__ = ["install_excepthook", "remove_excepthook", "suggestion", "supply_names"]

_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = tuple(os.path.join(_HERE, name) for name in ("patch.py",))


# -- names that are gone ---------------------------------------------------------------------------


def _tpu(module: ModuleType) -> None:
    """`DistributedType.TPU` became `.XLA` in accelerate 1.0; scripts still compare with it."""
    kind: Any = getattr(module, "DistributedType", None)
    if kind is not None and "TPU" not in kind.__members__ and hasattr(kind, "XLA"):
        kind._member_map_["TPU"] = kind.XLA
        type.__setattr__(kind, "TPU", kind.XLA)


def _transformers_utils(module: ModuleType) -> None:
    added: dict[str, Callable[..., Any]] = {
        "send_example_telemetry": lambda *args, **kwargs: None,
        "is_offline_mode": lambda: os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"),
    }
    for name, stand_in in added.items():
        if not hasattr(module, name):
            setattr(module, name, stand_in)
    # Examples refuse to run with a release that is older than the branch they were taken from.
    module.check_min_version = lambda version: None  # type: ignore[attr-defined]


_SUPPLIED: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.utils.dataclasses": _tpu,
    "transformers.utils": _transformers_utils,
}
_supplied = False
# What the errors look like: (part of the message, the name, where it belongs)
_MISSING = (
    ("send_example_telemetry", "send_example_telemetry", "an older transformers"),
    ("is_offline_mode", "is_offline_mode", "an older transformers"),
    ("check_min_version", "check_min_version", "another transformers"),
    ("This example requires a", "check_min_version", "another transformers"),
    ("attribute 'TPU'", "DistributedType.TPU", "an accelerate before 1.0"),
)


def supply_names() -> None:
    """Add the names when the modules they belong to are imported (at once, if they are)."""
    global _supplied
    import wrapt

    _supplied = True
    for module, supply in _SUPPLIED.items():
        wrapt.register_post_import_hook(supply, module)


def suggestion(error: BaseException) -> str | None:
    """What to say after an uncaught error that `--compat` would have avoided."""
    if _supplied or not isinstance(error, ImportError | AttributeError):
        return None
    text = str(error)
    # Enum says just "TPU" in Python 3.11.
    if isinstance(error, AttributeError) and text == "TPU":
        text = "attribute 'TPU'"
    for part, name, owner in _MISSING:
        if part in text:
            return f"{name} belongs to {owner}: `fp8patch train --compat` supplies it."
    return None


# -- uncaught errors -------------------------------------------------------------------------------

_previous_hook: Any = None
# The script ended by an exception.
crashed = False


def install_excepthook() -> None:
    """One line for our own errors; for others what there was, without our frames."""
    global _previous_hook
    if sys.excepthook is not _excepthook:
        _previous_hook = sys.excepthook
        sys.excepthook = _excepthook


def remove_excepthook() -> None:
    """Undo `install_excepthook`."""
    if sys.excepthook is _excepthook:
        sys.excepthook = _previous_hook


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    global crashed
    crashed = True
    if isinstance(error, Fp8PatchError):
        if os.environ.get("FP8PATCH_DEBUG") == "1":
            traceback.print_exception(kind, error, trace)
        messages.note(f"error: {error}")
        return
    _hide_our_frames(error)
    _previous_hook(kind, error, error.__traceback__)
    advice = suggestion(error)
    if advice is not None:
        messages.note(advice)


def _hide_our_frames(error: BaseException) -> None:
    """The script's traceback is to be the one that it has without us."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = _without_ours(current.__traceback__)
        pending += [current.__cause__, current.__context__]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in _OURS:
            kept.append(trace)
        trace = trace.tb_next
    for first, second in zip(kept, [*kept[1:], None], strict=True):
        first.tb_next = second
    return kept[0] if kept else None
