"""The command of another Python that runs a function of this package."""

import sys
from pathlib import Path

__all__ = ["command"]

_FOLDER = str(Path(__file__).resolve().parent.parent)
_RUN = """\
import sys
folder, module, function, *arguments = sys.argv[1:]
if folder not in sys.path:
    sys.path.insert(0, folder)
import importlib
getattr(importlib.import_module(module), function)(*arguments)
"""


def command(module: str, function: str) -> tuple[str, ...]:
    """A Python that calls `function` of `module`, with what is put after it as its arguments.

    `module` is of the fp8patch that asks, wherever that was imported from. With `-m`, and with
    `-c` alone, the folder that the user is in would come first on the child's path, and a file or
    folder there that is called `inspect` or `types` would be imported for Python's own.
    """
    return (sys.executable, "-P", "-c", _RUN, _FOLDER, module, function)
