"""Models and comparisons for the tests of `fp8patch export`."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from directories import run
from torch import Tensor
from zoo_base import VOCAB, ids

# It is in the development extra; a GPU machine may lack it.
needs_compressed_tensors = pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="pip install compressed-tensors"
)


def write_llama(
    path: Path,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    shards: str = "5GB",
    num_key_value_heads: int = 4,
) -> Path:
    """A Llama of N and K in multiples of 128, or 32 a key head; in files of at most `shards`."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=num_key_value_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(path, max_shard_size=shards)
    return path


def export(source: Path, out: Path, *args: object) -> Any:
    """Run the command; its JSON."""
    result = run("export", source, "-o", out, "--json", *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def load(path: Path, cls: Any = transformers.AutoModelForCausalLM, **options: Any) -> Any:
    """The model as the library that owns its format loads it; nothing may be missing or left."""
    model, info = cls.from_pretrained(path, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


@torch.inference_mode()
def logits(model: Any) -> tuple[Tensor, float]:
    """Logits in FP32 on the CPU of fixed tokens, and the loss on them."""
    tokens = ids(4, 24).to(model.device)
    output = model(input_ids=tokens, labels=tokens)
    return output.logits.float().cpu(), output.loss.item()


def weight(model: Any, path: str) -> Tensor:
    """The weight of a loaded layer as a plain FP32 tensor."""
    value = model.get_submodule(path).weight.detach()
    plain: Tensor = value.dequantize() if hasattr(value, "qdata") else value
    return plain.float()
