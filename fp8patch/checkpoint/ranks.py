"""What each rank of a distributed run has seen by itself, in a file beside the sidecar.

    fp8patch_state.rank1.safetensors    <path>.<role>.amax | .counts of every slot

Where amax are reduced over the ranks, they all scale alike, and since the last step each has seen
its own batches: pending amax and counts. Where nothing is reduced (under `join()`, or under FSDP),
history and scales are its own as well. The sidecar itself is rank 0's. No rank waits for another
here: scripts save on all ranks, or on one.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from fp8patch import messages
from fp8patch.checkpoint.checks import slot_states
from fp8patch.checkpoint.sidecar import Sidecar, rank_files, rank_name, slot_tensors
from fp8patch.checkpoint.workspace import replace_together, write_error
from fp8patch.errors import CheckpointError
from fp8patch.slots import NEVER_SET, SlotState

__all__ = ["for_this_rank", "of_all", "place", "write_rank_file"]

_States = Mapping[tuple[str, int], SlotState]


def place() -> tuple[int, int]:
    """This process's rank, and how many there are; (0, 1) without torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def of_all(group: Any) -> bool:
    """Is `group` (or None) one of all ranks?"""
    return group is not None and torch.distributed.get_world_size(group) == place()[1]


# -- writing --------------------------------------------------------------------------------------


def write_rank_file(
    directory: str | Path,
    state: _States,
    fingerprint: Mapping[str, str],
    *,
    reduced: bool,
    index: int = 0,
) -> None:
    """Write this rank's. The directory is made: other ranks may be faster than the first.

    Args:
        state, fingerprint: As in the sidecar of the same model at the same step.
        reduced: History and scales are the same on all ranks.

    Raises:
        CheckpointError: It can't be written.
    """
    rank, size = place()
    if reduced:
        none = {"history": NEVER_SET.history, "scale": NEVER_SET.scale}
        kept = {key: slot._replace(**none) for key, slot in state.items()}
    else:
        kept = dict(state)
    metadata = {"world_size": str(size), "reduced": str(reduced)}
    metadata["of"] = _digest(state, fingerprint, reduced=reduced)
    name = rank_name(rank, index)
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(directory, error) from error
    data = safetensors.torch.save(slot_tensors(kept), metadata)
    replace_together(Path(directory), {name: data})


def _digest(state: _States, fingerprint: Mapping[str, str], *, reduced: bool) -> str:
    """Of what the ranks have in common: tells the files of one save from those of another."""
    digest = hashlib.blake2b(digest_size=16)
    if not reduced:
        digest.update(repr(sorted(fingerprint.items())).encode())
        return digest.hexdigest()
    for path, role in sorted(key for key, slot in state.items() if len(slot.history)):
        slot = state[path, role]
        digest.update(f"{path} {role} ".encode())
        digest.update(slot.history.numpy().tobytes() + slot.scale.numpy().tobytes())
    return digest.hexdigest()


# -- reading --------------------------------------------------------------------------------------


def for_this_rank(sidecar: Sidecar, *, index: int = 0) -> Sidecar:
    """The sidecar with what this rank had seen in place of what rank 0 had.

    In a run of another number of ranks: with the largest pending amax of all, which is what they
    were going to be reduced to. Where that can't be had, what rank 0 had seen, and rank 0 says so.

    Raises:
        CheckpointError: A rank's file is corrupt.
    """
    if sidecar.world_size == 1:
        return sidecar
    rank, size = place()
    directory = sidecar.path.parent
    files = {
        of: path
        for of, path in rank_files(directory, index)
        if 0 < of < sidecar.world_size and _is_of(path, sidecar)
    }
    complete = len(files) == sidecar.world_size - 1
    if size == sidecar.world_size:
        if rank == 0 and not complete:
            messages.note(
                f"{directory}: of {size} ranks, {len(files) + 1} saved FP8 state in this save: the "
                "others go on from what rank 0 had seen."
            )
        return replace(sidecar, state=_own(sidecar, files[rank])) if rank in files else sidecar
    together = complete and all(_reduced(path) for path in files.values())
    if rank == 0:
        seen = "the largest amax that any of them had seen" if together else "what rank 0 had seen"
        messages.note(
            f"{directory}: saved by {sidecar.world_size} ranks, and this run has {size}: it goes "
            f"on from {seen} since the last step."
        )
    return replace(sidecar, state=_largest(sidecar, files.values())) if together else sidecar


def _own(sidecar: Sidecar, path: Path) -> dict[tuple[str, int], SlotState]:
    own = _read(path)
    if not _reduced(path):
        return own
    states = {}
    for key, slot in own.items():
        common = sidecar.state.get(key, NEVER_SET)
        states[key] = slot._replace(history=common.history, scale=common.scale)
    return states


def _largest(sidecar: Sidecar, paths: Iterable[Path]) -> dict[tuple[str, int], SlotState]:
    states = dict(sidecar.state)
    for path in paths:
        for key, slot in _read(path).items():
            before = states.get(key, NEVER_SET)
            states[key] = before._replace(amax=torch.maximum(before.amax, slot.amax))
    return states


def _is_of(path: Path, sidecar: Sidecar) -> bool:
    """Was the file written in the same save as the sidecar?"""
    metadata = _metadata(path)
    reduced = metadata.get("reduced") == "True"
    expected = _digest(sidecar.state, sidecar.fingerprint, reduced=reduced)
    return (metadata.get("of"), metadata.get("world_size")) == (expected, str(sidecar.world_size))


def _reduced(path: Path) -> bool:
    return _metadata(path).get("reduced") == "True"


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _corrupt(path, error) from None


def _read(path: Path) -> dict[tuple[str, int], SlotState]:
    try:
        return slot_states(safetensors.torch.load_file(path))
    except (SafetensorError, OSError, ValueError) as error:
        raise _corrupt(path, error) from None


def _corrupt(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: corrupt: {messages.one_line(error)}. Copy it again from where it was saved; or "
        "delete it, and the run goes on from what rank 0 had seen."
    )
