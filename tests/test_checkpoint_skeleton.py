"""Models on the meta device from a config, and every way in which a config can be bad."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fp8patch.checkpoint import skeleton
from fp8patch.checkpoint.skeleton import model_from_config
from fp8patch.errors import CheckpointError, PlanError
from fp8patch.plan.model import plan_model


def write(path: Path, **changes: Any) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    values = {**config.to_dict(), **changes}
    kept = {key: value for key, value in values.items() if value != "remove"}
    (path / "config.json").write_text(json.dumps(kept))
    return path


def test_directory_and_file_give_the_named_class_on_meta(tmp_path: Path) -> None:
    write(tmp_path)
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        model = model_from_config(source)
        assert type(model) is transformers.LlamaForCausalLM
        assert {p.device.type for p in model.parameters()} == {"meta"}
    assert torch.empty(1).device.type == "cpu"


def test_weights_are_tied_as_in_the_model(tmp_path: Path) -> None:
    model = model_from_config(write(tmp_path, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("dtype", "built"),
    [("float64", torch.float64), ("bfloat16", torch.float32), ("remove", torch.float32)],
)
def test_fp64_is_the_one_dtype_that_the_plan_must_know(
    tmp_path: Path, dtype: str, built: torch.dtype
) -> None:
    model = model_from_config(write(tmp_path, dtype=dtype))
    assert {p.dtype for p in model.parameters()} == {built}
    assert {p.device.type for p in model.parameters()} == {"meta"}
    codes = set(plan_model(model, meta=True).summary()["codes"])
    assert codes == {"dtype"} if dtype == "float64" else "ok" in codes


@pytest.mark.parametrize("architectures", ["remove", None, [], ["MyOwnLlama"]])
def test_without_a_known_class_the_auto_class_is_used_and_said(
    tmp_path: Path, architectures: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    model = model_from_config(write(tmp_path, architectures=architectures))
    assert type(model) is transformers.LlamaForCausalLM
    assert "planned as AutoModelForCausalLM builds it" in capfd.readouterr().err


def test_a_model_that_is_no_causal_lm_falls_back_to_auto_model(tmp_path: Path) -> None:
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert type(model_from_config(tmp_path)) is transformers.ViTModel


def test_quantised_checkpoint_is_planned_plain_and_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, quantization_config={"quant_method": "fp8"})
    assert type(model_from_config(tmp_path)) is transformers.LlamaForCausalLM
    assert "quantised" in capfd.readouterr().err


@pytest.mark.parametrize("source", ["/no/such/place", "./none", "~/none-such", "a/b/c"])
def test_no_such_directory(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such directory\. Give"):
        model_from_config(source)


def test_not_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a model directory: it has no config.json"):
        model_from_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="PEFT adapter"):
        model_from_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", r"not valid JSON \(line 1"),
        (b"", "not valid JSON"),
        (b"[1]", "JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (b"{}", "no model_type"),
    ],
)
def test_corrupt_config(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=text):
        model_from_config(tmp_path)


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="unknown architecture.*'lllama'"):
        model_from_config(write(tmp_path, model_type="lllama"))
    with pytest.raises(PlanError, match="code of its own, which is not run"):
        model_from_config(write(tmp_path, model_type="lllama", auto_map={"AutoModel": "x.Y"}))


def test_values_that_build_nothing(tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, PlanError)) as raised:
        model_from_config(write(tmp_path, num_attention_heads=0))
    assert "\n" not in str(raised.value)
    with pytest.raises(CheckpointError, match="not a valid llama config"):
        model_from_config(write(tmp_path, hidden_size="wide"))


def test_hub_name_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skeleton, "_hub_answers", lambda: False)
    with pytest.raises(CheckpointError, match="hub cannot be reached"):
        model_from_config("nobody/nothing-at-all")


def test_hub_is_not_asked_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert not skeleton._hub_answers()
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    assert skeleton._hub_answers()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not skeleton._hub_answers()


def test_a_config_with_infinity_in_it(tmp_path: Path) -> None:
    # transformers writes {"__float__": "Infinity"}; Mamba-2's time_step_limit has one.
    config = transformers.Mamba2Config(
        num_hidden_layers=1,
        hidden_size=64,
        vocab_size=64,
        num_heads=8,
        head_dim=16,
        n_groups=1,
        state_size=16,
        architectures=["Mamba2ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert type(model_from_config(tmp_path)).__name__ == "Mamba2ForCausalLM"


@pytest.mark.parametrize(
    "content", [b"Dear diary", b"", b"\x00\x01", b"[1]", b"{" + b" " * (9 << 20)]
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"notes\.txt: not a config\.json\. Give a model dir"):
        model_from_config(file)


def test_a_config_of_another_name_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "blob")
    assert type(model_from_config(tmp_path / "blob")) is transformers.LlamaForCausalLM


@pytest.mark.parametrize(
    ("text", "words"),
    [("[" * 200_000, "nested too deeply"), (f'{{"a": {"9" * 5000}}}', "Exceeds the limit")],
)
def test_json_that_python_refuses(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"not valid JSON \({words}.*Copy it again"):
        model_from_config(tmp_path)
