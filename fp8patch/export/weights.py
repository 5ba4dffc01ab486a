"""Write the weights of an export: quantised or copied, a piece at a time, file by file."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fp8patch.checkpoint.files import Progress
from fp8patch.checkpoint.tensors import DTYPES, StoredTensors
from fp8patch.errors import CheckpointError, ConversionError
from fp8patch.export.formats import Format, Layer
from fp8patch.export.writer import Entry, ShardWriter

__all__ = ["write_weights"]

# What the caches of a CPU hold: on a piece as it is read, quantising takes twice as long.
_PART_ELEMENTS = 1 << 20


@dataclass(slots=True)
class _Bytes:
    """How much was read, for the progress bar."""

    total: int
    progress: Progress | None
    done: int = 0

    def add(self, piece: Tensor) -> None:
        self.done += piece.nbytes
        if self.progress is not None:
            self.progress("export", self.done, self.total)


def write_weights(
    work: Path,
    stored: StoredTensors,
    form: Format,
    layers: Sequence[Layer],
    progress: Progress | None = None,
) -> int:
    """Write into `work` a file for each file of `stored`, and their index; returns their bytes.

    Raises:
        CheckpointError: A file cannot be read, or holds a dtype that nothing reads.
        ConversionError: A weight is not finite.
        OSError: The disk is full, or gone.
    """
    by_key = {layer.key: layer for layer in layers}
    shapes = stored.shapes()
    plain = {key: _plain(key, shapes[key], stored) for key in shapes if key not in by_key}
    metadata = form.metadata(layers, plain)
    read = _Bytes(sum(_stored_bytes(key, shapes[key], stored) for key in shapes), progress)
    written = 0
    weight_map: dict[str, str] = {}
    for source, keys in stored.by_file().items():
        quantised = {key: form.entries(by_key[key]) for key in keys if key in by_key}
        entries = [entry for pair in quantised.values() for entry in pair]
        entries += [plain[key] for key in keys if key in plain]
        name = _file_name(source.name)
        with ShardWriter(work / name, entries, metadata) as writer:
            for key in keys:
                if key in quantised:
                    _quantize(key, stored, form, quantised[key], writer, read.add)
                else:
                    _copy(key, stored, writer, read.add)
        written += writer.nbytes
        weight_map.update((entry.name, name) for entry in entries)
    if set(weight_map.values()) != {"model.safetensors"}:
        _write_index(work, written, weight_map)
    return written


def _plain(key: str, shape: tuple[int, ...], stored: StoredTensors) -> Entry:
    dtype = stored.dtype(key)
    if dtype not in DTYPES:
        raise CheckpointError(f"{key} is stored as {dtype}, which no loader of a model reads.")
    return Entry(key, DTYPES[dtype], shape)


def _stored_bytes(key: str, shape: tuple[int, ...], stored: StoredTensors) -> int:
    return Entry(key, DTYPES[stored.dtype(key)], shape).nbytes


def _file_name(name: str) -> str:
    """ "pytorch_model-00001-of-00002.bin" as "model-00001-of-00002.safetensors"."""
    if name.endswith(".safetensors"):
        return name
    return f"{name.removesuffix('.bin').replace('pytorch_model', 'model')}.safetensors"


def _copy(
    key: str, stored: StoredTensors, writer: ShardWriter, read: Callable[[Tensor], None]
) -> None:
    for piece in stored.pieces(key):
        writer.append(key, piece)
        read(piece)
        del piece


def _quantize(
    key: str,
    stored: StoredTensors,
    form: Format,
    entries: tuple[Entry, Entry],
    writer: ShardWriter,
    read: Callable[[Tensor], None],
) -> None:
    weight, scale = entries
    # Small tensors that outlive the large ones around them would fragment the heap without end.
    scales = torch.empty(scale.shape, dtype=scale.dtype)
    row = 0
    for piece in stored.pieces(key, form.rows):
        if piece.numel() and not all(torch.isfinite(end) for end in torch.aminmax(piece)):
            raise ConversionError(
                f"{key} holds inf or nan: the checkpoint is damaged, or training diverged before "
                "it was saved. Export an earlier one."
            )
        rows = max(1, _PART_ELEMENTS // piece.shape[1] // form.rows) * form.rows
        for part in piece.split(rows):
            values, part_scales = form.quantize(part)
            writer.append(weight.name, values)
            scales[row : row + len(part_scales)] = part_scales
            row += len(part_scales)
        read(piece)
        del piece, part, values, part_scales
    assert row == len(scales), key
    writer.append(scale.name, scales)


def _write_index(work: Path, total: int, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (work / "model.safetensors.index.json").write_text(text, "utf-8")
