"""Tiny models of the `transformers` architectures that the tests sweep over.

`ENTRIES[name].build()` is a seeded FP32 model, `.inputs()` what to feed it, `run` one forward,
`loss` a scalar from any output. What is peculiar to an architecture is in the tables.
"""

from fnmatch import fnmatchcase

import zoo_decoders
import zoo_encoders
import zoo_mixed
import zoo_vision
from zoo_base import Entry, Inputs, loss, run, tensors
from zoo_facts import BYPASSED, REPEATED, STOCK_FAILS, TIES

__all__ = [
    "BYPASSED",
    "ENTRIES",
    "REPEATED",
    "STOCK_FAILS",
    "TIES",
    "Entry",
    "Inputs",
    "bypassed",
    "loss",
    "repeated",
    "run",
    "tensors",
    "tie_groups",
]

_ALL = (*zoo_encoders.ENTRIES, *zoo_decoders.ENTRIES, *zoo_vision.ENTRIES, *zoo_mixed.ENTRIES)
ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _ALL}
if len(ENTRIES) != len(_ALL):
    raise ValueError("two entries of the zoo share a name")


def bypassed(name: str, path: str) -> bool:
    """Whether the architecture never calls the Linear at `path` while training."""
    return any(fnmatchcase(path, pattern) for pattern in BYPASSED.get(name, ()))


def repeated(name: str, path: str) -> bool:
    """Whether one forward of the architecture calls the Linear at `path` more than once."""
    return any(fnmatchcase(path, pattern) for pattern in REPEATED.get(name, ()))


def tie_groups(name: str) -> set[frozenset[str]]:
    """Parameter names that stand for one Parameter, as sets of two or more."""
    return {frozenset(group.split(" = ")) for group in TIES.get(name, ())}
