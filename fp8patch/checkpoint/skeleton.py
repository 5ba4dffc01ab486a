"""A model without its weights: built on the meta device from a config, in the time it takes to say.

A 70B model is a few thousand module objects then, and no storage.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from fp8patch import messages
from fp8patch.errors import CheckpointError, PlanError
from fp8patch.messages import one_line

__all__ = ["model_from_config", "read_config"]

_PROBE_SECONDS = 3.0
# More than any config has, long lists of labels included.
_MOST_BYTES = 8 << 20


def model_from_config(source: str | Path, device: torch.device | str = "meta") -> nn.Module:
    """The model that `source` describes, in the class its config names, without its weights.

    Args:
        source: A model directory, a config.json, or a name on the Hugging Face hub. Code that comes
            with a model is never run.
        device: Where to build it; on any but meta its weights are random.

    Raises:
        CheckpointError: No such directory or file, no config in it, or one that cannot be read.
        PlanError: An architecture that transformers does not know, or that the config cannot build.
    """
    config = _config(source)
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 0:  # range(-1) builds a model without complaint
        raise PlanError(f"{source}: num_hidden_layers is {layers}. A model has 0 or more.")
    classes = _classes(config, source)
    failed = ""
    for cls in classes:
        with torch.device(device):
            try:
                build = getattr(cls, "from_config", cls)
                model: nn.Module = build(config)
            except Exception as error:
                # A constructor can fail in any way on values that nobody ever ran it with.
                failed = failed or f"{cls.__name__}: {one_line(error)}."
                continue
        # What is built is FP32; of the dtypes that a checkpoint may have, one changes the plan.
        return model.double() if getattr(config, "dtype", None) is torch.float64 else model
    raise PlanError(f"{source}: no model can be built from this config. {failed}")


def read_config(path: Path) -> dict[str, Any]:
    """The values of a config.json.

    Raises:
        CheckpointError: It cannot be read, or is no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except json.JSONDecodeError as error:
        raise _not_json(path, f"line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise _not_json(path, "nested too deeply") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CheckpointError(f"{path}: cannot be read: {reason}.") from None
    except ValueError as error:  # of int(): more digits than Python reads
        raise _not_json(path, str(error).split(";")[0]) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: a model's config is a JSON object, not {values!r:.40}.")
    return values


def _not_json(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: not valid JSON ({why}). Copy it again from where the model came from."
    )


def _number(values: dict[str, Any]) -> Any:
    """An infinity or nan, as transformers writes what JSON has no word for (Mamba-2 has one)."""
    return float(values["__float__"]) if list(values) == ["__float__"] else values


def _config(source: str | Path) -> Any:
    path = Path(source).expanduser()
    if path.is_dir():
        file = path / "config.json"
        if (path / "adapter_config.json").is_file() and not file.is_file():
            raise CheckpointError(
                f"{path}: this is a PEFT adapter, without a model. Plan the model it belongs to."
            )
        if not file.is_file():
            raise CheckpointError(f"{path}: not a model directory: it has no config.json.")
        return _local(file)
    if path.is_file():
        _check_file(path)
        return _local(path)
    text = str(source)
    if isinstance(source, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise CheckpointError(
            f"{source}: no such directory. Give a model directory, a config.json, or a hub name."
        )
    return _from_hub(text)


def _check_file(path: Path) -> None:
    """Raise for a file that is called something else than a config.json, and is none.

    By its size and its first character: this may be a checkpoint of any size.
    """
    if path.suffix == ".json":
        return
    try:
        with open(path, "rb") as file:
            start = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None
    if len(start) > _MOST_BYTES or not start.lstrip().startswith(b"{"):
        raise CheckpointError(
            f"{path}: not a config.json. Give a model directory, its config.json, or a hub name."
        )


def _local(file: Path) -> Any:
    import transformers

    values = read_config(file)
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"{file}: no model_type in it, so it is no transformers config.")
    if kind not in transformers.CONFIG_MAPPING:
        own = " It comes with code of its own, which is not run here." * ("auto_map" in values)
        raise PlanError(
            f"{file}: unknown architecture: transformers {transformers.__version__} has no model "
            f"type {kind!r}.{own}"
        )
    if "quantization_config" in values:
        messages.note(
            f"{file}: the weights of this checkpoint are quantised; the plan is that of the plain "
            f"model, and convert refuses the checkpoint."
        )
        del values["quantization_config"]
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:
        # Configs check their values in ways of their own, and raise what they like.
        raise CheckpointError(f"{file}: not a valid {kind} config: {one_line(error)}.") from None


def _from_hub(name: str) -> Any:
    from transformers import AutoConfig

    online = _hub_answers()
    try:
        return AutoConfig.from_pretrained(
            name, trust_remote_code=False, local_files_only=not online
        )
    except (OSError, ValueError) as error:
        why = f"the hub has none for us either: {one_line(error)}"
        if not online:
            why = "the Hugging Face hub cannot be reached, nor is the model in its cache here"
        raise CheckpointError(
            f"{name}: no such directory, and {why}. Give a model directory or a config.json."
        ) from None


def _hub_answers() -> bool:
    """Whether a connection to the hub opens; its client retries for half a minute otherwise."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _classes(config: Any, source: str | Path) -> list[Any]:
    """The class that the config names, or else the auto classes that may know its model type."""
    import transformers

    listed = config.architectures if isinstance(config.architectures, list) else []
    named = [name for name in listed if isinstance(name, str)]
    cls = getattr(transformers, named[0], None) if named else None
    if isinstance(cls, type) and issubclass(cls, nn.Module):
        return [cls]
    auto: list[Any] = [transformers.AutoModelForCausalLM, transformers.AutoModel]
    known = [each for each in auto if type(config) in each._model_mapping]
    if not known:
        raise PlanError(
            f"{source}: unknown architecture {named[0] if named else config.model_type!r}: "
            f"transformers {transformers.__version__} has no class for it."
        )
    missing = f"has no class {named[0]}" if named else "is not told which class it is"
    messages.note(f"{source}: transformers {missing}; planned as {known[0].__name__} builds it.")
    return known
