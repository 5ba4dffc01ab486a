"""Files that a command writes, complete or not there at all; pictures among them. No torch."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp8patch.errors import Fp8PatchError

__all__ = ["figure", "publish"]


def publish(path: Path, write: Callable[[Path], Any], *, keep: bool = True) -> None:
    """`write` to a temporary name in the folder of `path`, which it then replaces.

    Args:
        write: Is given the temporary name, which ends as `path` does.
        keep: False only tries whether it could be written.

    Raises:
        Fp8PatchError: The file cannot be written.
    """
    partial = path.parent / f".{os.getpid()}.{path.name}"
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        write(partial)
        if keep:
            partial.replace(path)
    except OSError as error:
        raise Fp8PatchError(f"{path}: cannot be written: {error.strerror}.") from None
    finally:
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
