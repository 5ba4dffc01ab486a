"""Predicts what FP8 gains on a whole training step: kernels in FP8 over kernels in BF16.

A step is its Linears, as `roofline` times each by itself, and what lies around them: each term
below is bytes at the rate of a copy. M tokens, N out_features, K in_features, P parameters of the
model.

What FP8 saves or does anyway, which one Linear by itself doesn't show:

- Siblings (q, k and v; gate and up) share one cast of their input.
- Where blocks are compiled, an activation (taken to be GELU or SiLU-and-mul) between two Linears is
  computed by the cast of what it returns, and in backward by that of its gradient: as many bytes as
  BF16 moves for it (two FP8 values where one of BF16 is written), so that these casts cost nothing.
- The cast of grad_output adds up the bias gradient, which in BF16 reads grad_output once more.
- FP8's wgrad writes FP32; BF16's is copied to FP32 afterwards.
- A head whose vocabulary is no multiple of 8 runs on a padded copy (`AlignedLinear`); in BF16 its
  GEMMs take three times as long. The padded logits are copied, and their gradient unless the loss
  is fused.
- The loss of a language model is fused, and moves 6 bytes a logit instead of 28 (`fused_loss.py`):
  every row is taken to have a label, and the loss to be the model's own.

What both do: whatever a GEMM writes is read by the next kernel, and what it reads was written by
one; an activation's backward reads its input again; LayerNorm or RMSNorm with the residual (20
bytes a value); the optimizer (28 P for AdamW); GEMMs that stay in BF16, experts among them.

Not in it: the products inside attention, and convolutions; the CPU's time to launch kernels, which
bounds small models unless they run as CUDA graphs; and that both move more bytes in eager.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from fp8patch.plan.patterns import logical_path
from fp8patch.plan.rules import padded
from fp8patch.plan.types import NORM_KINDS, Decision, Plan
from fp8patch.rates import Rates
from fp8patch.roofline import GPUS, Operand, bf16_seconds, fp8_seconds, rates_of

__all__ = ["Mode", "Optimizer", "step_gain", "step_gains"]

Mode = Literal["eager", "compiled"]
Optimizer = Literal["adamw", "sgd", "none"]

# Bytes a parameter, in FP32. AdamW reads it, its gradient and two moments, and writes all but the
# gradient; SGD without momentum reads two and writes one.
_OPTIMIZER_BYTES: dict[Optimizer, int] = {"adamw": 28, "sgd": 12, "none": 0}
# Forward reads the residual stream and writes it, backward reads it, its gradient, and writes that:
# five times FP32.
_NORM_BYTES = 20
# To FP32 (2 + 4), log_softmax (4 + 4), its gradient (4 + 4), and that to BF16 (4 + 2).
_LOSS_BYTES = 28
# Forward reads BF16; backward reads it again, and writes the gradient.
_FUSED_LOSS_BYTES = 6
# BERT-base's and BERT-large's heads on one H200, both 3.1 to 3.3 times the time of the padded copy.
_MISALIGNED = 3.0
# Older tensor cores take rows that do not begin at multiples of 16 bytes as they are.
_ANY_ROW = ("l4", "rtx4090")

_QKV = re.compile(r"(?:to_)?([qkv])(?:_proj|_lin|_layer)?|(query|key|value)(?:_proj|_layer|_lin)?")
_GATE_UP = re.compile(r"gate_proj|up_proj|w1|w3|wi_0|wi_1")
# Attention over another sequence: its queries are made of something else than keys and values.
_CROSS = re.compile(r"cross|encdec|encoder_attn|attn2")


def step_gains(plan: Plan) -> dict[Mode, float] | None:
    """`step_gain` in each mode, with AdamW; None where nothing is predicted."""
    found = {mode: step_gain(plan, mode) for mode in get_args(Mode)}
    return {mode: gain for mode, gain in found.items() if gain is not None} or None


def step_gain(plan: Plan, mode: Mode, optimizer: Optimizer = "adamw") -> float | None:
    """Time of a step's kernels in BF16 over that in FP8; None where nothing is predicted.

    Args:
        mode: Of both, BF16 and FP8: `eager` as `train` runs by default, `compiled` as with
            --compile or --cuda-graphs.
        optimizer: Of FP32 weights; AdamW as one kernel.
    """
    gpu = GPUS.get(plan.gpu or "")
    if gpu is None:
        return None
    gemms = [d for d in plan.decisions if _predicted(d)]
    if not any(d.action == "convert" for d in gemms):
        return 1.0
    around = _Around(gemms)
    times = _Times(plan, rates_of(gpu), mode, around, slow_rows=gpu.name not in _ANY_ROW)
    both = sum(map(times.beside, gemms)) + times.others(gemms) + times.rest(optimizer)
    bf16 = both + sum(map(times.bf16, gemms))
    fp8 = both + sum(map(times.planned, gemms))
    return bf16 / fp8


def _predicted(d: Decision) -> bool:
    return d.kind in ("linear", "conv1d") and d.out_features * d.in_features > 0


class _Around:
    """What is read off names and sizes: which Linears share an input, and which feed an activation.

    Attributes:
        shares: Paths of Linears whose input an earlier sibling has cast.
        before: Paths of Linears whose output goes through an activation (up, and gate).
        after: Paths of Linears whose input comes from there (down).
    """

    def __init__(self, gemms: Sequence[Decision]) -> None:
        self.shares: set[str] = set()
        self.before: set[str] = set()
        self.after: set[str] = set()
        groups: dict[tuple[str, ...], list[Decision]] = {}
        leaders: dict[str, list[Decision]] = {}
        for d in gemms:
            if (key := _sibling_key(d)) is not None:
                group = groups.setdefault(key, [])
                if group:
                    self.shares.add(d.path)
                group.append(d)
                leaders[d.path] = group
        for up, down in pairwise(gemms):
            if _is_mlp(up, down):
                self.after.add(down.path)
                self.before.update(d.path for d in leaders.get(up.path, [up]))


def _sibling_key(d: Decision) -> tuple[str, ...] | None:
    """What the siblings of a Linear have in common; None where its name says nothing."""
    parent, _, leaf = logical_path(d.path).rpartition(".")
    same = parent, d.action, str(d.in_features)
    if _GATE_UP.fullmatch(leaf):
        return *same, "gate"
    if (letter := _letter(leaf)) is None:
        return None
    alone = letter == "q" and _CROSS.search(parent.lower()) is not None
    return *same, "q" if alone else "qkv"


def _letter(leaf: str) -> str | None:
    found = _QKV.fullmatch(leaf)
    return None if found is None else (found[1] or found[2])[0]


def _is_mlp(up: Decision, down: Decision) -> bool:
    """Does `up` widen, and `down`, which comes next, take that back? In a repeated block."""
    sizes = (up.out_features, up.in_features) == (down.in_features, down.out_features)
    wider = down.in_features > down.out_features
    return sizes and wider and _is_repeated(down) and _letter(up.path.rpartition(".")[2]) is None


def _is_repeated(d: Decision) -> bool:
    return any(part.isdigit() for part in d.path.split("."))


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of what a plan's step is made of."""

    plan: Plan
    rates: Rates
    mode: Mode
    around: _Around
    slow_rows: bool

    def bf16(self, d: Decision) -> float:
        """A Linear in BF16."""
        n, k = d.out_features, d.in_features
        seconds = bf16_seconds(self.plan.tokens, n, k, self.rates)
        if self.slow_rows and (n % 8 or k % 8):
            seconds *= _MISALIGNED
        seconds += self._moved(6 * n * k) + self._loss(d, fused=False)
        return seconds + (self._moved(2 * self.plan.tokens * n, 1) if _has_bias(d) else 0.0)

    def planned(self, d: Decision) -> float:
        """A Linear as the plan has it."""
        m, n, k = self.plan.tokens, d.out_features, d.in_features
        recipe, fused = self.plan.recipe_of(d), self.plan.recipe.loss == "fused"
        loss = self._loss(d, fused)
        if d.action == "convert":
            seconds = loss + fp8_seconds(
                m, padded(n), padded(k), self.rates, recipe, self._casts(d)
            )
            if recipe.wgrad == "bf16":
                seconds += self._moved(6 * n * k)
            return seconds + (self._moved(0, 1) if _has_bias(d) else 0.0)
        if (rows := d.aligned_to) is None or not self.slow_rows:
            return self.bf16(d) - self._loss(d, fused=False) + loss
        seconds = loss + bf16_seconds(m, rows, k, self.rates) + self._moved(6 * n * k)
        seconds += self._moved(4 * m * n, 1) if fused else self._moved(8 * m * n, 2)
        return seconds + (self._moved(2 * m * n, 1) if _has_bias(d) else 0.0)

    def beside(self, d: Decision) -> float:
        """What reads a Linear's output and writes its input, and their gradients."""
        m, n, k = self.plan.tokens, d.out_features, d.in_features
        # (Siblings' gradients of their input are all read, and added up.)
        moved = 4 * m * n + (2 if d.path in self.around.shares else 4) * m * k
        if d.path in self.around.before:
            moved += 2 * m * n
        return self._moved(moved, 2)

    def _loss(self, d: Decision, fused: bool) -> float:
        """The loss and its gradient, behind a language model's head."""
        if not _is_language_head(d):
            return 0.0
        each, kernels = (_FUSED_LOSS_BYTES, 3) if fused else (_LOSS_BYTES, 6)
        return self._moved(each * self.plan.tokens * d.out_features, kernels)

    def others(self, gemms: Sequence[Decision]) -> float:
        """GEMMs of no Linear (experts, nn.MultiheadAttention), at the rate of large ones."""
        share = sum(d.flops_share for d in self.plan.decisions if not _predicted(d))
        flops = sum(2 * self.plan.tokens * d.out_features * d.in_features for d in gemms)
        # The shares of all add up to 1, so this is what the others' FLOPs are to those.
        ratio = share / (sum(d.flops_share for d in gemms) or 1.0)
        return 3 * ratio * flops / (self.rates.bf16_tflops * 1e12)

    def rest(self, optimizer: Optimizer) -> float:
        """Norms, and the optimizer."""
        norms = [d for d in self.plan.decisions if d.kind in NORM_KINDS]
        moved = sum(_NORM_BYTES * self.plan.tokens * d.out_features for d in norms)
        return self._moved(moved + _OPTIMIZER_BYTES[optimizer] * self.plan.params, 2 * len(norms))

    def _casts(self, d: Decision) -> list[Operand]:
        # What is scaled by its own amax has to be in memory before that is known.
        fused = self.mode == "compiled" and self.plan.recipe_of(d).scaling == "delayed"
        casts: list[Operand] = []
        if d.path not in self.around.shares and not (fused and d.path in self.around.after):
            casts.append("input")
        if not (fused and d.path in self.around.before):
            casts.append("grad_output")
        return casts

    def _moved(self, moved: float, kernels: int = 0) -> float:
        return moved / (self.rates.copy_tbps * 1e12) + kernels * self.rates.cast_us * 1e-6


def _has_bias(d: Decision) -> bool:
    return d.params > d.out_features * d.in_features


def _is_language_head(d: Decision) -> bool:
    """Outside of all blocks, and wider than what MLPs make: its outputs are logits."""
    return not _is_repeated(d) and d.out_features > 4 * d.in_features
