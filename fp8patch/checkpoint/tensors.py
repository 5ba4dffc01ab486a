"""The stored tensors of a model directory, read a piece at a time.

Both formats are mapped into memory, and every page that was read counts until its file is closed.
So files are opened again and again, which costs microseconds: what is resident at any time is a
piece, not a shard.
"""

import json
import pickle
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8patch.checkpoint.sidecar import fingerprint
from fp8patch.errors import CheckpointError
from fp8patch.messages import one_line

__all__ = ["DTYPES", "StoredTensors", "open_tensors"]

# What safetensors calls a dtype. Others exist (of four and six bits), and are no model's weights.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}

PIECE_BYTES = 16 << 20
_REOPEN_BYTES = 512 << 20

# (name of the one file, of the index, of its shards), in the order in which transformers looks.
_LAYOUTS = (
    ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"),
)


class StoredTensors:
    """Names and shapes of all stored tensors, and their values on request."""

    def __init__(self, files: "list[_SafetensorsFile | _TorchFile]") -> None:
        self._file = {key: file for file in files for key in file.shapes}
        self.files = [file.path for file in files]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by name."""
        return {key: file.shapes[key] for key, file in self._file.items()}

    def dtype(self, key: str) -> str:
        """The dtype of a tensor, as `DTYPES` has it; another text for what is not in there."""
        return self._file[key].dtypes[key]

    def by_file(self) -> dict[Path, list[str]]:
        """{file: names of the tensors that are read from it}."""
        found: dict[Path, list[str]] = {path: [] for path in self.files}
        for key, file in self._file.items():
            found[file.path].append(key)
        return found

    def pieces(self, key: str, multiple: int = 1) -> Iterator[Tensor]:
        """The tensor in groups of rows of about `PIECE_BYTES`, top to bottom, in its own dtype.

        Each group but the last has a multiple of `multiple` rows. Drop each piece before the next
        one is taken.

        Raises:
            CheckpointError: The file cannot be read.
        """
        return self._file[key].pieces(key, multiple)

    def fingerprint(self, key: str) -> str:
        """`sidecar.fingerprint` of the tensor, of which a few rows are read."""
        return self._file[key].fingerprint(key)


def open_tensors(directory: Path) -> StoredTensors:
    """The weights that transformers would load from `directory`. Reads headers, not values.

    Raises:
        CheckpointError: No weights, no index, a file that is missing or corrupt, or an index that
            does not fit its files.
    """
    for single, index, shards in _LAYOUTS:
        if (directory / single).exists():
            return StoredTensors([_open(directory / single)])
        if (directory / index).exists():
            return _open_sharded(directory, index)
        found = sorted(p.name for p in directory.iterdir() if fnmatch(p.name, shards))
        if found:
            raise CheckpointError(
                f"{directory}: holds {found[0]} and no {index}, which says what is in which file. "
                "Copy or download it again."
            )
    known = " or ".join(single for single, _, _ in _LAYOUTS)
    raise CheckpointError(f"{directory}: no weights in it: no {known}, nor an index of shards.")


def _open_sharded(directory: Path, name: str) -> StoredTensors:
    again = "Copy or download it again."
    try:
        shards: dict[str, set[str]] = {}
        for key, file in json.loads((directory / name).read_text("utf-8"))["weight_map"].items():
            shards.setdefault(str(file), set()).add(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{directory / name}: not an index of shards ({reason}). {again}"
        ) from None
    opened = []
    for file, keys in sorted(shards.items()):
        path = directory / file
        # A name with a directory in it would lead out of the checkpoint.
        if Path(file).name != file or not path.is_file():
            raise CheckpointError(f"{path}: missing, and {name} says it holds weights. {again}")
        shard = _open(path)
        lacking = sorted(keys - shard.shapes.keys())
        if lacking:
            raise CheckpointError(
                f"{path}: has no {lacking[0]!r}, which {name} says it holds "
                f"({len(lacking)} of {len(keys)} are missing). {again}"
            )
        opened.append(shard)
    return StoredTensors(opened)


def _open(path: Path) -> "_SafetensorsFile | _TorchFile":
    return _SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)


def _corrupt(path: Path, error: BaseException) -> CheckpointError:
    try:  # safetensors says of any file that it cannot open that there is none
        path.open("rb").close()
    except OSError as closed:
        return CheckpointError(f"{path}: cannot be read: {closed.strerror}.")
    return CheckpointError(
        f"{path}: cannot be read, so it is corrupt or cut short ({one_line(error)}). Copy or "
        "download it again."
    )


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, "pt") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}
                self.shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
                self.dtypes = {key: str(part.get_dtype()) for key, part in slices.items()}
        except (SafetensorError, OSError) as error:
            raise _corrupt(path, error) from None

    def pieces(self, key: str, multiple: int) -> Iterator[Tensor]:
        start, shape = 0, self.shapes[key]
        rows = 1
        while start < (shape[0] if shape else 1):
            try:
                with safe_open(self.path, "pt") as file:
                    if not shape:
                        piece = file.get_tensor(key)
                    else:
                        if start == 0:
                            rows = _rows_a_piece(file.get_slice(key)[:1], multiple)
                        piece = file.get_slice(key)[start : start + rows]
            except (SafetensorError, OSError) as error:
                raise _corrupt(self.path, error) from None
            yield piece
            del piece
            start += rows

    def fingerprint(self, key: str) -> str:
        try:
            with safe_open(self.path, "pt") as file:
                return fingerprint(file.get_slice(key))
        except (SafetensorError, OSError) as error:
            raise _corrupt(self.path, error) from None


class _TorchFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._touched = 0
        self._opened: dict[str, Tensor] | None = None
        names = {dtype: name for name, dtype in DTYPES.items()}
        tensors = self._tensors()
        self.shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        self.dtypes = {key: names.get(v.dtype, str(v.dtype)) for key, v in tensors.items()}

    def pieces(self, key: str, multiple: int) -> Iterator[Tensor]:
        start, shape = 0, self.shapes[key]
        rows = 1
        while start < (shape[0] if shape else 1):
            tensor = self._tensors()[key]
            if start == 0 and shape:
                rows = _rows_a_piece(tensor[:1], multiple)
            piece = tensor[start : start + rows] if shape else tensor
            del tensor
            self._touched += piece.nbytes
            yield piece
            del piece
            start += rows

    def fingerprint(self, key: str) -> str:
        return fingerprint(self._tensors()[key])

    def _tensors(self) -> dict[str, Tensor]:
        if self._opened is None or self._touched > _REOPEN_BYTES:
            self._opened, self._touched = None, 0
            self._opened = _load(self.path)
        return self._opened


def _load(path: Path) -> dict[str, Tensor]:
    def load(mmap: bool) -> Any:
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)

    try:
        try:
            values = load(True)
        except RuntimeError as error:
            # What torch before 1.6 wrote is no zip file and cannot be mapped.
            if "mmap" not in str(error):
                raise
            values = load(False)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: holds more than tensors, or is corrupt; code in a checkpoint is never run. "
            "Save the model as safetensors (save_pretrained does)."
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise _corrupt(path, error) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds a {type(values).__name__}, not named tensors.")
    return {key: value for key, value in values.items() if isinstance(value, Tensor)}


def _rows_a_piece(row: Tensor, multiple: int) -> int:
    rows = PIECE_BYTES // max(1, row.nbytes)
    return max(1, rows // multiple) * multiple
