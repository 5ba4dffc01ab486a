"""Which contenders fit on the GPU at once: estimates of memory, and groups that keep to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fp8patch.bench.contenders import BASE, Contender
from fp8patch.bench.workloads import Workload

__all__ = ["Need", "groups", "needs"]

# Two moments, a gradient, a weight as autocast casts it, the FP8 copies of a weight, in bytes for
# each; a CUDA context and its libraries.
_MOMENTS = {"adamw": 8, "sgd": 0, "none": 0}
_GRADIENT_BYTES = 4
_CAST_BYTES = 2
_FP8_BYTES = 2
_CONTEXT_GIB = 1.5
# Of what autograd keeps, inputs and outputs of the Linears in BF16 are the most; on BERT-large
# (24x512: 20.7 GiB reserved) this leaves a fifth for norms and residuals, and 12 bytes a logit.
_ACTIVATION_BYTES = 2.5
_LOGIT_BYTES = 12
_WIDE = 20_000
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Need:
    """GiB that a contender takes: while others have their turn, and in its own."""

    held: float
    peak: float


def needs(workload: Workload, contenders: Sequence[Contender]) -> dict[str, Need]:
    """Estimates, from the workload's model on the meta device."""
    model = workload.model("meta")
    params = sum(p.numel() for p in model.parameters())
    activations = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            wide = module.out_features >= _WIDE
            out_bytes = _LOGIT_BYTES if wide else _ACTIVATION_BYTES
            per_token = _ACTIVATION_BYTES * module.in_features + out_bytes * module.out_features
            activations += workload.tokens * per_token
    found = {}
    for contender in contenders:
        fp8 = 0 if contender.family == "bf16" else _FP8_BYTES
        each = next(model.parameters()).element_size() + _MOMENTS[workload.optimizer] + fp8
        held = params * each / _GIB + _CONTEXT_GIB
        peak = held + (params * (_GRADIENT_BYTES + _CAST_BYTES) + activations) / _GIB
        # A graph's memory is its own for as long as it lives.
        found[contender.name] = Need(peak if contender.mode == "graphs" else held, peak)
    return found


def groups(
    contenders: Sequence[Contender], need: Mapping[str, Need], capacity: float
) -> list[list[Contender]]:
    """Split into groups that fit into `capacity` GiB, each with the base in it.

    What fits nowhere gets a group of its own all the same: its failure is a row like any other.
    """
    base = next(c for c in contenders if c.name == BASE)
    made = [[base]]
    for contender in contenders:
        if contender is base:
            continue
        for group in made:
            if len(group) == 1 or _fits([*group, contender], need, capacity):
                group.append(contender)
                break
        else:
            made.append([base, contender])
    return made


def _fits(group: Sequence[Contender], need: Mapping[str, Need], capacity: float) -> bool:
    held = sum(need[c.name].held for c in group)
    return held + max(need[c.name].peak - need[c.name].held for c in group) <= capacity
