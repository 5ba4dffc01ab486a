"""The one place where the library writes a line: to stderr, with the prefix "fp8patch: ".

Standard output belongs to the command line, and to the user's own script when we run inside it.
"""

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

__all__ = ["note", "once", "one_line", "printable", "warn"]

_seen: set[str] = set()
_lock = threading.Lock()
# Of what another library has to say; some enumerate every key of a model.
_LONGEST = 300


def note(text: str) -> None:
    """Say something that the user should know, in one line."""
    _write(text)


def warn(text: str) -> None:
    """Say something that the user should act on, in one line marked as a warning."""
    _write(f"warning: {text}")


def once(key: str, text: str) -> None:
    """Say `text` the first time that `key` comes up in this process, and never again.

    `key` names the occasion, not the text: the text may hold values that differ each time.
    """
    with _lock:
        if key in _seen:
            return
        _seen.add(key)
    _write(text)


def one_line(error: BaseException | str) -> str:
    """What an error of another library says, for a sentence of ours: one line, cut where it is
    long, without a full stop. Its class name where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_LONGEST] + "…" if len(text) > _LONGEST else text.rstrip(".")


def printable(text: str) -> str:
    """`text` with a "?" for what ends a line, or is no text (in the name of a file or module)."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _write(text: str) -> None:
    line = " ".join(text.split())
    stream = sys.stderr
    # A process without a terminal (pythonw, a daemon) has no stderr, and a closed pipe must not
    # end a training run over a remark.
    if stream is None:
        return
    try:
        with _bars_aside(stream):
            # One write, newline included, so that lines of several ranks do not interleave.
            stream.write(f"fp8patch: {line}\n")
            stream.flush()
    except (OSError, ValueError):
        pass


def _bars_aside(stream: TextIO) -> AbstractContextManager[object]:
    """On a terminal, the script's progress bars (tqdm) are cleared and drawn again below."""
    mode = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "external_write_mode", None)
    if mode is None or not stream.isatty():
        return nullcontext()
    aside: AbstractContextManager[object] = mode(file=stream)
    return aside
