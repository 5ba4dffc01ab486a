"""Write a safetensors file tensor by tensor, in pieces: what is in memory is a piece.

The format, little-endian: the length of the header in 8 bytes, the header in JSON ({name: dtype,
shape, begin and end of its bytes}), then the bytes of all tensors without a gap. So every dtype and
shape has to be known before the first byte of a tensor is written, and the order is free.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from fp8patch.checkpoint.tensors import DTYPES

__all__ = ["Entry", "ShardWriter"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that is going to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """A new safetensors file at `path`, to be filled with `append` inside a `with` block.

    Raises:
        OSError: It exists, or cannot be written.
    """

    def __init__(self, path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> None:
        # Wide dtypes first, as the library itself writes: no tensor is misaligned then.
        ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for entry in ordered:
            begin, end = end, end + entry.nbytes
            spans[entry.name] = (begin, end)
            header[entry.name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        self._dtypes = {entry.name: entry.dtype for entry in ordered}
        self._next = {name: start + begin for name, (begin, _) in spans.items()}
        self._end = {name: start + end for name, (_, end) in spans.items()}
        self.nbytes = start + end
        self._file = open(path, "xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def append(self, name: str, part: Tensor) -> None:
        """Write the next rows of the tensor `name`; tensors may take turns.

        Raises:
            OSError: The disk is full, or gone.
        """
        assert part.dtype == self._dtypes[name], (name, part.dtype)
        data = part.contiguous().reshape(-1).view(torch.uint8).numpy().data
        assert self._next[name] + data.nbytes <= self._end[name], name
        self._file.seek(self._next[name])
        self._file.write(data)
        self._next[name] += data.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        # A gap would read as zeros: weights that nobody wrote.
        assert kind is not None or self._next == self._end
