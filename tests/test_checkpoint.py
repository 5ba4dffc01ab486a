"""What save and load write and read, and that it is the same model that comes back."""

from pathlib import Path
from typing import Any

import peft
import pytest
import resume_cases as cases
import safetensors.torch
import torch
import transformers
from saved_cases import Plain, files, state, trained
from torch import Tensor, nn

import fp8patch
from fp8patch import messages
from fp8patch.checkpoint.save_load import SIDECAR, STATE
from fp8patch.checkpoint.sidecar import BankMeta
from fp8patch.errors import CheckpointError, HardwareError


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


def test_every_flag_of_the_bank_comes_back(tmp_path: Path) -> None:
    flags = BankMeta.flags()
    assert set(flags) == {"observed", "stepped", "backward_finished", "optimizer_seen"}
    for turned in flags:
        model = fp8patch.convert_model(cases.build("llama"))
        for name in flags:
            setattr(owner_of(name, model._fp8_bank), name, name == turned)
        fp8patch.save(model, tmp_path)
        bank = fp8patch.load(tmp_path)._fp8_bank
        found = {name: getattr(owner_of(name, bank), name) for name in flags}
        assert found == {name: name == turned for name in flags}


def owner_of(flag: str, bank: Any) -> Any:
    return bank.clock if flag in BankMeta.clock_flags() else bank


def test_a_model_converted_in_parts_hears_of_it_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_seen", set())
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(16, 16)) for name in "abc"})
    fp8patch.convert_model(model["a"])
    fp8patch.convert_model(model["b"])
    fp8patch.save(model, tmp_path)
    fp8patch.save(model, tmp_path)
    assert capsys.readouterr().err.count("was converted in 2 parts") == 1
    # Whatever its id: what is to be said of it is something else.
    fp8patch.convert_model(model["c"])
    fp8patch.save(model, tmp_path)
    assert "was converted in 3 parts" in capsys.readouterr().err


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
