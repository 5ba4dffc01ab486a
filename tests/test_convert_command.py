"""`fp8patch convert`: stock files untouched, scales as the live module's."""

import json
from pathlib import Path
from typing import Any

import directories
import pytest
import torch
import transformers
from directories import as_torch_file, digests, edit_weights, left_behind, run, write
from transformers import conversion_mapping
from zoo import ENTRIES

import fp8patch
from fp8patch.checkpoint.sidecar import SIDECAR, STATE, read_sidecar
from fp8patch.checkpoint.stream import convert_directory
from fp8patch.errors import CheckpointError
from fp8patch.slots import WEIGHT


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def weight_states(directory: Path) -> dict[str, Any]:
    return {path: s for (path, role), s in read_sidecar(directory).state.items() if role == WEIGHT}


def assert_same_states(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for path, state in expected.items():
        assert torch.equal(actual[path].history, state.history), path
        assert torch.equal(actual[path].scale, state.scale), path


# -- what is written ----------------------------------------------------------------------------


def test_out_is_the_stock_files_and_a_sidecar(llama: Path, tmp_path: Path) -> None:
    result = run("convert", llama, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    written, stock = digests(tmp_path / "out"), digests(llama)
    assert written.keys() - stock.keys() == {SIDECAR, STATE}
    assert {name: written[name] for name in stock} == stock
    assert left_behind(tmp_path) == []
    assert "14 of 15 GEMM modules" in result.stdout
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    sidecar = read_sidecar(tmp_path / "out")
    assert sidecar.plan == fp8patch.plan_model(model, gpu=sidecar.plan["gpu"]).to_dict()


def test_json_says_it_and_nothing_else(llama: Path, tmp_path: Path) -> None:
    result = run("convert", llama, "-o", tmp_path / "out", "--json", "--skip", "*.layers.0.*")
    values = json.loads(result.stdout)
    assert values["weights_scaled"] == values["summary"]["converted_gemms"] == 7
    assert values["calibrated"] is False
    assert values["weights_unset"] == []


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_are_scaled_as_a_live_module_scales_them(
    tmp_path: Path, name: str, recipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "model", name)
    convert_directory(source, tmp_path / "out", recipe)
    live = transformers.AutoModelForCausalLM.from_pretrained(source)
    loaded = fp8patch.load(tmp_path / "out")
    fp8patch.convert_model(live, recipe)
    inputs = ENTRIES[name].inputs()
    outputs = []
    for model in (live, loaded):
        with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
            outputs.append(model(**inputs).logits)
    # From the scales in the sidecar and from those of the first use: the same bytes.
    assert torch.equal(*outputs)
    modules = dict(loaded.named_modules())
    for path, module in live.named_modules():
        if getattr(module, "_fp8_weight_q", None) is not None:
            for ours, other in zip(module._fp8_weight_q, modules[path]._fp8_weight_q, strict=True):
                assert torch.equal(ours.float(), other.float()), path
    live._fp8_bank.update()
    first_use = {path: live._fp8_bank.read(path, WEIGHT) for path in live._fp8_bank.paths}
    assert_same_states(weight_states(tmp_path / "out"), first_use)
    assert "not those" not in capfd.readouterr().err


@pytest.mark.parametrize("layout", ["sharded", "bin", "bin, sharded", "bin of torch 1.5"])
def test_every_layout_gives_the_same_scales(llama: Path, tmp_path: Path, layout: str) -> None:
    other = write(tmp_path / "other", max_shard_size="60KB" if layout == "sharded" else "5GB")
    if layout.startswith("bin"):
        as_torch_file(other, shards=2 if "sharded" in layout else 1, legacy="1.5" in layout)
    else:
        assert len(list(other.glob("*.safetensors"))) > 2
    convert_directory(llama, tmp_path / "one")
    convert_directory(other, tmp_path / "two")
    assert_same_states(weight_states(tmp_path / "two"), weight_states(tmp_path / "one"))
    assert read_sidecar(tmp_path / "two").fingerprint == read_sidecar(tmp_path / "one").fingerprint


def test_a_tensor_in_pieces_is_the_tensor(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_directory(llama, tmp_path / "whole")
    as_torch_file(write(tmp_path / "bin"))
    monkeypatch.setattr("fp8patch.checkpoint.tensors.PIECE_BYTES", 5 * 64 * 4)
    monkeypatch.setattr("fp8patch.checkpoint.tensors._REOPEN_BYTES", 10_000)
    for source in (llama, tmp_path / "bin"):
        convert_directory(source, tmp_path / "pieces", force=True)
        assert_same_states(weight_states(tmp_path / "pieces"), weight_states(tmp_path / "whole"))


@pytest.mark.parametrize("error", [AttributeError("no such function"), TypeError("4 arguments")])
def test_without_transformers_table_of_names_they_count_as_they_are_and_that_is_said(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    convert_directory(llama, tmp_path / "one")
    assert "renames" not in capfd.readouterr().err

    def raising(model: Any) -> None:
        raise error

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", raising)
    convert_directory(llama, tmp_path / "two")
    assert f"how it renames stored weights ({error})" in capfd.readouterr().err
    assert_same_states(weight_states(tmp_path / "two"), weight_states(tmp_path / "one"))


def test_a_fault_in_the_table_of_names_is_not_hidden(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(model: Any) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", raising)
    with pytest.raises(ValueError, match="a fault"):
        convert_directory(llama, tmp_path / "out")


def test_fp64_weights_are_left_alone(tmp_path: Path) -> None:
    ENTRIES["llama"].build().double().save_pretrained(tmp_path / "model")
    result = run("convert", tmp_path / "model", "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "model: nothing to convert: all 15 candidates are skipped (15 dtype)" in result.stderr
    assert "--include" in result.stderr


def test_bfloat16_weights(tmp_path: Path) -> None:
    model: Any = ENTRIES["llama"].build().bfloat16()
    model.save_pretrained(tmp_path / "model")
    convert_directory(tmp_path / "model", tmp_path / "out")
    for path, state in weight_states(tmp_path / "out").items():
        assert state.history.item() == model.get_submodule(path).weight.abs().max().item()


@pytest.mark.parametrize("prefix", ["missing", "added"])
def test_a_base_models_prefix_may_be_there_or_not(
    tmp_path: Path, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model: Any = ENTRIES["bert"].build()
    if prefix == "missing":
        model.base_model.save_pretrained(tmp_path / "model")
        directories.set_config(tmp_path / "model", architectures=[type(model).__name__])
        mine = "bert.encoder.layer.0.output.dense"
    else:
        model.save_pretrained(tmp_path / "model")
        directories.set_config(tmp_path / "model", architectures=["BertModel"])
        mine = "encoder.layer.0.output.dense"
    done = convert_directory(tmp_path / "model", tmp_path / "out")
    assert mine in done.scaled
    if prefix == "added":
        assert done.unset == ("pooler.dense",)  # MLM has none
    else:  # the head has no weights on disk
        assert done.unset == ("cls.predictions.transform.dense",)
        assert "set on first use" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["vit", "swin", "llava"])
def test_old_names_are_found(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "model", name)
    done = convert_directory(source, tmp_path / "out")
    assert done.unset == ()
    loaded = fp8patch.load(tmp_path / "out")
    for path, state in weight_states(tmp_path / "out").items():
        assert state.history.item() == loaded.get_submodule(path).weight.abs().max().item()


def test_a_weight_that_is_merged_while_loading_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = convert_directory(write(tmp_path / "model", "nomic_bert"), tmp_path / "out")
    assert done.scaled
    assert all("_proj" in path and "self_attn" in path for path in done.unset)
    assert "6 of 15 weights have no stored tensor" in capfd.readouterr().err


def test_zeros_have_no_scale_and_nan_is_said(llama: Path, tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"].zero_()
        tensors["model.layers.0.mlp.down_proj.weight"][-1, -1] = torch.nan
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.inf

    edit_weights(llama, damage)
    result = run("convert", llama, "-o", tmp_path / "out")
    assert result.exit_code == 0
    assert "warning: 2 of 14 weights hold inf or nan" in result.stderr
    assert "model.layers.0.mlp.down_proj" in result.stderr
    assert len(weight_states(tmp_path / "out")) == 11


def test_links_are_followed_and_nothing_is_shared(tmp_path: Path) -> None:
    # As the hub's cache: every file is a link to a blob elsewhere.
    real = write(tmp_path / "blobs")
    (real / "onnx").mkdir()
    (real / "onnx" / "model.onnx").write_bytes(b"x" * 100)
    (real / "onnx" / "up").symlink_to(real, target_is_directory=True)
    source = tmp_path / "snapshot"
    source.mkdir()
    for path in real.iterdir():
        (source / path.name).symlink_to(path)
    convert_directory(source, tmp_path / "out")
    out = tmp_path / "out"
    assert (out / "onnx" / "model.onnx").read_bytes() == b"x" * 100
    for path in out.rglob("*"):
        assert not path.is_symlink()
        assert path.is_dir() or path.stat().st_nlink == 1
    (real / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="a link to .*nowhere, which is not there"):
        convert_directory(real, tmp_path / "out2")


def test_a_patched_directory_is_planned_anew(llama: Path, tmp_path: Path) -> None:
    convert_directory(llama, tmp_path / "one", "delayed")
    before = digests(tmp_path / "one")
    result = run("convert", tmp_path / "one", "-o", tmp_path / "two", "--recipe", "current")
    assert result.exit_code == 0
    assert "patched already" in result.stderr
    assert read_sidecar(tmp_path / "two").plan["recipe"]["scaling"] == "current"
    assert digests(tmp_path / "one") == before
