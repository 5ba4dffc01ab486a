"""`fp8patch export`: loaded by the library that owns the format, and compared with the source."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from directories import as_torch_file, digests, edit_weights, run, write_tokenizer
from exported import export, load, logits, needs_compressed_tensors, weight, write_llama
from safetensors import safe_open
from safetensors.torch import load_file

from fp8patch import numerics
from fp8patch.checkpoint.sidecar import SIDECAR, STATE
from fp8patch.export.directory import FORMATS, export_directory

UP = "model.layers.1.mlp.up_proj"
# What a format calls the weight and the scales of a layer.
PARTS = {
    "compressed-tensors": ("weight", "weight_scale"),
    "hf-fp8": ("weight", "weight_scale_inv"),
    "torchao": ("_weight_qdata", "_weight_scale"),
}
LOADABLE = [
    pytest.param("compressed-tensors", marks=needs_compressed_tensors),
    "hf-fp8",
    "torchao",
]


# -- loaded back --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", LOADABLE)
@pytest.mark.parametrize("tied", [False, True], ids=["one-file", "tied-shards"])
def test_its_own_library_loads_it(tmp_path: Path, form: str, tied: bool) -> None:
    """FP32 in one file, and BF16 in shards with a tied head.

    compressed-tensors and torchao quantise the activations here too, as servers do; transformers
    turns blocks back into the model's dtype on a CPU.
    """
    dtype, shards = (torch.bfloat16, "200KB") if tied else (torch.float32, "5GB")
    source = write_llama(tmp_path / "model", tied=tied, dtype=dtype, shards=shards)
    done = export(source, tmp_path / "out", "--format", form)
    assert len(done["exported"]) == 14
    assert done["bytes_after"] < (0.65 if tied else 0.4) * done["bytes_before"]
    plain, loaded = load(source), load(tmp_path / "out")
    assert loaded.dtype == dtype
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    (expected, loss), (found, its_loss) = logits(plain), logits(loaded)
    assert 23 < numerics.sqnr(expected, found) < 30
    assert math.exp(its_loss) == pytest.approx(math.exp(loss), rel=0.005)
    for path in done["exported"]:
        assert 31 < numerics.sqnr(weight(plain, path), weight(loaded, path)) < 32.5
    assert torch.equal(weight(plain, "lm_head"), weight(loaded, "lm_head"))


@needs_compressed_tensors
def test_scales_of_the_wrong_rows_would_be_seen(tmp_path: Path) -> None:
    """The bars above fail for a file whose rows have each other's scales."""
    source = write_llama(tmp_path / "model")
    edit_weights(source, lambda all: all[f"{UP}.weight"].mul_(torch.logspace(0, 1, 256)[:, None]))
    export(source, tmp_path / "out")
    good = load(tmp_path / "out")
    edit_weights(
        tmp_path / "out",
        lambda all: all.update({f"{UP}.weight_scale": all[f"{UP}.weight_scale"].flip(0)}),
    )
    bad = load(tmp_path / "out")
    expected, _ = logits(load(source))
    assert numerics.sqnr(expected, logits(good)[0]) > 20
    assert numerics.sqnr(expected, logits(bad)[0]) < 10


@pytest.mark.gpu
@pytest.mark.parametrize("form", LOADABLE[::2])
def test_it_runs_in_fp8_on_a_gpu(tmp_path: Path, form: str) -> None:
    """Through the FP8 GEMMs of torch, as transformers and torchao call them. Those of hf-fp8 are
    downloaded from the hub."""
    source = write_llama(tmp_path / "model", dtype=torch.bfloat16)
    export(source, tmp_path / "out", "--format", form)
    options = {"device_map": "cuda"}
    if form == "compressed-tensors":
        fast = transformers.CompressedTensorsConfig(use_optimized_inference=True)
        with pytest.warns(UserWarning, match="already has a `quantization_config`"):
            model = load(tmp_path / "out", quantization_config=fast, **options)
        assert model.get_submodule(UP).weight.dtype == numerics.E4M3
    else:
        model = load(tmp_path / "out", **options)
    found, _ = logits(model)
    expected, _ = logits(load(source))
    assert 20 < numerics.sqnr(expected, found) < 30


# -- bit for bit, computed without torch --------------------------------------------------------


def by_hand(values: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(FP8 as bytes, what it is multiplied with) of FP32 [N, K], one scale a block."""
    rows, columns = (values.shape[i] // block[i] for i in (0, 1))
    tiles = values.reshape(rows, block[0], columns, block[1])
    scale = np.float32(448) / np.abs(tiles).max(axis=(1, 3), keepdims=True)
    fp8 = (tiles * scale).astype(ml_dtypes.float8_e4m3fn).reshape(values.shape)
    return fp8.view(np.uint8), (np.float32(1) / scale).reshape(rows, columns)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_stored_bit(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    source = write_llama(tmp_path / "model", dtype=dtype)
    done = export(source, tmp_path / "out", "--format", form)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    for path in done["exported"]:
        values = before.pop(f"{path}.weight").float().numpy()
        block = (128, 128) if form == "hf-fp8" else (1, values.shape[1])
        fp8, scales = (after.pop(f"{path}.{name}") for name in PARTS[form])
        assert (fp8.dtype, scales.dtype) == (numerics.E4M3, torch.float32)
        bits, inverse = by_hand(values, block)
        assert np.array_equal(fp8.view(torch.uint8).numpy(), bits)
        assert np.array_equal(scales.numpy(), inverse)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_rows_of_zeros_and_of_one_outlier(tmp_path: Path) -> None:
    """Zeros stay zeros, with a finite scale; the largest value is exact."""
    source = write_llama(tmp_path / "model")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.weight"][3] = 0
        tensors[f"{UP}.weight"][4, 5] = -1e4

    edit_weights(source, change)
    export(source, tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    restored = numerics.dequantize(after[f"{UP}.weight"], after[f"{UP}.weight_scale"])
    assert torch.equal(restored[3], torch.zeros(128))
    assert restored[4, 5].item() == pytest.approx(-1e4, rel=1e-6)
    assert torch.isfinite(after[f"{UP}.weight_scale"]).all()


def test_pieces_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and quantised in small pieces, or at once: the same file; and block edges are kept."""
    source = write_llama(tmp_path / "model")
    for form in FORMATS:
        export(source, tmp_path / "whole", "--format", form, "--force")
        with monkeypatch.context() as patch:
            patch.setattr("fp8patch.checkpoint.tensors.PIECE_BYTES", 150 * 512)
            patch.setattr("fp8patch.export.weights._PART_ELEMENTS", 50 * 128)
            export(source, tmp_path / "pieces", "--format", form, "--force")
        assert digests(tmp_path / "whole") == digests(tmp_path / "pieces")


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    """Of the files that are copied, and of the weights that are read, once each."""
    source = write_llama(tmp_path / "model")
    seen: dict[str, list[tuple[int, int]]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        seen.setdefault(stage, []).append((done, total))

    export_directory(source, tmp_path / "out", progress=progress)
    assert list(seen) == ["copy", "export"]
    for calls in seen.values():
        assert calls == sorted(calls)
        assert calls[-1][0] == calls[-1][1]
    tensors = load_file(source / "model.safetensors").values()
    assert seen["export"][-1][1] == sum(tensor.nbytes for tensor in tensors)


# -- files --------------------------------------------------------------------------------------


def test_a_file_is_what_safetensors_writes(tmp_path: Path) -> None:
    """Aligned tensors without a gap, `format: pt`, and an index whose sizes are true."""
    source = write_llama(tmp_path / "model", shards="200KB")
    export(source, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == sorted({*index["weight_map"].values()})
    assert index["metadata"]["total_size"] == sum(file.stat().st_size for file in files)
    for file in files:
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        spans = sorted(tuple(value["data_offsets"]) for value in header.values())
        assert spans[0][0] == 0
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
        assert spans[-1][1] == len(data) - 8 - length
        with safe_open(file, "pt") as opened:
            for key in opened.keys():
                assert index["weight_map"][key] == file.name
                assert opened.get_tensor(key).data_ptr() % opened.get_tensor(key).itemsize == 0


def test_a_patched_directory_and_torch_files(tmp_path: Path) -> None:
    """A sidecar changes no weight and is not copied; .bin shards become safetensors."""
    source = write_llama(tmp_path / "model")
    export(source, tmp_path / "out")
    assert run("convert", source, "-o", tmp_path / "patched").exit_code == 0
    export(tmp_path / "patched", tmp_path / "same")
    assert digests(tmp_path / "same") == digests(tmp_path / "out")
    assert not {SIDECAR, STATE} & digests(tmp_path / "same").keys()

    as_torch_file(source, shards=2)
    export(source, tmp_path / "sharded")
    names = sorted(path.name for path in (tmp_path / "sharded").glob("model*"))
    assert names == [
        *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)),
        "model.safetensors.index.json",
    ]
    merged = {k: v for name in names[:2] for k, v in load_file(tmp_path / "sharded" / name).items()}
    expected = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[k].float(), expected[k].float()) for k in merged)


def test_which_files_go_along(tmp_path: Path) -> None:
    """What a server reads does; other weights and training state do not, and that is said."""
    source = write_llama(tmp_path / "model")
    write_tokenizer(source)
    (source / "2_Dense").mkdir()
    wanted = ["README.md", "chat_template.jinja", "2_Dense/model.safetensors"]
    left = [
        "optimizer.pt", "pytorch_model.bin", "trainer_state.json", "checkpoint-5/config.json",
        "original/consolidated.00.pth", "tf_model.h5",
    ]  # fmt: skip
    for name in [*wanted, *left]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x")
    done = export(source, tmp_path / "out")
    assert done["left_out"] == sorted(left)
    files = digests(tmp_path / "out").keys()
    assert files >= {*wanted, "tokenizer.json", "generation_config.json", "config.json"}
    assert not files & {*left}
    text = run("export", source, "-o", tmp_path / "out", "--force").stdout
    assert "Not copied: checkpoint-5/config.json, optimizer.pt" in text


def test_an_index_that_is_written_anew_is_not_left_out(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model", shards="200KB")
    done = export(source, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert done["left_out"] == []


def test_the_rest_of_the_config_stays(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model")
    file = source / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "mine": {"a": [1e-7, None]}}))
    export(source, tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    quantisation = after.pop("quantization_config")
    assert after == json.loads(file.read_text())
    assert quantisation["quant_method"] == "compressed-tensors"
    assert quantisation["ignore"] == ["lm_head"]
