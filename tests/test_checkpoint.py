"""What save and load write, read, refuse and survive."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import resume_cases as cases
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

import fp8patch
from fp8patch import checkpoint_sidecar
from fp8patch.checkpoint import SIDECAR, STATE
from fp8patch.errors import CheckpointError, HardwareError


def trained(architecture: str = "llama", recipe: str = "delayed", steps: int = 2) -> Any:
    model, optimizer = cases.start(f"{architecture}-{recipe}")
    cases.train(model, optimizer, 0, steps * cases.ACCUMULATION)
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return trained()


@pytest.fixture
def saved(llama: Any, tmp_path: Path) -> Path:
    fp8patch.save(llama, tmp_path / "saved")
    return tmp_path / "saved"


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad(), cases.fp8():
        return model(input_ids=cases.batch(7)).logits  # type: ignore[no-any-return]


def state(model: Any) -> dict[str, Any]:
    return cases.outcome(model, [])  # type: ignore[no-any-return]


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((directory / SIDECAR).read_text())
    change(values)
    (directory / SIDECAR).write_text(json.dumps(values))


class Plain(nn.Module):
    """Not of transformers; two of its weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(tokens)))  # type: ignore[no-any-return]


# -- what comes back ------------------------------------------------------------------------------


def test_the_same_model_comes_back(llama: Any, saved: Path) -> None:
    loaded = fp8patch.load(saved)
    assert type(loaded) is type(llama)
    cases.assert_equal(state(loaded), state(llama))
    assert torch.equal(logits(loaded), logits(llama))
    assert fp8patch.metrics(loaded) == fp8patch.metrics(llama)


def test_the_plain_library_loads_it_too(llama: Any, saved: Path) -> None:
    plain, report = transformers.AutoModelForCausalLM.from_pretrained(
        saved, output_loading_info=True
    )
    assert not any(report.values())
    for key, value in plain.state_dict().items():
        assert torch.equal(value, llama.state_dict()[key])


def test_a_model_never_run_comes_back(tmp_path: Path) -> None:
    fp8patch.save(fp8patch.convert_model(cases.build("bert")), tmp_path)
    loaded = fp8patch.load(tmp_path)
    assert fp8patch.metrics(loaded) == {}
    assert isinstance(loaded.bert.encoder.layer[0].output.dense, fp8patch.Float8Linear)


def test_the_plan_is_replayed_not_decided_anew(tmp_path: Path) -> None:
    model = fp8patch.convert_model(cases.build("llama"), "current", only=["*.mlp.*"])
    fp8patch.save(model, tmp_path)
    loaded = fp8patch.load(tmp_path)
    assert loaded._fp8_plan == model._fp8_plan
    assert loaded._fp8_bank.paths == model._fp8_bank.paths
    assert loaded._fp8_bank.recipe == model._fp8_bank.recipe


@pytest.mark.parametrize("convert_first", [True, False])
def test_load_into_a_model_of_the_user(llama: Any, saved: Path, convert_first: bool) -> None:
    model = cases.build("llama", seed=5)
    if convert_first:
        fp8patch.convert_model(model)
    first = next(model.parameters())
    assert fp8patch.load(saved, model=model) is model
    assert next(model.parameters()) is first
    cases.assert_equal(state(model), state(llama))


def test_a_plain_module_with_ties(tmp_path: Path) -> None:
    model = fp8patch.convert_model(Plain())
    tokens = torch.arange(6).reshape(2, 3)
    with fp8patch.autocast(backend="emulate"):
        model(tokens).sum().backward()
    fp8patch.save(model, tmp_path)
    assert set(files(tmp_path)) == {"model.safetensors", SIDECAR, STATE}
    loaded = fp8patch.load(tmp_path, model=Plain())
    assert loaded.head.weight is loaded.embedding.weight
    cases.assert_equal(state(loaded), state(model))
    with pytest.raises(CheckpointError, match="pass it: fp8patch.load"):
        fp8patch.load(tmp_path)


def test_a_converted_part_of_a_model(tmp_path: Path) -> None:
    model = Plain()
    fp8patch.convert_model(model.inner)
    fp8patch.save(model, tmp_path)
    loaded = fp8patch.load(tmp_path, model=Plain())
    assert isinstance(loaded.inner[0], fp8patch.Float8Linear)
    assert type(loaded.head) is nn.Linear


def test_wrappers_are_looked_through(tmp_path: Path) -> None:
    model = Plain()
    wrapped: Any = torch.compile(fp8patch.convert_model(model), backend="eager")
    fp8patch.save(wrapped, tmp_path)
    loaded: Any = torch.compile(Plain(), backend="eager")
    fp8patch.load(tmp_path, model=loaded)
    cases.assert_equal(state(loaded._orig_mod), state(model))


def test_backend_device_and_dtype(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for backend in ("off", "bf16"):
        assert not hasattr(fp8patch.load(saved, backend=backend), "_fp8_plan")
    for backend in ("auto", "emulate"):
        assert hasattr(fp8patch.load(saved, backend=backend, device="cpu"), "_fp8_plan")
    with pytest.raises(HardwareError, match="emulate"):
        fp8patch.load(saved, backend="fp8", device="cpu")
    assert "not those" not in capsys.readouterr().err
    loaded = fp8patch.load(saved, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert "weights are not those" in capsys.readouterr().err


@pytest.mark.filterwarnings("default")  # peft reads a deprecated property of transformers
def test_an_adapter(tmp_path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(3)
        base = fp8patch.convert_model(cases.build("llama"))
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(base, config)

    model = build()
    optimizer = cases.optimizer_of(model)
    cases.train(model, optimizer, 0, 4)
    model.save_pretrained(tmp_path)
    assert {SIDECAR, STATE, "adapter_config.json"} <= set(files(tmp_path))
    with pytest.raises(CheckpointError, match="adapter"):
        fp8patch.load(tmp_path)
    loaded = fp8patch.load(tmp_path, model=build())
    expected = state(model.base_model.model)
    cases.assert_equal(state(loaded.base_model.model), expected)


# -- save_pretrained ------------------------------------------------------------------------------


def test_sharded(llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    cases.assert_equal(state(fp8patch.load(tmp_path)), state(llama))
    # The next save is one file, and leaves no shard of the last.
    fp8patch.save(llama, tmp_path)
    assert [p.name for p in tmp_path.glob("model*")] == ["model.safetensors"]


def test_a_plain_model_leaves_no_stale_sidecar(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases.build("llama").save_pretrained(saved, is_main_process=False)
    assert (saved / SIDECAR).is_file()
    cases.build("llama").save_pretrained(saved)
    assert not list(saved.glob("fp8patch*"))
    assert "removed the FP8 state of an earlier save" in capsys.readouterr().err


def test_a_part_of_a_converted_model_says_that_it_has_no_sidecar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained("bert").bert.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("fp8patch*"))
    assert "part of a converted model" in capsys.readouterr().err


def test_extra_state_stays_out_of_save_pretrained(tmp_path: Path) -> None:
    model = fp8patch.convert_model(cases.build("llama"), extra_state=True)
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", state_dict=model.state_dict())
    for name in ("a", "b"):
        keys = safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        assert not any("_extra_state" in key for key in keys)
    assert any("_extra_state" in key for key in model.state_dict())
    assert any("_extra_state" in key for key in fp8patch.load(tmp_path / "a").state_dict())


# -- what does not fit ----------------------------------------------------------------------------


def test_other_weights_keep_the_state_of_activations(
    llama: Any, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = cases.build("llama", seed=9)
    path = "model.layers.0.mlp.up_proj"
    weights = llama.state_dict()
    weights[f"{path}.weight"] = other.get_submodule(path).weight.detach()
    safetensors.torch.save_file(weights, saved / "model.safetensors", {"format": "pt"})
    loaded = fp8patch.load(saved)
    line = capsys.readouterr().err
    assert f"1 of 14 weights are not those it was saved with ({path}, for one)" in line
    ours, theirs = state(loaded)["state"], state(llama)["state"]
    assert set(theirs) - set(ours) == {
        f"{path}.weight.{n}" for n in ("history", "scale", "amax", "counts")
    }
    for key, value in ours.items():
        assert torch.equal(value, theirs[key])


def another(values: dict[str, Any]) -> None:
    for decision in values["plan"]["decisions"]:
        decision["path"] = decision["path"].replace("mlp", "ffn")


def wider(values: dict[str, Any]) -> None:
    values["fingerprint"] = {
        path: text.replace("[32, 32]", "[64, 32]") for path, text in values["fingerprint"].items()
    }


def newer(values: dict[str, Any]) -> None:
    values["format_version"], values["fp8patch_version"] = 2, "9.0"


def unknown_field(values: dict[str, Any]) -> None:
    values["plan"]["recipe"]["block"] = 128


BAD_JSON = {
    "newer": (newer, r"format 2.*reads formats up to 1\. Upgrade"),
    "another model": (another, r"another model: it names 'model.layers.0.ffn"),
    "another shape": (wider, r"another model: .*\[64, 32\], and has \[32, 32\]"),
    "newer recipe": (unknown_field, "block"),
    "no format": (lambda values: values.pop("format_version"), "format_version"),
    "no plan": (lambda values: values.pop("plan"), "'plan' is missing"),
    "flag": (lambda values: values["bank"].update(observed="yes"), "observed is 'yes'"),
    "outside": (lambda values: values["state"].update(file="../x"), "not a plain file name"),
}


@pytest.mark.parametrize(("change", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_a_bad_sidecar_is_one_clear_line(saved: Path, change: Any, message: str) -> None:
    edit(saved, change)
    with pytest.raises(CheckpointError, match=message) as error:
        fp8patch.load(saved)
    assert SIDECAR in str(error.value)
    assert "\n" not in str(error.value)


def test_truncated_files(saved: Path) -> None:
    whole = files(saved)
    for name in (SIDECAR, STATE):
        (saved / name).write_bytes(whole[name][: len(whole[name]) // 2])
        with pytest.raises(CheckpointError, match=f"{name}: corrupt: .*Copy it again"):
            fp8patch.load(saved)
        (saved / name).write_bytes(whole[name])
    (saved / STATE).unlink()
    with pytest.raises(CheckpointError, match=f"{STATE}: corrupt: the file is missing"):
        fp8patch.load(saved)


@pytest.mark.filterwarnings("default")
def test_bad_weights(saved: Path) -> None:
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="weights cannot be loaded"):
        fp8patch.load(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="weights cannot be loaded"):
        fp8patch.load(saved)
    weights = safetensors.torch.load(whole)
    del weights["model.layers.0.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 missing keys .*up_proj"):
        fp8patch.load(saved)


def test_no_directory_and_no_sidecar(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        fp8patch.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"convert that with fp8patch\.convert_model"):
        fp8patch.load(tmp_path)


def test_another_class_of_model(saved: Path) -> None:
    with pytest.raises(CheckpointError):
        fp8patch.load(saved, model=Plain())


def test_another_recipe_starts_anew(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = fp8patch.convert_model(cases.build("llama"), "current")
    fp8patch.load(saved, model=model)
    assert "saved with scaling='delayed'" in capsys.readouterr().err
    assert fp8patch.metrics(model) == {}


# -- a full disk ----------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_files(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = files(saved), checkpoint_sidecar._write_bytes
    model = trained(steps=3)

    def full(path: Path, data: bytes) -> None:
        if SIDECAR in path.name:
            write(path, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(checkpoint_sidecar, "_write_bytes", full)
    with pytest.raises(CheckpointError, match=r"No space left.*untouched\. Free some space"):
        fp8patch.save(model, saved)
    assert files(saved) == before
    with pytest.raises(CheckpointError, match="No space left"):
        fp8patch.save(model, saved.parent / "new")
    assert not (saved.parent / "new").exists()
    # save_pretrained has written the weights by then; the sidecar stays whole.
    with pytest.raises(CheckpointError, match="No space left"):
        model.save_pretrained(saved)
    after = files(saved)
    assert set(after) == set(before)
    assert {n: after[n] for n in (SIDECAR, STATE)} == {n: before[n] for n in (SIDECAR, STATE)}


def test_a_full_disk_while_weights_are_written(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    before = files(saved)
    monkeypatch.setattr(safetensors.torch, "save_model", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        fp8patch.save(fp8patch.convert_model(Plain()), saved)
    assert files(saved) == before


def test_what_a_killed_save_left_is_swept(saved: Path, llama: Any) -> None:
    left = saved / ".fp8patch-save.4194305"  # beyond the largest pid
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    fp8patch.save(llama, saved)
    assert not left.exists()
