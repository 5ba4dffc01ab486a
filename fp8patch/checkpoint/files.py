"""Write a directory that appears whole or not at all, and copy one into it.

The work happens in a hidden, locked directory (workspace.py), which is renamed when it
is complete: `staging`, in a sibling `.NAME.fp8patch-new-…`.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fp8patch import messages
from fp8patch.checkpoint.sidecar import SIDECAR
from fp8patch.checkpoint.workspace import (
    abandoned,
    locked,
    unique,
    why,
    workspace,
    write_error,
)
from fp8patch.errors import CheckpointError

__all__ = [
    "Progress",
    "check_target",
    "copy_tree",
    "files_below",
    "made",
    "staging",
]

# (stage, done, total): bytes for "copy", tensors for "weights", texts for "calibrate".
Progress = Callable[[str, int, int], None]

_CHUNK = 8 << 20
# Of the 255 bytes a name may have, what is left by ".NAME.fp8patch-new-" and eight letters.
_LONGEST = 255 - len("..fp8patch-new-") - 8
# ioctl of Linux: the target shares the source's blocks until either is written to.
_FICLONE = 0x40049409
# Any one of them says that a directory is a checkpoint, which --force may replace.
_MARKS = ("config.json", "adapter_config.json", SIDECAR)


def check_target(source: Path, out: Path, *, force: bool) -> None:
    """Raise unless `out` may be written from `source`.

    Raises:
        CheckpointError: `out` exists and `force` is not set, is no checkpoint, or is `source`, in
            it or around it.
    """
    real, target = source.resolve(), out.resolve()
    if target == real:
        raise CheckpointError(f"{out}: this is the directory to read from. Name another to write.")
    if target.is_relative_to(real):
        raise CheckpointError(f"{out}: lies inside {source}. Name a directory outside it.")
    if real.is_relative_to(target):
        raise CheckpointError(f"{out}: {source} lies inside it. Name another directory to write.")
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CheckpointError(f"{out}: exists and is no directory. Name another.")
    if not force:
        raise _exists(out)
    if any(target.iterdir()) and not any((target / mark).exists() for mark in _MARKS):
        raise CheckpointError(
            f"{out}: exists and is no model directory, so it is not replaced even with force. "
            "Name another, or remove it yourself."
        )


@contextmanager
def staging(out: Path, *, force: bool) -> Iterator[Path]:
    """A new empty directory that becomes `out` when the block ends, and vanishes if it raises.

    Raises:
        CheckpointError: The directory cannot be made, filled (disk full) or renamed.
    """
    out = out.resolve()
    try:
        with made(out.parent):
            if _sweep(out) and not force:
                raise _exists(out)
            with workspace(out.parent, f"{_prefix(out)}new-") as work:
                yield work
                _publish(work, out, force)
    except OSError as error:
        raise write_error(out, error) from None


@contextmanager
def made(directory: Path) -> Iterator[None]:
    """Make `directory` and what is above it; remove again what is empty if the block raises.

    Raises:
        OSError: It cannot be made.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):  # never made, or not empty
                path.rmdir()
        raise


def files_below(directory: Path) -> list[Path]:
    """Relative paths of all files in `directory`, sorted, links followed (a hub cache is links).

    Raises:
        CheckpointError: A link that leads nowhere, or a directory that cannot be listed.
    """
    found: list[Path] = []
    pending: list[tuple[Path, tuple[Path, ...]]] = [(Path(), (directory.resolve(),))]
    while pending:
        inside, above = pending.pop()
        try:
            entries = list((directory / inside).iterdir())
        except OSError as error:
            raise CheckpointError(f"{directory / inside}: cannot be listed: {why(error)}") from None
        for entry in entries:
            relative, real = inside / entry.name, entry.resolve()
            if entry.is_dir():
                # A link to a directory above would never end.
                if real not in above:
                    pending.append((relative, (*above, real)))
            elif entry.is_file():
                found.append(relative)
            elif not entry.exists():
                raise CheckpointError(
                    f"{entry}: a link to {os.readlink(entry)}, which is not there. Download or "
                    "copy the model again."
                )
            else:
                messages.note(f"{entry}: neither file nor directory, so it is not copied.")
    return sorted(found)


def copy_tree(
    source: Path, target: Path, *, leave_out: Collection[str], progress: Progress | None = None
) -> None:
    """Copy every file of `source` into the empty `target`, but those named in `leave_out`.

    The contents are shared with the source where the filesystem can (a reflink: writing to one
    never shows in the other), and copied otherwise. Never a hard link: whoever edits one of the two
    checkpoints must not edit both.

    Raises:
        CheckpointError: A file cannot be read or written.
    """
    files = [file for file in files_below(source) if file.as_posix() not in leave_out]
    total = sum((source / file).stat().st_size for file in files)
    done = 0

    def moved(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress("copy", done, total)

    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        _copy(source / file, target / file, moved)


def _copy(source: Path, target: Path, moved: Callable[[int], None]) -> None:
    try:
        with open(source, "rb") as reader:
            with open(target, "xb") as writer:
                if _reflink(reader, writer):
                    moved(os.fstat(reader.fileno()).st_size)
                    return
                while chunk := reader.read(_CHUNK):
                    writer.write(chunk)
                    moved(len(chunk))
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be copied: {why(error)}") from None


def _reflink(reader: BinaryIO, writer: BinaryIO) -> bool:
    try:
        fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
    except OSError:
        return False  # another filesystem, or one that cannot share
    return True


def _prefix(out: Path) -> str:
    """No other name's: what begins with it is removed, or put back as `out`."""
    name = os.fsencode(out.name)
    if len(name) <= _LONGEST:
        return f".{out.name}.fp8patch-"
    return f".{hashlib.sha256(name).hexdigest()}.fp8patch-"


def _exists(out: Path) -> CheckpointError:
    return CheckpointError(
        f"{out}: exists already. Name another, or replace it with --force (in Python: force=True), "
        "which keeps it until the new one is complete."
    )


def _sweep(out: Path) -> bool:
    """Remove what dead processes have left beside `out`; returns whether that brought it back."""
    restored = False
    for path in abandoned(out.parent, _prefix(out)):
        if path.name.startswith(_prefix(out) + "old-") and not out.exists():
            # Killed between two renames: this is what `out` was.
            os.rename(path, out)
            restored = True
            messages.note(f"{out}: put back as it was before a convert that was killed.")
        else:
            shutil.rmtree(path, ignore_errors=True)
    return restored


def _publish(work: Path, out: Path, force: bool) -> None:
    if not (force and out.exists()):
        os.rename(work, out)  # fails where somebody else has filled `out` by now
        return
    old = unique(out.parent, f"{_prefix(out)}old-")
    lock = locked(out)  # it goes along when `out` is renamed
    try:
        os.rename(out, old)
        try:
            os.rename(work, out)
        except BaseException:
            os.rename(old, out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if lock is not None:
            os.close(lock)
