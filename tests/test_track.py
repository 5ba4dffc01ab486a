"""`--track`: a script's trackers get what the slots saw, and nothing of the script's changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from injected import armed, train
from torch import nn

ROLES = ("input", "weight", "grad_output")
RATIOS = ("saturated", "flushed", "non_finite")

ACCELERATE = """
import json
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import nn

class Lines(GeneralTracker):
    name, requires_logging_directory = "lines", False

    def __init__(self):
        super().__init__()
        self.file = open("lines.json", "w")

    tracker = property(lambda self: self.file)

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        print(json.dumps([step, values]), file=self.file, flush=True)

    def finish(self):
        self.file.close()

torch.manual_seed(0)
accelerator = Accelerator(log_with=[Lines()])
accelerator.init_trackers("mine")
model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(1, 8):
    loss = model(torch.randn(8, 32) ** 7 * 1.7**step).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item()}, step=step)
accelerator.end_training()
"""


def expected(report: Path) -> dict[int, dict[str, float]]:
    """{step: figures}, of what the report keeps of each slot."""
    history = json.loads(report.read_text())["models"][0]["history"]
    found: dict[int, dict[str, float]] = {}
    for index, step in enumerate(history["steps"]):
        values = found[step] = {}
        for role in ROLES:
            slots = [s for s in history["slots"] if s["role"] == role and s["seen"][index]]
            seen = sum(s["seen"][index] for s in slots)
            for key in RATIOS:
                values[f"fp8/{role}/{key}"] = sum(s[key][index] for s in slots) / seen
                worst = max(s[key][index] / s["seen"][index] for s in slots)
                values[f"fp8/{role}/{key}_worst"] = worst
    return found


def check(logged: dict[int, dict[str, float]], report: Path, steps: list[int]) -> None:
    wanted = expected(report)
    assert sorted(logged) == steps
    for step, values in logged.items():
        others = {"fp8/flops_share", "fp8/step_seconds", "epoch"}
        assert {k: v for k, v in values.items() if k not in others} == wanted[step]
        assert values["fp8/flops_share"] > 0.5
        assert values["fp8/step_seconds"] > 0
    # Or else the steps could not be told apart.
    assert len({json.dumps(wanted[step]) for step in steps}) == len(steps)
    assert any(v for values in logged.values() for k, v in values.items() if "flushed" in k)


def test_an_accelerators_tracker(tmp_path: Path) -> None:
    """Through the command; the script's own lines are there as well, in their order."""
    (tmp_path / "s.py").write_text(ACCELERATE)
    words = ("--emulate", "--track", "--report", "r.json", "--log-every", 2, "s.py")
    done = train(*words, cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "lines.json").read_text().splitlines()]
    assert [step for step, values in lines if "loss" in values] == list(range(1, 8))
    logged = {step: values for step, values in lines if "loss" not in values}
    check(logged, tmp_path / "r.json", [2, 4, 6])
    assert "--track: 3 readings logged to lines." in done.stderr
    assert len(lines) == 10


def test_a_trainers_callback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    logged: dict[int, dict[str, float]] = {}
    losses: list[int] = []

    class Mine(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any):
            if "loss" in logs:
                losses.append(state.global_step)
            if any(key.startswith("fp8/") for key in logs):
                assert state.global_step not in logged
                logged[state.global_step] = logs

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=6, logging_steps=1, report_to="none", use_cpu=True,
        save_strategy="no", per_device_train_batch_size=2,
    )  # fmt: skip
    examples = [{"input_ids": x, "labels": x} for x in torch.randint(0, 64, (12, 16))]
    report = tmp_path / "r.json"
    with armed(backend="emulate", track=True, report=report, log_every=2) as run:
        trainer = Trainer(
            LlamaForCausalLM(config), arguments, train_dataset=examples, callbacks=[Mine()]
        )
        trainer.train()
        run.finish()
    check(logged, report, [2, 4])
    # Nothing of the script's: each of its own lines, and no more in what the Trainer keeps.
    assert losses == [1, 2, 3, 4, 5, 6]
    assert not any(key.startswith("fp8/") for line in trainer.state.log_history for key in line)
    said = capfd.readouterr()
    assert "fp8/" not in said.out
    assert "--track: 2 readings logged to Mine." in said.err


def loop(steps: int, after: Any = lambda: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def test_a_resumed_trainer_and_one_callback_that_raises(capfd: pytest.CaptureFixture[str]) -> None:
    """Steps count on from where the Trainer is, and the others get what one of them refuses."""
    from transformers import TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    steps: list[int] = []

    class Breaks(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise OSError("no space\nleft")

    class Takes(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    state, control = TrainerState(global_step=100), TrainerControl(should_log=True)
    with armed(backend="emulate", track=True, log_every=2) as run:
        own: list[Any] = [DefaultFlowCallback(), Breaks(), Takes()]
        handler = CallbackHandler(own, None, None, None, None)

        def after() -> None:
            state.global_step += 1

        handler.on_train_begin(None, state, control)
        loop(6, after)
        assert control.should_log
        assert state.global_step == 106
        handler.on_train_end(None, state, control)
        loop(9)
        run.finish()
    assert steps == [102, 104]
    said = capfd.readouterr().err
    assert said.count("warning: --track: Breaks did not take the figures of step 2") == 1
    assert "OSError: no space left). The run goes on." in said
    assert said.count("--track: Breaks") == 1
    assert "--track: 2 readings logged to Takes." in said


@pytest.mark.parametrize(
    ("backend", "why"),
    [("emulate", "no tracker was active. One is what acc"), ("bf16", "nothing is in FP8")],
)
def test_nobody_to_log_to_is_said(
    backend: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with armed(backend=backend, track=True, log_every=1) as run:
        loop(3)
        run.finish()
    assert f"--track: nothing was logged: {why}" in capfd.readouterr().err
