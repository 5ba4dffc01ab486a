"""FP8 state that a script loads before its model is converted: kept until it is.

`from_pretrained`, `Trainer` and `Accelerator.load_state` load weights long before the first call
of the model, which is when we convert it. Where a sidecar lies beside those weights, its directory
is remembered for the model, and its state is restored right after the conversion.
"""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["listen", "remember", "restore"]

_listening = False
# id of the model inside the wrappers -> (the model, directory, index)
_pending: dict[int, tuple["weakref.ref[nn.Module]", Path, int]] = {}


def listen() -> None:
    """Hook the loaders when their modules are imported. Imports nothing of them itself."""
    global _listening
    if _listening:
        return
    _listening = True
    import wrapt

    for module in ("transformers.modeling_utils", "transformers.trainer", "accelerate.accelerator"):
        wrapt.register_post_import_hook(_imported, module)


def _imported(module: Any) -> None:
    from fp8patch.checkpoint import hooks, state

    hooks.install()
    state.defer = remember
    if module.__name__ == "transformers.modeling_utils":
        _hook_from_pretrained(module.PreTrainedModel)


def _hook_from_pretrained(cls: Any) -> None:
    import wrapt

    def around(wrapped: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
        loaded = wrapped(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        if isinstance(model, nn.Module) and isinstance(source, str | Path):
            from fp8patch.checkpoint.sidecar import has_sidecar

            if Path(source).is_dir() and has_sidecar(source):
                remember(model, source, 0)
        return loaded

    wrapt.wrap_function_wrapper(cls, "from_pretrained", around)


def remember(model: nn.Module, directory: str | Path, index: int) -> None:
    """`model` was loaded from `directory`, where a sidecar is. The last one counts."""
    from fp8patch.checkpoint.state import unwrap

    inner = unwrap(model)
    key = id(inner)
    reference = weakref.ref(inner, lambda _: _pending.pop(key, None))
    _pending[key] = (reference, Path(directory), index)


def restore(model: nn.Module) -> bool:
    """Restore what was remembered for `model`, which has just been converted, or for a part of it.

    Raises:
        CheckpointError: The sidecar can't be read, or is of another model.
    """
    from fp8patch.checkpoint.state import restore_from

    for part in model.modules() if _pending else ():
        _, directory, index = _pending.pop(id(part), (None, None, 0))
        if directory is not None:
            return restore_from(model, directory, index=index)
    return False
