"""The families of scripts: how one is run, what its first step consists of, and where it ends.

For test_train_families.py, on a CPU, and for `scripts/check_families.py`, on a GPU. The text is
read at most once, so there is nothing to memorise. The counts are made from the shapes.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from injected import SCRIPTS
from safetensors.torch import load_file
from torch import Tensor

SEEDS = (0, 1, 2)
LAST = 50
ALLOWED = 2.0


@dataclass(frozen=True)
class Outcome:
    """What a run leaves; `start` and `end` are parameters by name, a tied one once."""

    losses: list[float]
    start: dict[str, Tensor]
    end: dict[str, Tensor]

    def moved(self) -> set[str]:
        """Names of the parameters that training has changed."""
        common = self.start.keys() & self.end.keys()
        return {key for key in common if not torch.equal(self.start[key], self.end[key].cpu())}


@dataclass(frozen=True)
class Family:
    """A script, and what its first optimizer step consists of.

    Attributes:
        words: The script's name, and its arguments.
        steps: Optimizer steps.
        bf16: What makes the bare script compute in BF16.
        linears: (N, K) of each Linear to run in FP8, those of one layer; there are two layers.
        others: (N, K) of the others, and their rows if those are not M.
        rows: M of a forward.
        micro: Forwards in a step.
        evaluated: Rows of an evaluation that comes first.
        losses: The report has them: they are in the model's output.
    """

    name: str
    words: tuple[object, ...]
    steps: int
    bf16: tuple[object, ...]
    linears: tuple[tuple[int, int], ...]
    others: tuple[tuple[int, ...], ...]
    rows: int
    once: tuple[tuple[int, int], ...] = ()
    micro: int = 1
    evaluated: int = 0
    losses: bool = True

    @property
    def in_fp8(self) -> list[tuple[int, int]]:
        return [*self.linears * 2, *self.once]

    def expected(self) -> dict[str, float]:
        """Each training forward takes three GEMMs a Linear, an evaluation's one."""
        passes = self.micro + (1 if self.evaluated else 0)
        work = 2 * (3 * self.micro * self.rows + self.evaluated)
        fp8 = sum(n * k for n, k in self.in_fp8)
        others = sum(n * k * (rows[0] / self.rows if rows else 1) for n, k, *rows in self.others)
        return {
            "fp8_calls": passes * len(self.in_fp8),
            "calls": passes * (len(self.in_fp8) + len(self.others)),
            "fp8_flops": work * fp8,
            "flops": work * (fp8 + others),
        }

    @property
    def script(self) -> Path:
        return SCRIPTS / f"{self.words[0]}.py"

    def arguments(self, text: Path, out: Path, seed: int, device: str = "cpu") -> list[object]:
        """For the script, to write into the folder `out`."""
        words: list[object] = list(self.words[1:])
        if self.script.stem == "vit_spawn":
            return [*words, "--save", out, "--seeds", seed, "--device", device]
        words += ["--text", text, "--seed", seed]
        if self.script.stem == "plain_gpt":
            return [*words, "--save", out / "model.pt", "--device", device]
        if device != "cpu" and "--use_cpu" in words:
            words.remove("--use_cpu")
        return [*words, "--output_dir", out]

    def outcome(self, out: Path, seed: int) -> Outcome:
        """What a run has left in `out`."""
        if self.script.stem == "vit_spawn":
            saved = torch.load(out / f"{seed}.pt", map_location="cpu")
            return Outcome(saved["losses"], saved["start"], saved["model"])
        if self.script.stem == "plain_gpt":
            saved = torch.load(out / "model.pt", map_location="cpu")
            return Outcome(saved["losses"], saved["start"], saved["model"])
        losses = losses_of(out)[: self.steps * (1 if self.name == "trainer" else self.micro)]
        return Outcome(losses, torch.load(out / "start.pt"), load_file(out / "model.safetensors"))


ACCELERATE = ("--mixed_precision", "bf16")
GPT = ("plain_gpt", "--steps", 200)
LLAMA = ("clm_no_trainer", "--model", "llama", "--max_train_steps", 100)
# Slower to learn: after 100 steps the loss still falls by its noise every ten steps.
GPT2 = ("clm_no_trainer", "--model", "gpt2", "--max_train_steps", 200)
TRAINER = (
    *("clm_trainer", "--max_steps", 100, "--logging_steps", 1, "--logging_nan_inf_filter", "False"),
    *("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2, "--use_cpu"),
    *("--gradient_checkpointing", "--bf16", "--learning_rate", 5e-3, "--report_to", "none"),
    *("--save_strategy", "no", "--disable_tqdm", "True"),
)
FAMILIES = (
    Family(
        "mlm", ("mlm_no_trainer", "--max_train_steps", 150, "--learning_rate", 3e-3), 150,
        ACCELERATE, ((32, 32),) * 4 + ((64, 32), (32, 64)), ((144, 32),), 256, once=((32, 32),),
    ),
    Family(
        "llama", LLAMA, 100, ACCELERATE,
        ((48, 48), (16, 48), (16, 48), (48, 48), (96, 48), (96, 48), (48, 96)), ((128, 48),), 256,
        micro=2,
    ),
    Family(
        "gpt2", GPT2, 200, ACCELERATE,
        ((144, 48), (48, 48), (192, 48), (48, 192)), ((128, 48),), 256, micro=2,
    ),
    Family(
        "trainer", TRAINER, 100, (), ((32, 32),) * 4 + ((64, 32), (64, 32), (32, 64)),
        ((128, 32),), 128, micro=2,
    ),
    Family(
        "plain", GPT, 200, ("--autocast",), ((96, 32), (32, 32), (128, 32), (32, 128)),
        ((96, 32),), 128, evaluated=128, losses=False,
    ),
)  # fmt: skip
# The head's rows are images, and not their patches.
VIT = Family(
    "vit", ("vit_spawn", "--steps", 100), 100, (), ((96, 32), (32, 32), (128, 32), (32, 128)),
    ((10, 32, 8),), 128, losses=False,
)  # fmt: skip


@dataclass(frozen=True)
class Ends:
    """Means of the last losses: FP8 with the first seed, BF16 with each.

    Attributes:
        learned: BF16 has.
    """

    fp8: float
    bf16: list[float]
    learned: bool

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.bf16)

    @property
    def in_deviations(self) -> float:
        """From BF16 at the same seed, whose batches are the same; or from the mean over its seeds,
        where one rounding is enough for two runs of a seed to part. The nearer."""
        places = (self.bf16[0], statistics.fmean(self.bf16))
        return min(abs(self.fp8 - place) for place in places) / self.deviation

    def __str__(self) -> str:
        each = ", ".join(f"{end:.4f}" for end in self.bf16)
        return f"FP8 {self.fp8:.4f}, BF16 {each}, deviation {self.deviation:.4f}"


def ends_of(fp8: list[float], bf16: list[list[float]]) -> Ends:
    ends = [statistics.fmean(losses[-LAST:]) for losses in bf16]
    first = statistics.fmean(bf16[0][:5])
    return Ends(statistics.fmean(fp8[-LAST:]), ends, all(end < 0.95 * first for end in ends))


def losses_of(directory: Path) -> list[float]:
    state = directory / "trainer_state.json"
    if state.exists():
        return [e["loss"] for e in json.loads(state.read_text())["log_history"] if "loss" in e]
    losses: list[float] = torch.load(directory / "losses.pt")
    return losses


def counts(report: dict[str, Any], expected: dict[str, float]) -> dict[str, float]:
    return {key: round(report["coverage"][key], 3) for key in expected}
