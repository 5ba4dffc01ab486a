"""A sidecar that somebody has edited: one clear line for each mistake, and nothing is accepted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from saved_cases import trained

import fp8patch
from fp8patch.checkpoint import sidecar
from fp8patch.checkpoint.save_load import SIDECAR, STATE
from fp8patch.errors import CheckpointError
from fp8patch.plan.model import Plan

UP = "model.layers.0.mlp.up_proj"
NORM = "model.layers.0.input_layernorm"


@pytest.fixture(scope="module")
def llama() -> Any:
    return trained()


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return trained("gpt2")


@pytest.fixture
def saved(llama: Any, tmp_path: Path) -> Path:
    fp8patch.save(llama, tmp_path / "saved")
    return tmp_path / "saved"


def edit(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((directory / SIDECAR).read_text())
    change(values)
    (directory / SIDECAR).write_text(json.dumps(values))


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        fp8patch.load(directory, **options)
    text = str(caught.value)
    assert str(directory) in text
    assert "\n" not in text
    assert len(text) < 700
    return text


def decision(values: dict[str, Any], path: str = UP) -> dict[str, Any]:
    found: dict[str, Any] = next(d for d in values["plan"]["decisions"] if d["path"] == path)
    return found


def also(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: decision(values).update(changes)


def in_plan(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values["plan"].update(changes)


def twice(values: dict[str, Any]) -> None:
    values["plan"]["decisions"].append(decision(values))


def no_decisions(values: dict[str, Any]) -> None:
    values["plan"]["decisions"] = []


def siblings(**found: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values["bank"].update(
        siblings={k.replace("_A_", UP): v for k, v in found.items()}
    )


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "twice": (twice, f"2 decisions on '{UP}'"),
    "a norm": (also(kind="norm"), "does not convert"),
    "a Conv1D": (also(kind="conv1d"), "as a conv1d, and a Linear is a linear"),
    "attention": (also(kind="mha"), "kind 'mha' has no FP8 form"),
    "a pool": (also(kind="pool"), "kind 'pool' is unknown"),
    "an RMSNorm": (
        lambda values: decision(values, NORM).update(kind="norm"),
        f"'{NORM}' .* as a norm, and a LlamaRMSNorm is a rmsnorm",
    ),
    "skipped for ok": (also(action="skip"), "'skip' does not go with code 'ok'"),
    "converted for its size": (also(code="misaligned"), "'convert' does not go with code"),
    "a list of numbers": (in_plan(decisions=[1]), "a decision is 1, not an object"),
    "an object of decisions": (in_plan(decisions={}), r"decisions is {}, not of type list"),
    "none, but slots": (no_decisions, "names 'model.*does not convert"),
    "more": (also(color="red"), "a decision has no 'color'"),
    "a true size": (also(out_features=True), "out_features is True, not of type int"),
    "a negative size": (also(in_features=-1), "in_features is -1"),
    "a gain of nothing": (also(gain="1"), "gain is '1', not a number"),
    "a huge share": (also(flops_share=10**400), "flops_share is 1000"),
    "no tokens": (in_plan(tokens=0), "tokens is 0"),
    "half a token": (in_plan(tokens=0.5), "tokens is 0.5, not of type int"),
    "a list as a GPU": (in_plan(gpu=[]), r"gpu is \[\], not of type str"),
    "no gain wanted": (in_plan(min_gain=None), "min_gain is None"),
    "a cycle": (siblings(_A_="x", x=UP), "follows 'x', which follows another"),
    "itself": (siblings(_A_=UP), "which follows another"),
    "an unknown sibling": (siblings(_A_="model.layers.7"), "siblings names 'model.layers.7'"),
    "a sibling of numbers": (siblings(_A_=3), "siblings is .*not an object of texts"),
    "an unknown norm": (
        lambda values: values["bank"].update(low_precision_norms=["x"]),
        "low_precision_norms names 'x'",
    ),
    "a norm's unknown reader": (
        lambda values: values["bank"].update(norm_readers={NORM: "x"}),
        "norm_readers names 'x'",
    ),
    "a reader of no norm": (
        lambda values: values["bank"].update(norm_readers={UP: UP}),
        "norm_readers names 'model.*up_proj'",
    ),
    "an unknown weight": (lambda values: values["fingerprint"].update(x="y"), "fingerprint names"),
    "format true": (lambda values: values.update(format_version=True), "format_version is True"),
    "format 0": (lambda values: values.update(format_version=0), "format_version is 0"),
    "format -1": (lambda values: values.update(format_version=-1), "format_version is -1"),
    "format 1.0": (lambda values: values.update(format_version=1.0), "format_version is 1.0"),
    "root 3": (lambda values: values.update(root=3), "root is 3, not a text"),
}


@pytest.mark.parametrize(("change", "message"), EDITS.values(), ids=EDITS)
def test_an_edited_sidecar(saved: Path, change: Any, message: str) -> None:
    edit(saved, change)
    with pytest.raises(CheckpointError, match=message):
        fp8patch.load(saved)
    refusal(saved)


def test_a_norm_whose_claims_were_edited_too(saved: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        decision(values)["kind"] = "norm"
        values["bank"]["siblings"] = {}
        del values["fingerprint"][UP]

    edit_state(saved, lambda tensors: [tensors.pop(n) for n in list(tensors) if UP in n])
    edit(saved, change)
    assert "as a norm, and a Linear is a linear" in refusal(saved)


def test_kinds_are_compared_with_a_model_that_is_converted_already(
    gpt2: Any, tmp_path: Path
) -> None:
    fp8patch.save(gpt2, tmp_path)
    path = "transformer.h.0.ln_1"

    def change(values: dict[str, Any]) -> None:
        decision(values, path)["kind"] = "linear"
        values["bank"].update(low_precision_norms=[], norm_readers={})

    edit(tmp_path, change)
    assert f"'{path}' is a linear, and it is a norm" in refusal(tmp_path, model=trained("gpt2"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"format_version": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"format_version": NaN}', "NaN is not a number of JSON"),
        ("[]", "not a JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_json_that_python_refuses(saved: Path, text: str, message: str) -> None:
    (saved / SIDECAR).write_text(text)
    assert message in refusal(saved)


def test_every_depth_of_nesting(saved: Path) -> None:
    # One that can just be read may be too deep to be written into a message.
    for depth in range(600, 1000, 3):
        (saved / SIDECAR).write_text('{"format_version": ' + "[" * depth + "]" * depth + "}")
        refusal(saved)


# -- the state ------------------------------------------------------------------------------------


def edit_state(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = safetensors.torch.load((directory / STATE).read_bytes())
    change(tensors)
    data = safetensors.torch.save(tensors)
    (directory / STATE).write_bytes(data)
    edit(directory, lambda values: values["state"].update(digest=sidecar._digest(data)))


STATES: dict[str, tuple[str, Any, str]] = {
    "scale nan": ("scale", torch.tensor(torch.nan), "infinite or undefined scale"),
    "scale inf": ("scale", torch.tensor(torch.inf), "infinite or undefined scale"),
    "scale -1": ("scale", torch.tensor(-1.0), "negative scale"),
    "history inf": ("history", torch.tensor([1, torch.inf]), "infinite or undefined history"),
    "history -1": ("history", torch.tensor([1.0, -1.0]), "negative history"),
    "amax -1": ("amax", torch.tensor(-1.0), "negative amax"),
    "counts -1": ("counts", torch.tensor([0, 0, -1, 0]), "negative counts"),
    "counts of 3": ("counts", torch.tensor([0, 0, 0]), "incomplete"),
    "scale of FP64": ("scale", torch.tensor(1.0).double(), r"float64 \[\], which no slot has"),
    "scales": ("scale", torch.ones(2), r"float32 \[2\], which no slot has"),
    "a history of one number": ("history", torch.tensor(1.0), r"float32 \[\]"),
}


@pytest.mark.parametrize(("part", "value", "message"), STATES.values(), ids=STATES)
def test_an_edited_state(saved: Path, part: str, value: Any, message: str) -> None:
    edit_state(saved, lambda tensors: tensors.update({f"{UP}.weight.{part}": value}))
    with pytest.raises(CheckpointError, match=message):
        fp8patch.load(saved)
    refusal(saved)


@pytest.mark.parametrize("name", ["scale", "x.scale", "x.bias.scale", "x.weight.color"])
def test_an_unknown_tensor(saved: Path, name: str) -> None:
    edit_state(saved, lambda tensors: tensors.update({name: torch.ones(())}))
    assert f"'{name}' is float32 [], which no slot has" in refusal(saved)


def test_a_slot_of_no_module(saved: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("scale", "history", "amax", "counts"):
            tensors[f"x.weight.{part}"] = tensors[f"{UP}.weight.{part}"].clone()

    edit_state(saved, change)
    assert "the state file names 'x', which its plan does not convert" in refusal(saved)


def test_another_model(saved: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("mlp", "ffn")] = tensors.pop(name)

    text = (saved / SIDECAR).read_text()
    (saved / SIDECAR).write_text(text.replace("mlp", "ffn"))
    edit_state(saved, rename)
    assert "another model: it names 'model.layers.0.ffn" in refusal(saved)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_pending_amax_may_be_of_a_step_that_overflowed(saved: Path, value: float) -> None:
    name = f"{UP}.weight.amax"
    edit_state(saved, lambda tensors: tensors.update({name: torch.tensor(value)}))
    assert fp8patch.load(saved) is not None


def test_what_is_saved_is_a_plan_that_reads_back(saved: Path) -> None:
    values = json.loads((saved / SIDECAR).read_text())["plan"]
    assert Plan.from_dict(values).to_dict() == values
