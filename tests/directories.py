"""Model directories for the tests of the commands: tiny, seeded, written by transformers itself."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result
from zoo import ENTRIES
from zoo_base import VOCAB

from fp8patch import cli


def run(*args: object) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def write(path: Path, name: str = "llama", *, seed: int = 0, **options: Any) -> Path:
    """Save the zoo's model `name` into `path`; `options` go to `save_pretrained`."""
    ENTRIES[name].build(seed).save_pretrained(path, **options)
    return path


def write_tokenizer(path: Path, *, words: int = VOCAB, pad: bool = True) -> None:
    """Words w0, w1, … with special tokens before them, `words` tokens in all."""
    special = ["[PAD]", "[UNK]", "</s>"]
    names = special + [f"w{i}" for i in range(words - len(special))]
    vocabulary = {word: i for i, word in enumerate(names)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    padding = {"pad_token": "[PAD]"} if pad else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", **padding)
    tokenizer.save_pretrained(path)


def edit_weights(path: Path, change: Any) -> None:
    """Apply `change` (of a dict of tensors, in place) to the one safetensors file in `path`."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def set_config(path: Path, **values: Any) -> None:
    config = AutoConfig.from_pretrained(path)
    config.update(values)
    config.save_pretrained(path)


def as_torch_file(path: Path, *, shards: int = 1, legacy: bool = False) -> None:
    """Rewrite the weights in `path` as `pytorch_model.bin`, in one file or several."""
    import json

    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        return
    weight_map = {}
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin"
        part = {key: tensors[key].clone() for key in list(tensors)[i::shards]}
        torch.save(part, path / file)
        weight_map.update(dict.fromkeys(part, file))
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def digests(directory: Path) -> dict[str, str]:
    """{relative path: sha256} of every file."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def left_behind(directory: Path) -> list[str]:
    """Names of hidden entries: what a convert that failed must not leave."""
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))
