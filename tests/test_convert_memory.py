"""`fp8patch convert` reads a tensor at a time: peak memory in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from directories import write
from safetensors.torch import save_file

from fp8patch.checkpoint.skeleton import model_from_config

# VmHWM and not ru_maxrss, which a child inherits from the process that started it.
MEASURED = """
import sys
from pathlib import Path
from fp8patch.checkpoint.stream import convert_directory
def peak():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
peaks = []
for source in sys.argv[1:]:
    done = convert_directory(source, source + ".out")
    assert done.scaled and not done.unset
    peaks.append(peak())
print(*peaks)
"""


def write_large(path: Path, *, shards: int, **config: int) -> int:
    """A Llama of random FP32 weights in shards; returns the bytes of its largest tensor."""
    path.mkdir()
    settings = transformers.LlamaConfig(**config, architectures=["LlamaForCausalLM"])
    settings.save_pretrained(path)
    skeleton = model_from_config(path)
    names = list(skeleton.state_dict())
    weight_map: dict[str, str] = {}
    largest = 0
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        tensors = {name: torch.rand(skeleton.get_parameter(name).shape) for name in part}
        largest = max(largest, *(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, path / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return largest


def peaks(*sources: Path) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, sources)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(value) for value in done.stdout.split()]


@pytest.mark.slow
def test_a_gigabyte_takes_a_piece_more_than_nothing(tmp_path: Path) -> None:
    small, large = write(tmp_path / "small"), tmp_path / "large"
    write_large(
        large,
        shards=2,
        hidden_size=2048,
        intermediate_size=16384,
        num_hidden_layers=2,
        num_attention_heads=16,
        vocab_size=96,
    )
    before, after = peaks(small, large)
    # A shard is 470 MB, the largest weight 134; a piece is 17, and one more or less is chance.
    assert after - before < 100e6, (before, after)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("FP8PATCH_LARGE_TESTS") != "1",
    reason="writes 10 GB and takes a minute; FP8PATCH_LARGE_TESTS=1 runs it",
)
def test_four_gigabytes(tmp_path: Path) -> None:
    largest = write_large(
        tmp_path / "large",
        shards=4,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        vocab_size=32000,
    )
    (after,) = peaks(tmp_path / "large")
    print(f"peak {after / 1e9:.2f} GB, largest tensor {largest / 1e9:.2f} GB")
    assert after < 1.5e9 + largest
