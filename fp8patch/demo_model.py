"""The demo's task, its model, and how that is trained.

The task has a known answer, so that every figure can be judged: sequences `start, start + step, …`
modulo the vocabulary. The first token and the step can't be foreseen; everything after can, so the
loss of a model that has understood goes to zero, and of one that guesses stays at ln(vocabulary).
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fp8patch.amp import autocast
from fp8patch.hardware import Hardware, resolve_backend

__all__ = ["BATCH", "HELD_OUT", "LENGTH", "VOCABULARY", "Execution", "Progress", "Task", "Training"]

# (what is going on, steps done, steps in all, what there is to say of it)
Progress = Callable[[str, int, int, str], None]
# None is BF16 without FP8.
Execution = Literal["fp8", "emulate"] | None

VOCABULARY = 64
LARGEST_STEP = 8
LENGTH = 16
BATCH = 32
PROMPT = 4
HELD_OUT = 64

_LEARNING_RATE = 5e-3
_WARM_UP = 20
# A loss is the mean of this many last steps.
_LAST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One run: `losses` of all steps, their final mean, median time of a step after the first ones.

    `peak_bytes` is what CUDA reserved at most; None without CUDA, where a run's own can't be told.
    `generated_right` counts the held-out prompts that were continued without a mistake.
    """

    losses: tuple[float, ...]
    final_loss: float
    step_ms: float
    peak_bytes: int | None
    generated_right: int


class Task:
    """One machine, one seed: models that start alike, and batches that come in the same order."""

    def __init__(self, hardware: Hardware, steps: int, seed: int, report: Progress) -> None:
        self.hardware, self.steps, self.seed, self.report = hardware, steps, seed, report
        self.device = torch.device("cuda" if hardware.device_type == "cuda" else "cpu")
        fp8 = resolve_backend("auto", hardware, fallback="emulate") == "fp8"
        self.execution: Literal["fp8", "emulate"] = "fp8" if fp8 else "emulate"
        pairs = torch.cartesian_prod(torch.arange(VOCABULARY), torch.arange(1, LARGEST_STEP + 1))
        pairs = pairs[torch.randperm(len(pairs), generator=self._generator())]
        self.held_out, self.trained = pairs[:HELD_OUT], pairs[HELD_OUT:]

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Leave the process's random state and thread count as they were.

        One thread: matrices this small gain nothing from more, lose much where cores are shared,
        and sums would come out otherwise on a machine with another number of cores.
        """
        threads = torch.get_num_threads()
        on_cpu = self.device.type == "cpu"
        with torch.random.fork_rng(devices=[] if on_cpu else [torch.cuda.current_device()]):
            try:
                if on_cpu:
                    torch.set_num_threads(1)
                yield
            finally:
                torch.set_num_threads(threads)

    @contextmanager
    def _precision(self, execution: Execution) -> Iterator[None]:
        fp8 = nullcontext() if execution is None else autocast(backend=execution)
        with torch.autocast(self.device.type, torch.bfloat16), fp8:
            yield

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def new_model(self) -> Any:
        """A Llama-like causal LM with LayerNorm, so that Linears and norms are converted."""
        from transformers import StableLmConfig, StableLmForCausalLM

        config = StableLmConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=None,
        )
        torch.manual_seed(self.seed)
        model: Any = StableLmForCausalLM(config)
        return model.to(self.device)

    def train(self, model: Any, execution: Execution) -> Training:
        """Train `model` in place, and let it generate."""
        what = f"Training in {'BF16' if execution is None else 'FP8'}"
        what += ", emulated" * (execution == "emulate")
        model.train()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), fused=True
        )
        generator = self._generator()
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        losses, times = [], []
        for step in range(self.steps):
            began = time.perf_counter()
            ids, labels = self._batch(generator)
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * _schedule(step, self.steps)
            with self._precision(execution):
                loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # Waits for the GPU, so that the time is a whole step's.
            losses.append(loss.item())
            times.append(1e3 * (time.perf_counter() - began))
            self.report(what, step + 1, self.steps, f"loss {losses[-1]:.3f}")
        model.eval()
        return Training(
            losses=tuple(losses),
            final_loss=statistics.fmean(losses[-_LAST:]),
            # The first steps observe, compile and allocate.
            step_ms=statistics.median(times[3:] or times),
            peak_bytes=torch.cuda.max_memory_reserved() if on_cuda else None,
            generated_right=self._generated_right(model, execution),
        )

    def _batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.trained), (BATCH,), generator=generator)
        ids = _sequences(self.trained[chosen], LENGTH)
        labels = ids.clone()
        # Nobody can foresee the first token, nor the step that leads to the second.
        labels[:, :2] = -100
        return ids.to(self.device), labels.to(self.device)

    def _generated_right(self, model: Any, execution: Execution) -> int:
        generated = self._generate(model, self.held_out, execution)
        return int((generated == _sequences(self.held_out, LENGTH)).all(1).sum())

    @torch.no_grad()
    def _generate(self, model: Any, pairs: Tensor, execution: Execution) -> Tensor:
        prompts = _sequences(pairs, PROMPT).to(self.device)
        with self._precision(execution):
            generated: Tensor = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=LENGTH - PROMPT,
                do_sample=False,
                pad_token_id=0,
            )
        return generated.cpu()

    def example(self, model: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A prompt and its continuation in FP8."""
        tokens = self._generate(model, self.held_out[:1], self.execution)[0].tolist()
        return tuple(tokens[:PROMPT]), tuple(tokens[PROMPT:])

    @torch.no_grad()
    def logits(self, model: Any, execution: Execution) -> Tensor:
        """Of the held-out sequences: [HELD_OUT, LENGTH, VOCABULARY], BF16."""
        ids = _sequences(self.held_out, LENGTH).to(self.device)
        with self._precision(execution):
            logits: Tensor = model(input_ids=ids).logits
        return logits


def _sequences(pairs: Tensor, length: int) -> Tensor:
    """(start, step) [B, 2] -> int64 [B, length]."""
    return (pairs[:, :1] + pairs[:, 1:] * torch.arange(length)) % VOCABULARY


def _schedule(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / _WARM_UP) * (1.0 - 0.9 * step / steps)
