"""The savers and loaders that a user's script calls already, taught about the sidecar.

Wrapped once each, on the class, when a model is first converted: whether transformers, peft and
accelerate are imported before that, later, or never. The wrapped methods keep their name, signature
and result, and do for a model that is not converted what they did.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import wrapt
from torch import nn

from fp8patch import messages
from fp8patch.checkpoint.ranks import place
from fp8patch.checkpoint.state import restore_from, save_beside
from fp8patch.modules.base import Float8Module

__all__ = ["install", "stock_keys"]

# Modules whose methods are wrapped, or will be as soon as they are imported.
_installed: set[str] = set()
_MARK = "_fp8patch_wrapped"
# Stands in for the method; takes the original first.
_Around = Callable[..., Any]


def install() -> None:
    """Wrap them; does nothing for what is wrapped already."""
    for module, targets in _TARGETS.items():
        spec = getattr(sys.modules.get(module), "__spec__", None)
        # Imported halfway (accelerate imports torch, whose import may have called us): its classes
        # are not there yet, and wrapt would take it for complete. The next call is in time.
        if module not in _installed and not getattr(spec, "_initializing", False):
            _installed.add(module)
            wrapt.register_post_import_hook(functools.partial(_wrap_all, targets), module)


def _wrap_all(targets: tuple[tuple[str, str, _Around], ...], module: Any) -> None:
    for class_name, name, around in targets:
        cls = getattr(module, class_name, None)
        original = None if cls is None else vars(cls).get(name)
        if original is None:
            messages.note(
                f"{module.__name__} has no {class_name}.{name} in this version: FP8 state does not "
                "follow what it saves or loads. Use fp8patch.save and fp8patch.load."
            )
        elif not hasattr(original, _MARK):
            setattr(cls, name, _wrapped(original, around))


def _wrapped(original: Any, around: _Around) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(method, _MARK, True)
    return method


# -- transformers and peft ------------------------------------------------------------------------


def _save_pretrained(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind(model, *args, **kwargs)
    state_dict = call.arguments.get("state_dict")
    if state_dict is not None:
        call.arguments["state_dict"] = _without_extra(model, state_dict)
    with stock_keys(model):
        result = original(*call.args, **call.kwargs)
    directory, main = call.arguments["save_directory"], call.arguments.get("is_main_process", True)
    if not main and place()[0] == 0:
        return result
    beside = save_beside(model, directory)
    if main and beside and (call.arguments.get("push_to_hub") or kwargs.get("push_to_hub")):
        messages.note(
            f"{directory}: what was pushed to the hub are the weights; fp8patch.json and "
            "fp8patch_state.safetensors are in the directory, and not uploaded."
        )
    return result


@contextmanager
def stock_keys(model: nn.Module) -> Iterator[None]:
    """`extra_state=True` is for `torch.save`; what save_pretrained writes is a plain checkpoint."""
    modules = [m for m in model.modules() if isinstance(m, Float8Module) and m._fp8_extra_state]
    for module in modules:
        module._fp8_extra_state = False
    try:
        yield
    finally:
        for module in modules:
            module._fp8_extra_state = True


def _without_extra(model: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    if not any(isinstance(m, Float8Module) and m._fp8_extra_state for m in model.modules()):
        return state_dict
    return {key: v for key, v in state_dict.items() if not key.endswith("._extra_state")}


# -- Trainer --------------------------------------------------------------------------------------


def _save_model(original: Any, trainer: Any, output_dir: Any = None, *args: Any, **kw: Any) -> Any:
    result = original(trainer, output_dir, *args, **kw)
    # A model of transformers or peft has just been saved by its own save_pretrained, but for the
    # shards that FSDP writes.
    by_itself = hasattr(trainer.model, "save_pretrained") and not trainer.is_fsdp_enabled
    first = trainer.args.should_save
    if not (by_itself and first and place()[0] == 0):
        save_beside(trainer.model, output_dir or trainer.args.output_dir, first=first)
    return result


def _load_from_checkpoint(
    original: Any, trainer: Any, resume_from_checkpoint: Any, model: Any = None
) -> Any:
    result = original(trainer, resume_from_checkpoint, model)
    restore_from(trainer.model if model is None else model, resume_from_checkpoint)
    return result


def _load_best_model(original: Any, trainer: Any) -> Any:
    result = original(trainer)
    restore_from(trainer.model, trainer.state.best_model_checkpoint)
    return result


# -- accelerate -----------------------------------------------------------------------------------


def _save_state(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    # Where it really goes is known inside only: numbered directories, `~`.
    directories: list[Any] = []
    hook = accelerator.register_save_state_pre_hook(
        lambda models, weights, directory: directories.append(directory)
    )
    try:
        result = original(accelerator, *args, **kwargs)
    finally:
        hook.remove()
    each_node = accelerator.project_configuration.save_on_each_node
    first = accelerator.is_main_process or (each_node and accelerator.is_local_main_process)
    for index, model in enumerate(accelerator._models):
        save_beside(model, directories[0], index=index, first=first)
    return result


def _load_state(original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    directories: list[Any] = []
    hook = accelerator.register_load_state_pre_hook(
        lambda models, directory: directories.append(directory)
    )
    try:
        result = original(accelerator, *args, **kwargs)
    finally:
        hook.remove()
    for index, model in enumerate(accelerator._models):
        restore_from(model, directories[0], index=index)
    return result


_TARGETS: dict[str, tuple[tuple[str, str, _Around], ...]] = {
    "transformers.modeling_utils": (("PreTrainedModel", "save_pretrained", _save_pretrained),),
    "peft.peft_model": (("PeftModel", "save_pretrained", _save_pretrained),),
    "transformers.trainer": (
        ("Trainer", "save_model", _save_model),
        ("Trainer", "_load_from_checkpoint", _load_from_checkpoint),
        ("Trainer", "_load_best_model", _load_best_model),
    ),
    "accelerate.accelerator": (
        ("Accelerator", "save_state", _save_state),
        ("Accelerator", "load_state", _load_state),
    ),
}
