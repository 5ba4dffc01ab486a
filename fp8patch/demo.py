"""The whole story on a model that trains in seconds: BF16 against FP8, save, reload, generate."""

import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp8patch.checkpoint.save_load import load, save
from fp8patch.convert import convert_model
from fp8patch.demo_model import BATCH, HELD_OUT, LENGTH, VOCABULARY, Progress, Task, Training
from fp8patch.errors import CheckpointError, Fp8PatchError
from fp8patch.hardware import Hardware, detect
from fp8patch.inspect.metrics import metrics
from fp8patch.modules.base import Float8Module
from fp8patch.numerics import SEEN
from fp8patch.slots import GRAD_OUTPUT, ROLES

__all__ = ["Check", "DemoResult", "Slot", "run"]

# The bars of the checks; final losses are 0.01 where chance is 4.16.
_FAR_BELOW_CHANCE = 0.1
_LOSS_TOLERANCE = 0.05
# Seeds 0 to 6 keep 60 to 64 of 64; a model that has not learnt keeps none.
_GENERATION_BAR = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What FP8 knows of one tensor of a module: `role` is input, weight or grad_output."""

    path: str
    role: str
    amax: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that has to hold, whether it does, and the figures."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Everything that the demo found.

    Attributes:
        execution: "fp8" on tensor cores, or "emulate".
        chance_loss: ln(vocabulary), what guessing costs.
        converted, in_fp8: GEMM modules converted, and those of them that ran in FP8 in every step,
            counted from the gradients they quantised.
        fp8_calls: Calls of modules in FP8, forward with its backward counted once.
        example: The first held-out prompt, and what FP8 made of it.
        process_peak_bytes: Peak resident memory of the whole process; None where it can't be told.
    """

    steps: int
    seed: int
    hardware: Hardware
    execution: Literal["fp8", "emulate"]
    model: str
    parameters: int
    vocabulary: int
    chance_loss: float
    bf16: Training
    fp8: Training
    converted: int
    in_fp8: int
    fp8_calls: int
    slots: tuple[Slot, ...]
    held_out: int
    example: tuple[tuple[int, ...], tuple[int, ...]]
    checkpoint_files: tuple[str, ...]
    process_peak_bytes: int | None
    checks: tuple[Check, ...]
    seconds: float

    @property
    def failed(self) -> list[Check]:
        """The checks that did not pass."""
        return [check for check in self.checks if not check.passed]

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-safe; `passed` says whether all checks did."""
        return {**dataclasses.asdict(self), "passed": not self.failed}


def run(
    *,
    steps: int,
    seed: int = 0,
    keep: str | Path | None = None,
    progress: Progress | None = None,
) -> DemoResult:
    """Run the demo on this machine's GPU, or on one thread of its CPU. Same seed, same figures.

    Args:
        steps: Training steps, for BF16 and for FP8.
        seed: Of the initial weights, of the batches, and of what is held out.
        keep: Leave the checkpoint in this directory, which must be new or empty.
        progress: Called now and then.

    Raises:
        CheckpointError: `keep` is not empty or can't be written.
    """
    began = time.perf_counter()
    report = progress or (lambda what, done, total, said: None)
    task = Task(detect(), steps, seed, report)
    with ExitStack() as stack:
        directory = _directory(keep, stack)
        stack.enter_context(task.contained())
        bf16 = task.train(task.new_model(), None)
        model = convert_model(task.new_model())
        fp8 = task.train(model, task.execution)
        calls = _calls(model)
        slots = _some_slots(model)
        report("Saving and reloading", 0, 1, "")
        save(model, directory)
        checks = [
            *_training_checks(bf16, fp8, steps, calls),
            _reload_check(task, model, directory),
            _plain_check(task, model, directory),
        ]
        report("Saving and reloading", 1, 1, "")
        return DemoResult(
            steps=steps,
            seed=seed,
            hardware=task.hardware,
            execution=task.execution,
            model=type(model).__name__,
            parameters=sum(p.numel() for p in model.parameters()),
            vocabulary=VOCABULARY,
            chance_loss=math.log(VOCABULARY),
            bf16=bf16,
            fp8=fp8,
            converted=len(calls),
            in_fp8=sum(count == steps for count in calls.values()),
            fp8_calls=sum(calls.values()),
            slots=slots,
            held_out=HELD_OUT,
            example=task.example(model),
            checkpoint_files=tuple(sorted(file.name for file in directory.iterdir())),
            process_peak_bytes=_process_peak(),
            checks=tuple(checks),
            seconds=time.perf_counter() - began,
        )


def _directory(keep: str | Path | None, stack: ExitStack) -> Path:
    if keep is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fp8patch-demo-")))
    directory = Path(keep).expanduser()
    try:
        # Now, and not after half a minute of training.
        directory.mkdir(parents=True, exist_ok=True)
        occupied = next(directory.iterdir(), None)
    except OSError as error:
        raise CheckpointError(
            f"{keep}: can't keep the checkpoint here: {error.strerror}. Name a new directory."
        ) from None
    if occupied is not None:
        raise CheckpointError(f"{keep}: is not empty. Name a new directory, or empty this one.")
    return directory


def _training_checks(
    bf16: Training, fp8: Training, steps: int, calls: dict[str, int]
) -> Iterator[Check]:
    chance = math.log(VOCABULARY)
    for name, training in (("BF16 learns", bf16), ("FP8 learns", fp8)):
        # "not >" would let a nan pass.
        yield Check(
            name=name,
            passed=training.final_loss < _FAR_BELOW_CHANCE * chance,
            detail=f"loss {training.final_loss:.4f}, chance {chance:.4f} "
            f"(bar: {_FAR_BELOW_CHANCE:.0%} of chance)",
        )
    apart = abs(fp8.final_loss - bf16.final_loss)
    yield Check(
        name="FP8 follows BF16",
        passed=apart <= _LOSS_TOLERANCE,
        detail=f"final losses {apart:.4f} apart (bar: {_LOSS_TOLERANCE})",
    )
    other = [path for path, count in calls.items() if count != steps]
    detail = f"{len(calls) - len(other)} of {len(calls)} converted modules ran in FP8 in every step"
    if other:
        detail += f"; not {', '.join(other[:3])}"
    yield Check(name="all in FP8", passed=bool(calls) and not other, detail=detail)
    right = fp8.generated_right
    yield Check(
        name="generation",
        passed=right >= _GENERATION_BAR * HELD_OUT,
        detail=f"{right} of {HELD_OUT} held-out prompts keep their step "
        f"(bar: {_GENERATION_BAR:.0%})",
    )


def _reload_check(task: Task, model: Any, directory: Path) -> Check:
    """The converted model comes back as it was."""
    try:
        again = load(directory, device=task.device, backend=task.execution)
    except Fp8PatchError as error:
        return Check(name="reload", passed=False, detail=f"fp8patch.load: {error}")
    logits = task.logits(again, task.execution)
    differ = int((logits != task.logits(model, task.execution)).sum())
    detail = f"{differ} of {logits.numel()} FP8 logits differ after fp8patch.load"
    return Check(name="reload", passed=differ == 0, detail=detail)


def _plain_check(task: Task, model: Any, directory: Path) -> Check:
    """Without us, the checkpoint is an ordinary one."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    plain, info = loaded
    plain.to(task.device).eval()
    odd = {kind: len(keys) for kind, keys in info.items() if keys}
    keys = odd or "no missing or unexpected key"
    stock = not any(isinstance(module, Float8Module) for module in plain.modules())
    differ = int((task.logits(plain, None) != task.logits(model, None)).sum())
    return Check(
        name="plain load",
        passed=stock and not odd and differ == 0,
        detail=f"AutoModelForCausalLM.from_pretrained: {keys}; {differ} BF16 logits differ",
    )


def _calls(model: Any) -> dict[str, int]:
    """How often each converted module ran forward and backward in FP8.

    Told from what its gradient's slot has seen, which nothing but the FP8 backward writes.
    """
    calls = {}
    for path, module in model.named_modules():
        if isinstance(module, Float8Module):
            seen = int(module._fp8_bank.read(module._fp8_path, GRAD_OUTPUT).counts[SEEN])
            calls[path] = seen // (BATCH * LENGTH * module.weight.shape[0])
    return calls


def _some_slots(model: Any) -> tuple[Slot, ...]:
    found = metrics(model)
    return tuple(
        Slot(
            path=path,
            role=role,
            amax=found[f"fp8/{path}/{role}/amax"],
            scale=found[f"fp8/{path}/{role}/scale"],
        )
        for path, module in model.named_modules()
        if isinstance(module, Float8Module) and path.endswith(("q_proj", "down_proj"))
        for role in ROLES
    )


def _process_peak() -> int | None:
    # Not ru_maxrss where Linux can say more: that one begins with what the parent process had.
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
