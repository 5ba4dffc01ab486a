"""trl's own `scripts/sft.py`, as its wheel ships it, with a tiny model and data: how it is run."""

import importlib.util
import json
from pathlib import Path

import tokenizers
import torch
import transformers
from injected import stdlib_text

# What the datasets library keeps goes into the working directory; nothing is asked of a hub.
ENV = {"HF_HUB_OFFLINE": "1", "HF_HOME": "hf", "TQDM_DISABLE": "1"}


def sft() -> Path | None:
    """Where the installed script is; trl itself is not imported."""
    spec = importlib.util.find_spec("trl")
    return (
        None if spec is None or spec.origin is None else Path(spec.origin).parent / "scripts/sft.py"
    )


def prepare(folder: Path, texts: int) -> None:
    """In `folder`: `tiny`, a Llama with a tokenizer of bytes; `data`, texts of 60 letters."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {word: at for at, word in enumerate(["<pad>", "<eos>", *letters])}
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token="<pad>", eos_token="<eos>", model_max_length=64
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=272, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    text = stdlib_text(folder).read_text()
    (folder / "data").mkdir()
    lines = [json.dumps({"text": text[60 * at : 60 * at + 60]}) for at in range(texts)]
    (folder / "data" / "train.jsonl").write_text("\n".join(lines))


def arguments(steps: int) -> tuple[object, ...]:
    """For the script, to be run in the prepared folder; two micro-batches of four a step."""
    return (
        *("--model_name_or_path", "tiny", "--dataset_name", "data", "--report_to", "none"),
        *("--per_device_train_batch_size", 4, "--max_length", 64, "--bf16", "True"),
        *("--logging_steps", 1, "--gradient_accumulation_steps", 2, "--max_steps", steps),
        *("--disable_tqdm", "True"),
    )
