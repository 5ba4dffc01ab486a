"""`save` and `load`: a converted model with its FP8 state, beside plain weights.

What is saved is the stock checkpoint, which anything can load, plus the sidecar. Loading replays
the plan in it, decides nothing anew, and restores the FP8 state bit for bit.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from fp8patch import messages
from fp8patch.checkpoint.files import made
from fp8patch.checkpoint.hooks import install, stock_keys
from fp8patch.checkpoint.ranks import for_this_rank
from fp8patch.checkpoint.sidecar import (
    FORMAT_VERSION,
    SIDECAR,
    STATE,
    Sidecar,
    has_sidecar,
    read_sidecar,
    remove_sidecar,
)
from fp8patch.checkpoint.skeleton import read_config
from fp8patch.checkpoint.state import (
    another_model,
    find_converted,
    restore,
    save_beside,
    stored_plan,
    unwrap,
)
from fp8patch.checkpoint.workspace import abandoned, workspace, write_error
from fp8patch.convert import convert_model
from fp8patch.errors import CheckpointError
from fp8patch.hardware import Backend, detect, resolve_backend
from fp8patch.messages import one_line
from fp8patch.modules.norm_forms import NormProbe
from fp8patch.plan.model import Decision, Plan, stock_class
from fp8patch.plan.walk import kind_of

__all__ = ["FORMAT_VERSION", "SIDECAR", "STATE", "load", "save"]

_WEIGHTS = "model.safetensors"
_WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_STAGING = ".fp8patch-save."


def save(model: nn.Module, directory: str | Path) -> None:
    """Save `model` and its FP8 state into `directory`, which is made if need be.

    A model with `save_pretrained` is saved by that; any other as `model.safetensors`, to be loaded
    with `load(directory, model=...)`. Wrappers (DDP, `torch.compile`) are looked through. Files
    are written aside and moved when all are complete. With several processes, call it in one.

    Raises:
        CheckpointError: Something can't be written; what was there before is untouched.
    """
    install()
    target = Path(directory).expanduser()
    inner = unwrap(model)
    with _staging(target) as staged:
        save_pretrained: Any = getattr(inner, "save_pretrained", None)
        if save_pretrained is not None:
            save_pretrained(staged)
        else:
            with stock_keys(inner):
                safetensors.torch.save_model(inner, str(staged / _WEIGHTS), {"format": "pt"})
        # Other libraries' save_pretrained does not know us.
        complete = has_sidecar(staged) or save_beside(inner, staged, first=True)
    if not complete:
        remove_sidecar(target)
        messages.note(f"{target}: the model is not converted, so it was saved as a plain one.")


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A directory in `target` whose files move there when the block ends."""
    try:
        with made(target):
            for old in abandoned(target, _STAGING):
                shutil.rmtree(old, ignore_errors=True)
            with workspace(target, _STAGING) as staged:
                yield staged
                _publish(staged, target)
    except OSError as error:
        raise write_error(target, error) from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{target}: the weights cannot be written: {error}. What was there before is "
            "untouched. Check the free space."
        ) from error


def _publish(staged: Path, target: Path) -> None:
    files = [path.relative_to(staged) for path in staged.rglob("*") if path.is_file()]
    # The sidecar last: after a crash in between its fingerprints tell that the weights are newer.
    for file in sorted(files, key=lambda file: (file.name == SIDECAR, file.name == STATE)):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        if file.name == STATE:  # from here on an older sidecar would name half of a new pair
            (target / SIDECAR).unlink(missing_ok=True)
        os.replace(staged / file, target / file)
    names = {file.as_posix() for file in files}
    if any(_WEIGHT_FILES.fullmatch(name) for name in names):
        for old in target.iterdir():
            if _WEIGHT_FILES.fullmatch(old.name) and old.name not in names:
                old.unlink()


def load(
    directory: str | Path,
    *,
    model: nn.Module | None = None,
    device: torch.device | str | int | None = None,
    backend: Backend = "auto",
    dtype: torch.dtype | None = None,
) -> Any:
    """The model that was saved in `directory`, converted as it was, with its FP8 state.

    Args:
        directory: Written by `save`, by a converted model's `save_pretrained`, by a Trainer, by
            `Accelerator.save_state`, or by `fp8patch convert`.
        model: Load into this one, converted alike or not at all. Needed where `directory` holds no
            transformers model; its class must be the one that was saved.
        device: Where the model goes.
        backend: What it is to run on. `fp8` is an error without the hardware, before anything is
            read; `auto` and `emulate` convert everywhere; `bf16` and `off` give the plain model,
            not converted. Which backend runs is up to `autocast` later.
        dtype: Dtype of the weights instead of the saved one. Their scales are then set anew.

    Returns:
        The model, in eval mode as from `from_pretrained`; `model` itself where that was given.

    Raises:
        CheckpointError: Files are missing, corrupt, of a newer format or of another model.
        HardwareError: `backend="fp8"` without the hardware.
    """
    install()
    source = Path(directory).expanduser()
    sidecar = for_this_rank(read_sidecar(source))
    plan = stored_plan(sidecar)
    rowwise = plan.recipe.scaling == "rowwise"
    execution = resolve_backend(backend, detect(device), fallback="emulate", rowwise=rowwise)
    if model is None:
        model = _from_pretrained(_model_class(source), source, dtype=dtype)
    else:
        _load_into(unwrap(model), source)
        if dtype is not None:
            model.to(dtype)
    if device is not None:
        model.to(device)
    if execution in ("fp8", "emulate"):
        _replay(unwrap(model), plan, sidecar)
    return model


# -- the plan -------------------------------------------------------------------------------------


def _replay(model: nn.Module, plan: Plan, sidecar: Sidecar) -> None:
    converted = find_converted(model)
    if converted is None:
        try:
            part = model.get_submodule(sidecar.root)
        except AttributeError:
            raise another_model(sidecar, f"this one has no {sidecar.root!r}") from None
        probe = NormProbe()
        for decision in plan.converted():
            _check(part, decision, sidecar, probe)
        convert_model(part, plan, allow_empty=True, extra_state=sidecar.extra_state)
        converted = find_converted(model)
    assert converted is not None
    restore(converted, sidecar)


def _check(part: nn.Module, decision: Decision, sidecar: Sidecar, probe: NormProbe) -> None:
    """Raise CheckpointError unless `part` has what the decision was taken on."""
    size = f"{decision.out_features} x {decision.in_features}"
    named = f"it names {decision.path!r} ({decision.class_name}, {size})"
    try:
        module = part.get_submodule(decision.path)
    except AttributeError:
        raise another_model(sidecar, f"{named}, which this model does not have") from None
    name = stock_class(module).__name__
    if name != decision.class_name:
        raise another_model(sidecar, f"{named}, and in this model that is a {name}")
    kind = kind_of(module, probe)
    if kind != decision.kind:
        found = f"a {name} is {'no norm' if kind is None else f'a {kind}'}"
        raise another_model(sidecar, f"{named} as a {decision.kind}, and {found}")
    weight = getattr(module, "weight", None)
    # A fingerprint is of the weight as it was saved; the plan may be older than a resize.
    if isinstance(weight, torch.Tensor) and decision.path not in sidecar.fingerprint:
        expected = {"linear": 2, "conv1d": 2}.get(decision.kind, 0)
        wanted = sorted((decision.out_features, decision.in_features))
        if expected and sorted(weight.shape) != wanted:
            raise another_model(sidecar, f"{named}, and here it is {list(weight.shape)}")


# -- the weights ----------------------------------------------------------------------------------


def _model_class(source: Path) -> Any:
    import transformers

    file = source / "config.json"
    if not file.is_file():
        kind = "adapter" if (source / "adapter_config.json").is_file() else "plain nn.Module"
        raise CheckpointError(
            f"{source}: holds no config.json (it was saved from an {kind}): build the model first "
            "and pass it: fp8patch.load(directory, model=model)."
        )
    names = read_config(file).get("architectures") or []
    for name in names:
        cls = getattr(transformers, str(name), None)
        if cls is not None:
            return cls
    raise CheckpointError(
        f"{file}: architectures is {names!r}, of which transformers {transformers.__version__} has "
        "none. Build the model yourself and pass it: fp8patch.load(directory, model=model)."
    )


def _from_pretrained(cls: Any, source: Path, **options: Any) -> Any:
    options = {name: value for name, value in options.items() if value is not None}
    try:
        model, report = cls.from_pretrained(
            source, local_files_only=True, output_loading_info=True, **options
        )
    except Exception as error:  # transformers and safetensors raise what they like
        raise CheckpointError(
            f"{source}: the weights cannot be loaded: {one_line(error)}. Copy the directory again "
            "from where it was saved."
        ) from error
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            keys = sorted(map(str, report[kind]))
            raise CheckpointError(
                f"{source}: the weights are incomplete: {len(keys)} {kind.replace('_', ' ')} "
                f"({keys[0]}, for one). Copy the directory again from where it was saved."
            )
    return model


def _load_into(model: Any, source: Path) -> None:
    if (source / "adapter_config.json").is_file() and hasattr(model, "load_adapter"):
        model.load_adapter(str(source), model.active_adapter, is_trainable=True)
        return
    if (source / "config.json").is_file() and hasattr(model, "from_pretrained"):
        # By way of a second model: only its own loader knows how keys on disk map to parameters.
        loaded = _from_pretrained(stock_class(model), source, config=model.config)
        state = loaded.state_dict()
    elif (source / _WEIGHTS).is_file():
        _load_plain(model, source / _WEIGHTS)
        return
    else:
        raise CheckpointError(f"{source}: holds no {_WEIGHTS}, so there are no weights to load.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"{source}: does not fit the model: {one_line(error)}.") from error


def _load_plain(model: nn.Module, file: Path) -> None:
    try:
        safetensors.torch.load_model(model, file)
    except SafetensorError as error:
        raise CheckpointError(
            f"{file}: corrupt: {one_line(error)}. Copy it again from where it was saved."
        ) from error
    except RuntimeError as error:
        raise CheckpointError(f"{file}: does not fit the model: {one_line(error)}.") from error
