"""Where Triton's kernels come from: they are imported when a GPU asks for the first of them."""

from functools import cache
from importlib import import_module
from typing import Any

from fp8patch import messages


@cache
def load(name: str, what: str | None = None) -> Any:
    """The module `ops/triton/<name>.py`, or None where there is no Triton.

    Args:
        what: "Losses run as plain PyTorch" is said then, once; None: another module says it.
    """
    try:
        return import_module(f"fp8patch.ops.triton.{name}")
    except ImportError as error:
        if what is not None:
            messages.note(f"no Triton here ({error}), so {what}.")
        return None
