"""Files that a command writes, complete or not there at all; pictures among them. No torch."""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp8patch.errors import Fp8PatchError

__all__ = ["figure", "partial_name", "publish"]

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

    Raises:
        Fp8PatchError: The file cannot be written.
    """
    partial = None
    try:
        with suppress(FileNotFoundError):
            # Raises what a name does that no file can have; `is_dir` would say no more than no.
            if stat.S_ISDIR(path.stat().st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial = partial_name(path)
        write(partial)
        if keep:
            partial.replace(path)
    except OSError as error:
        raise Fp8PatchError(f"{path}: cannot be written: {error.strerror}.") from None
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


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
