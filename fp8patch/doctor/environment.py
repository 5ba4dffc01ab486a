"""Settings of the user's that change what a run of fp8patch does, each with what to do about it."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8patch.doctor.types import Interference

__all__ = ["accelerate_config", "find_interference"]

_TRUE = ("1", "true", "yes", "on", "y", "t")


def _on(value: str) -> bool:
    return value.strip().lower() in _TRUE


@dataclass(frozen=True, slots=True)
class _Rule:
    """When a variable interferes, and how. A name that ends with `*` is a prefix."""

    name: str
    bites: Callable[[str], bool]
    effect: str
    fix: str


_RULES = (
    _Rule(
        "ACCELERATE_MIXED_PRECISION",
        lambda value: value.strip().lower() == "fp8",
        "Accelerate would convert the model by itself; `fp8patch train` refuses to start",
        "unset it, or set it to bf16: fp8patch adds FP8",
    ),
    _Rule(
        "ACCELERATE_FP8_*",
        lambda value: True,
        "configures Accelerate's own FP8, which is off under fp8patch: it has no effect there",
        "unset it, and say it in a recipe (fp8patch recipes)",
    ),
    _Rule(
        "ACCELERATE_USE_DEEPSPEED",
        _on,
        "the run uses DeepSpeed, which owns the weights; fp8patch refuses such a model",
        "use DDP or FSDP2",
    ),
    _Rule(
        "FSDP_USE_ORIG_PARAMS",
        lambda value: not _on(value),
        "FSDP1 flattens the weights into one tensor; fp8patch refuses such a model",
        "set it to true, or use FSDP_VERSION=2",
    ),
    _Rule(
        "TRITON_INTERPRET",
        _on,
        "kernels run in Triton's interpreter, on the CPU: far slower, and it does not round FP8 to "
        "nearest even",
        "unset it",
    ),
    _Rule(
        "CUDA_VISIBLE_DEVICES",
        lambda value: value.strip() in ("", "-1", "none", "None", "NoDevFiles"),
        "hides every GPU from PyTorch",
        "unset it, or name a GPU: CUDA_VISIBLE_DEVICES=0",
    ),
    _Rule(
        "CUDA_LAUNCH_BLOCKING",
        _on,
        "the CPU waits for every kernel: step times say nothing",
        "unset it once you are done debugging",
    ),
    _Rule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        lambda value: True,
        "every tensor is allocated and freed by the driver: step times say nothing",
        "unset it",
    ),
    *(
        _Rule(
            name,
            lambda value: value == "1",
            "torch.compile does nothing: FP8 runs eager, where launches cost more than small "
            "layers gain",
            "unset it",
        )
        for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    ),
)


def find_interference(environ: Mapping[str, str] | None = None) -> list[Interference]:
    """What of `environ` (this process's own by default) and of Accelerate's default config bites.

    FSDP's flag counts only where FSDP1 is chosen in the same environment.
    """
    variables = os.environ if environ is None else environ
    found = [
        Interference(name=name, value=value, effect=rule.effect, fix=rule.fix)
        for rule in _RULES
        for name, value in sorted(variables.items())
        if _names(rule.name, name) and rule.bites(value) and _applies(rule.name, variables)
    ]
    return found + _patched_shell(variables) + _accelerate_config(variables)


def _names(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def _applies(rule: str, variables: Mapping[str, str]) -> bool:
    if rule != "FSDP_USE_ORIG_PARAMS":
        return True
    version = variables.get("FSDP_VERSION", "1").strip()
    return _on(variables.get("ACCELERATE_USE_FSDP", "")) and version != "2"


def _patched_shell(variables: Mapping[str, str]) -> list[Interference]:
    """The variables of a run, left over in a shell: every Python in it would be patched."""
    from fp8patch.train_options import ENV

    entries = variables.get("PYTHONPATH", "").split(os.pathsep)
    ours = any(Path(entry).name == "bootstrap" and "fp8patch" in entry for entry in entries)
    if ENV not in variables or not ours:
        return []
    return [
        Interference(
            name=ENV,
            value="set, with fp8patch's bootstrap on PYTHONPATH",
            effect="every Python process started here is patched as if by `fp8patch train`",
            fix=f"unset {ENV} and PYTHONPATH, or open a new shell",
        )
    ]


def _accelerate_config(variables: Mapping[str, str]) -> list[Interference]:
    """`accelerate launch` reads its precision from this file where no flag says one."""
    file = accelerate_config(variables)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    if re.search(r"""^mixed_precision:\s*["']?fp8["']?\s*$""", text, re.MULTILINE) is None:
        return []
    return [
        Interference(
            name=str(file),
            value="mixed_precision: fp8",
            effect="`accelerate launch` turns on Accelerate's own FP8, which fp8patch refuses",
            fix="run `accelerate config` again, or launch with --mixed_precision bf16",
        )
    ]


def accelerate_config(variables: Mapping[str, str]) -> Path:
    """Where `accelerate config` writes, and `accelerate launch` reads."""
    cache = variables.get("XDG_CACHE_HOME", "~/.cache")
    home = variables.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"
