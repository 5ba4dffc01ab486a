"""What Inductor leaves to PyTorch of a norm's weight gradients is added up by our kernel.

It computes them with the norm's gradient, in one kernel, each program of which writes a row of
partial sums; the code that it writes then calls `.sum(dim=0)` of these. (ops/add_rows.py)
"""

import functools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["added_here"]


class _Inside(threading.local):
    """Of this thread."""

    now = False


_inside = _Inside()
# buf7 = workspace_0[0 * (768) * (1024) : (0 + 1) * (768) * (1024)].view(768, 1024).sum(dim=0)
# (with `keepdim=False` in some releases)
_SUM = re.compile(
    r"(?P<to>\w+ = )(?P<rows>\w+\[.+\]\.view\((?P<shape>.+)\))"
    r"\.sum\(dim=0(?:, keepdim=(?P<keep>True|False))?\)(?P<rest>$|\..*)"
)
# Where a compiled graph is read from Inductor's cache, nothing of ours is imported yet.
_OURS = "__import__('fp8patch.ops.add_rows', fromlist=['add_rows']).add_rows"


@contextmanager
def added_here() -> Iterator[None]:
    """Inside, and in this thread, such sums in the code that Inductor writes are ours."""
    _patch()
    before, _inside.now = _inside.now, True
    try:
        yield
    finally:
        _inside.now = before


@functools.cache
def _patch() -> None:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    stock: Any = PythonWrapperCodegen.writeline

    @functools.wraps(stock)
    def writeline(self: Any, line: Any) -> Any:
        if isinstance(line, str) and _inside.now:
            line = rewritten(line)
        return stock(self, line)

    PythonWrapperCodegen.writeline = writeline  # type: ignore[method-assign]


def rewritten(line: str) -> str:
    """`line` of generated code, with our sum if it is one of partial sums."""
    found = _SUM.fullmatch(line)
    if found is None or len(_split(found["shape"])) != 2:
        return line
    kept = ".unsqueeze(0)" if found["keep"] == "True" else ""
    return f"{found['to']}{_OURS}({found['rows']}){kept}{found['rest']}"


def _split(arguments: str) -> list[str]:
    """At the commas that are inside of no bracket."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts
