"""trl's own `scripts/sft.py`, as its wheel ships it, under `fp8patch train`."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from injected import stdlib_text, train
from safetensors.torch import load_file


def sft() -> Path:
    """Where the installed script is; trl itself is not imported."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed: pip install '.[dev]'")
    return Path(spec.origin).parent / "scripts" / "sft.py"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A Llama with a tokenizer of bytes, and 64 texts in data/train.jsonl."""
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
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    text = stdlib_text(tmp_path).read_text()
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": text[60 * at : 60 * at + 60]}) for at in range(64)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.slow
def test_sft(tiny: Path) -> None:
    common = (
        *(sft(), "--model_name_or_path", "tiny", "--dataset_name", "data", "--use_cpu", "True"),
        *("--report_to", "none", "--per_device_train_batch_size", 4, "--max_length", 64),
        *("--learning_rate", 1e-3, "--bf16", "True", "--logging_steps", 1, "--save_steps", 3),
        *("--gradient_accumulation_steps", 2, "--max_steps", 6, "--disable_tqdm", "True"),
    )
    # What the datasets library keeps goes here, and nothing is asked of a hub.
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tiny / "hf"), "TQDM_DISABLE": "1"}
    options = ("--emulate", "--report", "r.json")
    done = train(*options, *common, "--output_dir", "fp8", cwd=tiny, env=env)
    bare = train("--off", *common, "--output_dir", "bare", cwd=tiny, env=env)
    assert sys.executable in bare.args
    report = json.loads((tiny / "r.json").read_text())
    # The head is never called: trl reads its weight. 14 Linears, two micro-batches.
    assert (report["coverage"]["fp8_calls"], report["coverage"]["calls"]) == (28, 28)
    assert report["steps"] == 6
    assert report["coverage"]["never_ran"] == []
    assert report["coverage"]["not_counted"] == ["lm_head"]
    assert "not in these figures, as it is never called: lm_head" in done.stderr
    assert "LlamaForCausalLM: 14 of 15 Linears in FP8" in done.stderr
    assert "summary: 6 optimizer steps" in done.stderr
    assert "fp8patch: " not in bare.stderr
    start, fp8, stock = (
        load_file(tiny / name / "model.safetensors") for name in ("tiny", "fp8", "bare")
    )

    def moved(end: dict[str, torch.Tensor]) -> set[str]:
        return {key for key in start if not torch.equal(start[key], end[key].to(start[key].dtype))}

    assert moved(fp8) == moved(stock) != set()
    losses = [
        [e["loss"] for e in json.loads(path.read_text())["log_history"] if "loss" in e]
        for path in (
            tiny / name / "checkpoint-6" / "trainer_state.json" for name in ("fp8", "bare")
        )
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    # A checkpoint resumes bit for bit, and the model loads as any other.
    words = ("--output_dir", "again", "--resume_from_checkpoint", "fp8/checkpoint-3")
    train("--emulate", *common, *words, cwd=tiny, env=env)
    again = load_file(tiny / "again" / "model.safetensors")
    assert all(torch.equal(again[key], fp8[key]) for key in fp8)
    transformers.LlamaForCausalLM.from_pretrained(tiny / "fp8")
