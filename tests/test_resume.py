"""A run that is stopped and resumed goes on to the last bit as if it had not been."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import resume_cases as cases
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

import fp8patch
from fp8patch.checkpoint import hooks, ranks
from fp8patch.checkpoint import state as checkpoint_state
from fp8patch.checkpoint.save_load import SIDECAR, STATE


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """{case: (outcome at once, outcome of the second half in another process)}"""
    directory = tmp_path_factory.mktemp("resume")
    at_once = {}
    for case in cases.CASES:
        model, optimizer = cases.start(case)
        cases.train(model, optimizer, 0, cases.STOP)
        (directory / case).mkdir()
        cases.stop_here(model, optimizer, directory / case)
        # Saving must not disturb the run that goes on.
        losses = cases.train(model, optimizer, cases.STOP, cases.END)
        at_once[case] = cases.outcome(model, losses)
    done = subprocess.run(
        [sys.executable, cases.__file__, str(directory)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    outcomes = {case: torch.load(directory / case / "outcome.pt") for case in cases.CASES}
    return {case: (at_once[case], outcomes[case]) for case in cases.CASES}


@pytest.mark.parametrize("case", cases.CASES)
def test_another_process_goes_on_bit_for_bit(case: str, resumed: Any) -> None:
    at_once, in_two = resumed[case]
    assert at_once["state"]
    cases.assert_equal(in_two, at_once)
    if case.startswith("gpt2"):
        assert at_once["notes"]["norms"], "no LayerNorm feeds GEMMs alone: nothing was tested"


def test_saving_does_not_disturb_the_run(resumed: Any) -> None:
    model, optimizer = cases.start("gpt2-delayed")
    cases.train(model, optimizer, 0, cases.STOP)
    losses = cases.train(model, optimizer, cases.STOP, cases.END)
    cases.assert_equal(cases.outcome(model, losses), resumed["gpt2-delayed"][0])


# 1: within the first step; 2: after it, before it was ever acted on; 7: between micro-batches.
@pytest.mark.parametrize("stop", [1, 2, 7])
@pytest.mark.parametrize("case", ["gpt2-delayed", "llama-current"])
def test_stopped_anywhere(case: str, stop: int, tmp_path: Path) -> None:
    model, optimizer = cases.start(case)
    cases.train(model, optimizer, 0, stop)
    cases.stop_here(model, optimizer, tmp_path)
    expected = cases.outcome(model, cases.train(model, optimizer, stop, stop + 7))
    model, optimizer = cases.resume(tmp_path)
    actual = cases.outcome(model, cases.train(model, optimizer, stop, stop + 7))
    cases.assert_equal(actual, expected)


class Sequences(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = cases.batch(index)[0]
        return {"input_ids": tokens, "labels": tokens}


class Fp8Trainer(transformers.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with fp8patch.autocast(backend="emulate"):
            return super().compute_loss(*args, **kwargs)


def trainer(model: Any, directory: Path, **options: Any) -> Fp8Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=6,
        save_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        use_cpu=True,
        bf16=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=100,
        **options,
    )
    return Fp8Trainer(model=model, args=arguments, train_dataset=Sequences())


class Plain(nn.Module):
    """Nothing of transformers: Trainer saves its state dict alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(cases.VOCABULARY, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, cases.VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        logits = self.head(hidden + self.down(torch.relu(self.up(hidden))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["gpt2", "plain"])
def test_trainer_resumes_from_its_checkpoint(kind: str, tmp_path: Path) -> None:
    def build() -> Any:
        model = Plain() if kind == "plain" else cases.build(kind)
        return fp8patch.convert_model(model, include=["head"] if kind == "plain" else ())

    model = build()
    trainer(model, tmp_path / "at_once").train()
    expected = cases.outcome(model, [])

    checkpoint = tmp_path / "at_once" / "checkpoint-3"
    assert (checkpoint / SIDECAR).is_file()
    model = build()
    trainer(model, tmp_path / "resumed").train(resume_from_checkpoint=str(checkpoint))
    cases.assert_equal(cases.outcome(model, []), expected)


@pytest.mark.filterwarnings("default")
def test_ranks_that_do_not_save_the_model_write_what_they_have_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (hooks, ranks, checkpoint_state):
        monkeypatch.setattr(module, "place", lambda: (1, 2))
    monkeypatch.setattr(transformers.TrainingArguments, "should_save", property(lambda _: False))
    model = fp8patch.convert_model(cases.build("llama"))
    trainer(model, tmp_path).train()
    own = tmp_path / "checkpoint-3" / "fp8patch_state.rank1.safetensors"
    assert [path.name for path in own.parent.glob("fp8patch*")] == [own.name]
    # Nothing was reduced, so its history and scales are in it too.
    assert any(len(value) for key, value in load_file(own).items() if key.endswith(".history"))
    model.save_pretrained(tmp_path / "by_hand", is_main_process=False)
    assert [path.name for path in (tmp_path / "by_hand").glob("fp8patch*")] == [own.name]
    # `fp8patch.save` is called in one process, whichever.
    fp8patch.save(model, tmp_path / "one")
    assert (tmp_path / "one" / SIDECAR).is_file()


@pytest.mark.filterwarnings("default")
def test_trainer_loads_the_state_of_its_best_model(tmp_path: Path) -> None:
    model = fp8patch.convert_model(cases.build("llama"))
    run = trainer(model, tmp_path, save_total_limit=3)
    run.train()
    run.state.best_model_checkpoint = str(tmp_path / "checkpoint-3")
    run._load_best_model()
    best = fp8patch.load(tmp_path / "checkpoint-3")
    cases.assert_equal(cases.outcome(model, []), cases.outcome(best, []))


def accelerated() -> tuple[Accelerator, list[Any], list[Any]]:
    accelerator = Accelerator(cpu=True)
    models = [
        fp8patch.convert_model(cases.build("llama")),
        cases.build("bert"),
        fp8patch.convert_model(cases.build("gpt2"), "current"),
    ]
    optimizers = [cases.optimizer_of(model) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    return accelerator, list(prepared[:3]), list(prepared[3:])


def test_accelerator_state_of_several_models(tmp_path: Path) -> None:
    accelerator, models, optimizers = accelerated()
    for model, optimizer in zip(models, optimizers, strict=True):
        cases.train(model, optimizer, 0, 4)
    (tmp_path / "fp8patch_1.json").write_text("left by an earlier run")
    accelerator.save_state(str(tmp_path))
    written = {path.name for path in tmp_path.glob("fp8patch*")}
    numbered = {"fp8patch_2.json", "fp8patch_state_2.safetensors"}
    assert written == {SIDECAR, STATE} | numbered
    expected = [
        cases.outcome(models[i], cases.train(models[i], optimizers[i], 4, 8)) for i in (0, 2)
    ]

    accelerator, models, optimizers = accelerated()
    accelerator.load_state(str(tmp_path))
    actual = [cases.outcome(models[i], cases.train(models[i], optimizers[i], 4, 8)) for i in (0, 2)]
    for a, b in zip(actual, expected, strict=True):
        cases.assert_equal(a, b)


@pytest.mark.parametrize("into_extra", [True, False])
def test_extra_state_goes_through_a_bare_state_dict(into_extra: bool, tmp_path: Path) -> None:
    model = fp8patch.convert_model(cases.build("gpt2"), extra_state=True)
    optimizer = cases.optimizer_of(model)
    cases.train(model, optimizer, 0, 8)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert any(key.endswith("._extra_state") for key in saved)

    fresh = fp8patch.convert_model(cases.build("gpt2", seed=1), extra_state=into_extra)
    fresh.load_state_dict(saved, strict=True)
    state, expected = cases.outcome(fresh, [])["state"], cases.outcome(model, [])["state"]
    # Until the first step shows them again, siblings have slots of their own, filled alike.
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert fresh._fp8_bank.due


def test_a_state_dict_without_extra_state_loads_too() -> None:
    stock = cases.build("gpt2")
    converted = fp8patch.convert_model(cases.build("gpt2", seed=1), extra_state=True)
    converted.load_state_dict(stock.state_dict(), strict=True)
    cases.assert_equal(
        dict(converted.named_parameters()).keys(), dict(stock.named_parameters()).keys()
    )
    for parameter, expected in zip(converted.parameters(), stock.parameters(), strict=True):
        assert torch.equal(parameter, expected)
