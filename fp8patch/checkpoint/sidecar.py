"""The sidecar: what a converted model has besides its weights, in two files beside them.

    fp8patch.json               format, plan with recipe, what the first step showed, fingerprints
    fp8patch_state.safetensors  <path>.<role>.history | .scale | .amax | .counts of every slot

Everything here works on plain data, so that a checkpoint can be converted without a live model.
Both files are written under a temporary name and renamed when both are complete; the JSON holds a
digest of the state, so that a mixture of two saves is found out.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fp8patch import __version__
from fp8patch.checkpoint.checks import (
    SLOT_PARTS,
    check_siblings,
    flag,
    format_version,
    json_object,
    slot_states,
    text,
    texts,
)
from fp8patch.checkpoint.workspace import replace_together
from fp8patch.errors import CheckpointError
from fp8patch.slots import ROLES, SlotState

__all__ = [
    "FORMAT_VERSION",
    "SIDECAR",
    "STATE",
    "BankMeta",
    "Sidecar",
    "all_names",
    "file_names",
    "fingerprint",
    "has_sidecar",
    "rank_files",
    "rank_name",
    "read_sidecar",
    "remove_rank_files",
    "remove_sidecar",
    "slot_tensors",
    "write_sidecar",
]

SIDECAR = "fp8patch.json"
STATE = "fp8patch_state.safetensors"
FORMAT_VERSION = 1

_SAMPLED_ROWS = 16
_SAMPLED_COLUMNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BankMeta:
    """What a bank knows besides the numbers in its slots; the defaults are a new bank's.

    Attributes:
        siblings: {path: path of the module whose input slot it uses}.
        low_precision_norms: Paths of the norms that write the autocast dtype.
        norm_readers: {path of a norm: path of a module that reads its output}.
        observed: The first training step is over.
        stepped: An optimizer has stepped since the last update.
        backward_finished: So has a backward.
        optimizer_seen: An optimizer that owns the parameters has stepped at some time.
    """

    siblings: Mapping[str, str] = field(default_factory=dict)
    low_precision_norms: tuple[str, ...] = ()
    norm_readers: Mapping[str, str] = field(default_factory=dict)
    observed: bool = False
    stepped: bool = False
    backward_finished: bool = False
    optimizer_seen: bool = False

    @classmethod
    def flags(cls) -> tuple[str, ...]:
        """Names of the fields that are true or false."""
        return tuple(item.name for item in fields(cls) if item.type is bool)

    @classmethod
    def clock_flags(cls) -> tuple[str, ...]:
        """Those of them that a bank's `StepClock` has too."""
        return tuple(name for name in cls.flags() if name != "observed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What the two files hold.

    Attributes:
        path: The JSON file it was read from.
        version: The fp8patch that wrote it.
        plan: `Plan.to_dict()`; its paths are relative to `root`.
        bank: See `BankMeta`.
        state: {(path, index into `slots.ROLES`): SlotState on the CPU} of slots that saw something.
        fingerprint: {path of a converted GEMM module: `fingerprint` of its weight}; a weight that
            could not be read whole is left out.
        root: Path of the converted part in the model that was saved; "" for the whole.
        extra_state: The model puts its state into `state_dict()` too.
        world_size: Ranks of the run that saved it; see ranks.py.
    """

    path: Path
    version: str
    plan: dict[str, Any]
    bank: BankMeta
    state: dict[tuple[str, int], SlotState]
    fingerprint: dict[str, str]
    root: str = ""
    extra_state: bool = False
    world_size: int = 1


def file_names(index: int = 0) -> tuple[str, str]:
    """Names of the two files; those of a second and third model are numbered as accelerate does."""
    if index == 0:
        return SIDECAR, STATE
    return SIDECAR.replace(".", f"_{index}."), STATE.replace(".", f"_{index}.")


def has_sidecar(directory: str | Path, index: int = 0) -> bool:
    """Whether there is a sidecar in `directory`, readable or not."""
    return (Path(directory) / file_names(index)[0]).is_file()


def rank_name(rank: int, index: int = 0) -> str:
    """Name of the file of a rank other than the first; see ranks.py."""
    return file_names(index)[1].replace(".", f".rank{rank}.")


def rank_files(directory: str | Path, index: int = 0) -> list[tuple[int, Path]]:
    """(rank, file) of those in `directory`."""
    pattern = re.compile(rank_name(0, index).replace(".", r"\.").replace("rank0", r"rank(\d+)"))
    found = [(pattern.fullmatch(path.name), path) for path in Path(directory).glob("*.rank*.*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def all_names(directory: str | Path, index: int = 0) -> tuple[str, ...]:
    """Names of the two files, and of those of ranks that are in `directory`."""
    return (*file_names(index), *(path.name for _, path in rank_files(directory, index)))


def remove_rank_files(directory: str | Path, index: int = 0, *, above: int) -> None:
    """Remove those of ranks above `above`: an earlier save was of more."""
    for rank, path in rank_files(directory, index):
        if rank > above:
            path.unlink(missing_ok=True)


def remove_sidecar(directory: str | Path, index: int = 0) -> bool:
    """Remove all its files; returns whether there were any."""
    removed = False
    for name in file_names(index):
        path = Path(directory) / name
        if path.is_file():
            path.unlink()
            removed = True
    remove_rank_files(directory, index, above=0)
    return removed


def fingerprint(weight: Any) -> str:
    """dtype, shape and a hash of a sample of up to 16 x 64 elements, evenly spaced.

    `weight` is a Tensor, or what `safe_open(...).get_slice(name)` gives: both yield the same
    string for the same values of the same dtype. At most 16 rows are read.
    """
    shape = tuple(weight.get_shape() if hasattr(weight, "get_shape") else weight.shape)
    rows = _spread(shape[0] if shape else 0, _SAMPLED_ROWS)
    sample = [weight[row : row + 1].detach().reshape(-1) for row in rows]
    if rows and sample[0].numel():
        columns = torch.tensor(_spread(sample[0].numel(), _SAMPLED_COLUMNS))
        picked = torch.stack(sample)[:, columns.to(sample[0].device)].cpu().contiguous()
    else:
        picked = weight[:].detach().reshape(-1).cpu()
    digest = hashlib.blake2b(picked.view(torch.uint8).numpy().tobytes(), digest_size=8)
    return f"{str(picked.dtype).removeprefix('torch.')} {list(shape)} {digest.hexdigest()}"


def _spread(size: int, most: int) -> list[int]:
    """Up to `most` indices into `size`, evenly spaced, the first and the last among them."""
    if size <= most:
        return list(range(size))
    return [round(i * (size - 1) / (most - 1)) for i in range(most)]


# -- writing --------------------------------------------------------------------------------------


def write_sidecar(
    directory: str | Path,
    plan: Mapping[str, Any],
    bank_meta: BankMeta,
    slot_state: Mapping[tuple[str, int], SlotState],
    fingerprint: Mapping[str, str],
    *,
    root: str = "",
    extra_state: bool = False,
    world_size: int = 1,
    index: int = 0,
) -> None:
    """Write both files into `directory`, which exists. Arguments as the fields of `Sidecar`.

    Raises:
        CheckpointError: They can't be written; what was there before is untouched.
    """
    sidecar_name, state_name = file_names(index)
    state = safetensors.torch.save(slot_tensors(slot_state))
    values = {
        "format_version": FORMAT_VERSION,
        "fp8patch_version": __version__,
        "root": root,
        "extra_state": extra_state,
        "world_size": world_size,
        "bank": {
            "siblings": dict(bank_meta.siblings),
            "low_precision_norms": sorted(bank_meta.low_precision_norms),
            "norm_readers": dict(bank_meta.norm_readers),
            **{name: getattr(bank_meta, name) for name in BankMeta.flags()},
        },
        "fingerprint": dict(fingerprint),
        "state": {"file": state_name, "digest": _digest(state)},
        "plan": dict(plan),
    }
    text = json.dumps(values, indent=1, ensure_ascii=False).encode()
    replace_together(Path(directory), {state_name: state, sidecar_name: text})


def slot_tensors(state: Mapping[tuple[str, int], SlotState]) -> dict[str, Tensor]:
    """{name in a file: tensor}; `checks.slot_states` is the way back."""
    tensors = {}
    for (path, role), slot in state.items():
        for name in SLOT_PARTS:
            # A copy each: safetensors refuses tensors that share memory.
            value = getattr(slot, name).detach().cpu().contiguous().clone()
            tensors[".".join(filter(None, (path, ROLES[role], name)))] = value
    return tensors


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# -- reading --------------------------------------------------------------------------------------


def read_sidecar(directory: str | Path, *, index: int = 0) -> Sidecar:
    """Read and check both files.

    Raises:
        CheckpointError: One is missing, corrupt, of a newer format, or from another save.
    """
    path = Path(directory) / file_names(index)[0]
    try:
        return _sidecar(path, json_object(_read_text(path)))
    except KeyError as error:
        raise _corrupt(path, f"{error.args[0]!r} is missing") from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _corrupt(path, str(error)) from None


def _sidecar(path: Path, values: dict[str, Any]) -> Sidecar:
    """ValueError, TypeError or KeyError for what no sidecar holds."""
    version, writer = format_version(values), text(values, "fp8patch_version")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: written by fp8patch {writer} in format {version}; this is fp8patch "
            f"{__version__}, which reads formats up to {FORMAT_VERSION}. Upgrade fp8patch."
        )
    bank = values["bank"]
    meta = BankMeta(
        siblings=texts(bank, "siblings"),
        low_precision_norms=tuple(map(str, bank["low_precision_norms"])),
        norm_readers=texts(bank, "norm_readers") if "norm_readers" in bank else {},
        **{name: flag(bank, name) for name in BankMeta.flags()},
    )
    check_siblings(meta.siblings)
    return Sidecar(
        path=path,
        version=writer,
        plan=dict(values["plan"]),
        bank=meta,
        state=_read_state(path.parent / text(values["state"], "file"), values["state"]),
        fingerprint=texts(values, "fingerprint"),
        root=text(values, "root"),
        extra_state=flag(values, "extra_state"),
        world_size=_world_size(values),
    )


def _world_size(values: Any) -> int:
    size = values.get("world_size", 1)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"world_size is {size!r:.40}, not a number from 1")
    return size


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise CheckpointError(f"{path.parent}: no such directory. Check the path.") from None
        raise CheckpointError(
            f"{path.parent}: holds no {path.name}, so no converted model was saved here. Load it "
            "as a plain model, and convert that with fp8patch.convert_model."
        ) from None
    except UnicodeDecodeError as error:
        raise _corrupt(path, f"not valid JSON ({error})") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None


def _read_state(path: Path, expected: Mapping[str, Any]) -> dict[tuple[str, int], SlotState]:
    if path.name != str(expected["file"]):
        raise ValueError(f"state file {expected['file']!r} is not a plain file name")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _corrupt(path, "the file is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None
    if _digest(data) != expected["digest"]:
        raise _corrupt(path, f"truncated, damaged, or of another save than {SIDECAR}")
    try:
        return slot_states(safetensors.torch.load(data))
    except Exception as error:  # SafetensorError derives from Exception alone
        raise _corrupt(path, str(error)) from None


def _corrupt(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: corrupt: {why}. Copy it again from where it was saved; or delete {SIDECAR} and "
        f"{STATE}, and convert the plain model anew."
    )
