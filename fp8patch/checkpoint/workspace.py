"""Files that appear whole, or not at all: written in a hidden directory, and renamed.

Its owner holds a lock on it, which the kernel drops when the process dies in whatever way: what is
left of a killed process is unlocked, and removed by the next one that writes there. A process id
would not do: on a shared filesystem the owner may live on another host, or in another container.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fp8patch.errors import CheckpointError

__all__ = ["abandoned", "locked", "replace_together", "unique", "why", "workspace", "write_error"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What `replace_together` makes in a checkpoint.
_HIDDEN = ".fp8patch-files."


@contextmanager
def workspace(parent: Path, prefix: str) -> Iterator[Path]:
    """A new empty directory `parent/prefix…`, locked; removed when the block ends, if still there.

    Raises:
        OSError: It cannot be made.
    """
    work, lock = _locked_directory(parent, prefix)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """The directories `parent/prefix…` whose owners are dead, each locked while it is the current
    one. Where there are no locks, none: whether an owner lives cannot be told there."""
    for path in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        lock = locked(path)
        if lock is None:
            continue
        try:
            yield path
        finally:
            os.close(lock)


def replace_together(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write `files`, by name, into `directory`, which exists.

    The last of them says that there are any: it goes first, and comes last. Whoever is killed in
    between leaves what reads as none, and not two halves.

    Raises:
        CheckpointError: They can't be written; what was there before is untouched.
    """
    target = directory
    try:
        for left in abandoned(directory, _HIDDEN):
            shutil.rmtree(left, ignore_errors=True)
        with workspace(directory, _HIDDEN) as work:
            for name, data in files.items():
                target = directory / name
                _write_bytes(work / name, data)
            target.unlink(missing_ok=True)
            for name in files:
                target = directory / name
                os.replace(work / name, target)
    except OSError as error:
        raise write_error(target, error) from error


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def why(error: OSError) -> str:
    """The cause of a failed read or write as a sentence, with what to do about a full disk."""
    if error.errno in _FULL:
        return "the disk is full. Free some space there, or write elsewhere."
    return f"{error.strerror or error}."


def write_error(path: str | Path, error: OSError) -> CheckpointError:
    """What to raise when `path` could not be written."""
    remedy = "" if error.errno in (*_FULL, errno.EFBIG) else " Check the path and its permissions."
    return CheckpointError(
        f"{path}: cannot be written: {why(error)}{remedy} What was there before is untouched."
    )


def unique(parent: Path, prefix: str) -> Path:
    """A path `parent/prefix…` that nobody else makes."""
    return parent / f"{prefix}{secrets.token_hex(4)}"


def locked(directory: Path) -> int | None:
    """A descriptor that holds the lock on `directory`; None where another process does, or where
    the filesystem has no locks."""
    try:
        return _lock(directory)
    except OSError:
        return None


def _lock(directory: Path) -> int:
    """Raises FileNotFoundError if it is gone, BlockingIOError if another process has the lock,
    another OSError where there are no locks."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever swept it between our two calls had it locked, and has it removed by now.
        if os.stat(directory).st_ino != os.fstat(descriptor).st_ino:
            raise FileNotFoundError(directory)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _locked_directory(parent: Path, prefix: str) -> tuple[Path, int]:
    """An empty directory, and its lock (-1 where there are no locks: never swept then)."""
    while True:
        work = unique(parent, prefix)
        work.mkdir()  # not mkdtemp, whose 0700 would be the mode of what it becomes for good
        try:
            return work, _lock(work)
        except (FileNotFoundError, BlockingIOError):
            continue  # taken for abandoned before it was locked: it is being removed
        except OSError:
            return work, -1
