"""Files that a command writes, complete or not there at all; pictures among them. No torch."""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp8patch.errors import Fp8PatchError

__all__ = ["figure", "holds", "partial_name", "publish"]

_KEPT = 50  # characters, at most 200 bytes, of the 255 that a name may have


def partial_name(path: Path) -> Path:
    """Where this process writes what becomes `path`: beside it, hidden, ending as `path` does.

    Any name that a file can have leads to one that a file can have, the longest too.
    """
    return path.with_name(f".{os.getpid()}.{path.name[-_KEPT:]}")


def publish(path: Path, write: Callable[[Path], Any], *, keep: bool = True) -> None:
    """`write` to a temporary name in the folder of `path`, which it then replaces.

    Args:
        write: Is given the temporary name, which ends as `path` does.
        keep: False only tries whether it could be written.

    A link stays, and what it names is replaced.

    Raises:
        Fp8PatchError: The file cannot be written, or is none that can be replaced.
    """
    partial = None
    try:
        target = Path(os.path.realpath(path))
        with suppress(FileNotFoundError):
            # Raises what a name does that no file can have; `is_dir` would say no more than no.
            mode = target.stat().st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(mode):
                raise Fp8PatchError(f"{path}: is a device or a pipe. Name a file.")
        partial = partial_name(target)
        write(partial)
        if keep:
            partial.replace(target)
    except OSError as error:
        raise Fp8PatchError(
            f"{path}: cannot be written: {error.strerror}. Check the path, its permissions and the "
            "disk."
        ) from None
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def holds(path: Path, mark: bytes) -> bool:
    """Is `mark` in the first bytes of the file? (A picture has its size before it.)"""
    with path.open("rb") as file:
        return mark in file.read(256)


def figure(what: str, instead: str, **options: Any) -> Any:
    """A `matplotlib.figure.Figure` that needs no display.

    Args:
        what: That needs it, as "a chart".
        instead: What the user has without it, a sentence.

    Raises:
        Fp8PatchError: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Fp8PatchError(
            f"{what} needs matplotlib: pip install 'fp8patch[plot]'. {instead}"
        ) from None
    return Figure(**options)
