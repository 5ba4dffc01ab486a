"""What `fp8patch export` leaves in high precision, why, and what it tells loaders about it."""

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import run, write
from exported import export, write_llama
from safetensors.torch import save_file
from torch import nn
from torchao.quantization import Float8Tensor
from transformers.quantizers.quantizers_utils import should_convert_module
from zoo import ENTRIES

from fp8patch.checkpoint.tensors import open_tensors
from fp8patch.errors import ConversionError
from fp8patch.export.directory import FORMATS
from fp8patch.export.formats import BlockFp8, CompressedTensors, Format
from fp8patch.export.layers import Selected, _reads, select
from fp8patch.export.torchao import TorchAo
from fp8patch.plan.model import plan_model

FORMS: tuple[type[Format], ...] = (CompressedTensors, BlockFp8, TorchAo)


def choose(model: nn.Module, form: Format, path: Path, **options: Any) -> Selected:
    """`select` for a model whose weights are stored in `path`."""
    path.mkdir(exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, path / "model.safetensors")
    plan = plan_model(model, gpu=None, **options)
    return select(model, plan, open_tensors(path), form, {})


def codes(selected: Selected) -> dict[str, str]:
    return {kept.path: kept.code for kept in selected.kept}


def quantisation(out: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((out / "config.json").read_text())["quantization_config"]
    return values


def test_the_formats_are_those_that_the_command_names() -> None:
    assert tuple(form.name for form in FORMS) == FORMATS
    text = " ".join(run("export", "--help").stdout.split())
    assert "compressed-tensors, hf-fp8 or torchao" in text


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """Heads, embeddings, routers and 3-D experts stay; every loader is told of each of them."""
    source = write(tmp_path / "model", "qwen2_moe")
    done = export(source, tmp_path / "out")
    by_code: dict[str, set[str]] = {}
    for kept in done["kept"]:
        by_code.setdefault(kept["code"], set()).add(kept["path"])
    block = "model.layers.1.mlp"
    assert by_code["head"] == {"lm_head"}
    assert by_code["embedding"] == {"model.embed_tokens"}
    assert f"{block}.shared_expert_gate" in by_code["router"]
    assert f"{block}.experts.down_proj" in by_code["unsupported"]
    assert f"{block}.shared_expert.down_proj" in done["exported"]
    ignored = set(quantisation(tmp_path / "out")["ignore"])
    # The router is no Linear to transformers, and one to vLLM; so is each expert.
    assert {"lm_head", f"{block}.gate", f"{block}.experts", r"re:.*\.experts\..*"} <= ignored
    assert not ignored & {*done["exported"]}


@pytest.mark.parametrize("name", ["qwen2_moe", "t5", "vit", "wav2vec2"])
def test_loaders_skip_what_was_kept_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By transformers' own rule, which matches the starts and the ends of paths. Blocks of 16."""
    monkeypatch.setattr("fp8patch.export.formats._BLOCK", 16)
    source = write(tmp_path / "model", name)
    done = export(source, tmp_path / "out", "--format", "hf-fp8")
    values = quantisation(tmp_path / "out")
    assert values["ignored_layers"] == values["modules_to_not_convert"]
    model = ENTRIES[name].build()
    skip = [*values["modules_to_not_convert"], *(model._keep_in_fp32_modules or ())]
    assert done["exported"]
    for path, module in model.named_modules():
        # What transformers puts an FP8 module in the place of.
        if type(module) is nn.Linear or path.endswith(".experts"):
            assert should_convert_module(path, skip) == (path in done["exported"]), path


def test_ragged_blocks_and_what_is_fused_with_them(tmp_path: Path) -> None:
    """Two heads of 32 for the keys: k and v have 64 rows, half a block."""
    source = write_llama(tmp_path / "model", num_key_value_heads=2)
    done = export(source, tmp_path / "blocks", "--format", "hf-fp8")
    reasons = {kept["path"]: (kept["code"], kept["reason"]) for kept in done["kept"]}
    above = "model.layers.0.self_attn"
    code, reason = reasons[f"{above}.k_proj"]
    assert code == "block"
    assert "N=64 is no multiple of 128" in reason
    code, reason = reasons[f"{above}.q_proj"]
    assert code == "fused"
    assert f"{above}.k_proj" in reason
    assert f"{above}.o_proj" in done["exported"]
    assert len(export(source, tmp_path / "rows")["exported"]) == 14


@pytest.mark.parametrize("form", FORMATS)
def test_a_pattern_takes_along_what_is_fused(tmp_path: Path, form: str) -> None:
    source = write_llama(tmp_path / "model")
    done = export(
        source, tmp_path / "out", "--format", form, "--skip", "*.0.mlp.up_proj", "--only", "*.mlp.*"
    )
    assert done["exported"] == [
        "model.layers.0.mlp.down_proj",
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    found = {kept["path"]: kept["code"] for kept in done["kept"]}
    assert found["model.layers.0.mlp.gate_proj"] == "fused"
    assert found["model.layers.0.mlp.up_proj"] == "pattern"
    assert found["model.layers.0.self_attn.q_proj"] == "not_selected"


def test_a_pattern_is_shown_as_it_was_given(tmp_path: Path) -> None:
    """Not as markup, in which [u] is the beginning of an underlined text."""
    source = write_llama(tmp_path / "model")
    result = run("export", source, "-o", tmp_path / "out", "--skip", "*.[u]p_proj")
    rows = [line.rstrip().split(maxsplit=3) for line in result.stdout.splitlines()]
    path = "model.layers.*.mlp.up_proj"
    assert [path, "x2", "pattern", 'skipped by the pattern "*.[u]p_proj"'] in rows
    path, reason = path.replace("up", "gate"), f"servers fuse it with {path}"
    assert [path, "x2", "fused", f"{reason}, which is in high precision"] in rows


def test_what_a_pattern_kept_out_of_training_stays_out(tmp_path: Path) -> None:
    """Of the plan beside a patched model, only what the user asked for counts."""
    source = write_llama(tmp_path / "model")
    assert run("convert", source, "-o", tmp_path / "p", "--skip", "*.down_proj").exit_code == 0
    done = export(tmp_path / "p", tmp_path / "out")
    kept = {kept["path"]: kept for kept in done["kept"]}
    assert kept["model.layers.0.mlp.down_proj"]["code"] == "pattern"
    assert '"*.down_proj"' in kept["model.layers.0.mlp.down_proj"]["reason"]
    assert len(done["exported"]) == 12


class Shared(nn.Module):
    """A Linear under a short name, one whose name ends alike, two of one weight, one not called."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(128, 128)
        self.layers = nn.ModuleList(nn.ModuleDict({"my_fc": nn.Linear(128, 128)}) for _ in "ab")
        self.first = nn.Linear(128, 128)
        self.second = nn.Linear(128, 128)
        self.second.weight = self.first.weight
        self.read = nn.Linear(128, 128)
        self.asked = nn.Linear(128, 128)
        self.thin = nn.Linear(128, 24)
        self.double = nn.Linear(128, 128).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.asked(x.to(self.asked.weight.dtype))
        return x @ self.read.weight.t()


@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_exported(tmp_path: Path, form: type[Format]) -> None:
    model = Shared()
    stored = model.state_dict()
    del stored["second.weight"]
    model.state_dict = lambda: stored  # type: ignore[method-assign, assignment]
    selected = choose(model, form(), tmp_path, skip=["fc"])
    found = codes(selected)
    assert found == {
        "fc": "pattern",
        "first": "tied",
        "second": "tied",
        "read": "bypassed",
        "thin": "misaligned",
        "double": "dtype",
        # Told to leave "fc" alone, transformers would leave these alone as well.
        **({"layers.0.my_fc": "name", "layers.1.my_fc": "name"} if form is BlockFp8 else {}),
    }
    exported = {layer.path for layer in selected.layers}
    assert exported == {"layers.0.my_fc", "layers.1.my_fc", "asked"} - found.keys()
    assert set(selected.names) == found.keys()


def test_a_read_of_the_weight_is_found_in_the_source() -> None:
    assert _reads(Shared, "read")
    assert not _reads(Shared, "asked")
    assert not _reads(nn.Linear, "first")
    assert not _reads(type("Made", (nn.Module,), {}), "first")


def test_names_of_files_and_of_the_model_are_both_told(tmp_path: Path) -> None:
    """ViT is stored under names of an older transformers."""
    source = write(tmp_path / "model", "vit")
    export(source, tmp_path / "out", "--only", "*.mlp.*")
    ignored = set(quantisation(tmp_path / "out")["ignore"])
    assert {"vit.layers.0.attention.q_proj"} <= ignored
    assert {"vit.encoder.layer.0.attention.attention.query"} <= ignored


def test_torchao_gets_no_zero_for_padding(tmp_path: Path) -> None:
    """A token of zeros has an amax of 0, by which torchao divides unless it is given a floor."""
    form = TorchAo()
    layer = choose(nn.Sequential(nn.Linear(128, 128)), form, tmp_path).layers[0]
    described = form.metadata([layer], {})
    assert described["tensor_names"] == '["0.weight"]'
    meta = form._on_meta(layer)
    weight = Float8Tensor(
        torch.zeros(meta.qdata.shape).to(meta.qdata.dtype),
        torch.ones(meta.scale.shape),
        *(getattr(meta, n) for n in ("block_size", "mm_config", "act_quant_kwargs")),
        dtype=torch.bfloat16,
    )
    x = torch.randn(4, 128).bfloat16()
    x[2] = 0
    assert torch.equal(nn.functional.linear(x, weight), torch.zeros(4, 128).bfloat16())


def test_a_missing_or_old_torchao_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.core.config", None)
    with pytest.raises(ConversionError, match=r"newer torchao than .* pip install -U torchao"):
        TorchAo()

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(ConversionError, match=r"needs the package torchao.* pip install torchao"):
        TorchAo()
