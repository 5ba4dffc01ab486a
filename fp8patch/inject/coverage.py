"""What really ran in FP8 in the first training step: calls, FLOPs, and modules that never ran.

Counted from the shapes of every call of every Linear, Conv1D and attention projection, converted or
not, by forward hooks that go away when the first optimizer step is done: later steps run compiled,
or repeat the first, and should not pay for being looked at.

A call counts its fprop, and where gradients are enabled the dgrad and wgrad that will follow. The
products inside attention are not counted.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch import messages
from fp8patch.errors import Fp8PatchError

__all__ = ["Coverage"]


@dataclass(slots=True)
class _Watched:
    path: str
    owner: "Coverage"
    # Fallback for what is no single GEMM: FLOPs of one row's fprop.
    row_flops: float
    reason: str
    n: int
    k: int
    calls: int = 0
    fp8_calls: int = 0
    flops: float = 0.0
    fp8_flops: float = 0.0


# By id: a hook that captured something would not survive a deep copy of the model; a copy's modules
# are not in here.
_watched: dict[int, _Watched] = {}


class Coverage:
    """The counts of all models of a run."""

    def __init__(self) -> None:
        self._all: list[_Watched] = []
        self._handles: list[Any] = []
        self._converted: set[int] = set()
        self._debug = os.environ.get("FP8PATCH_DEBUG") == "1"

    @property
    def watching(self) -> bool:
        return bool(self._handles)

    def watch(self, model: nn.Module, plan: Any) -> None:
        """Count the calls of every GEMM module that `plan` decided on."""
        flops = {d.path: d.flops_share for d in plan.decisions}
        scale = next(
            (2.0 * d.out_features * d.in_features / flops[d.path] for d in plan.decisions
             if flops[d.path] > 0 and d.kind in ("linear", "conv1d")),
            0.0,
        )  # fmt: skip
        for decision in plan.decisions:
            if decision.kind not in ("linear", "conv1d", "mha", "experts"):
                continue
            path = decision.path
            if decision.kind == "experts":
                path = path.rpartition(".")[0]
            module: Any = model.get_submodule(path)
            entry = _Watched(
                decision.path,
                self,
                flops[decision.path] * scale,
                decision.reason,
                decision.out_features,
                decision.in_features,
            )
            self._all.append(entry)
            if decision.action == "convert":
                self._converted.add(id(entry))
            if id(module) in _watched:
                # Two parameters of one experts module: one hook, both their FLOPs.
                _watched[id(module)].row_flops += entry.row_flops
                continue
            _watched[id(module)] = entry
            self._handles.append(module.register_forward_hook(_saw, with_kwargs=True))

    def close(self) -> None:
        """The first step is over."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        ours = {id(entry) for entry in self._all}
        for key in [key for key, entry in _watched.items() if id(entry) in ours]:
            del _watched[key]

    @property
    def ran_fp8(self) -> bool:
        return any(entry.fp8_calls for entry in self._all)

    def never_ran(self) -> list[str]:
        """Converted modules that no forward has called."""
        return [e.path for e in self._all if id(e) in self._converted and not e.calls]

    def not_counted(self) -> list[str]:
        """The others that no forward has called: a fused loss reads the head's weight by itself."""
        return [e.path for e in self._all if id(e) not in self._converted and not e.calls]

    def totals(self) -> dict[str, Any]:
        """JSON-safe: calls and FLOPs of all GEMM modules, and those that ran in FP8."""
        calls = sum(e.calls for e in self._all)
        flops = sum(e.flops for e in self._all)
        fp8_flops = sum(e.fp8_flops for e in self._all)
        return {
            "calls": calls,
            "fp8_calls": sum(e.fp8_calls for e in self._all),
            "flops": flops,
            "fp8_flops": fp8_flops,
            "fp8_flops_share": fp8_flops / flops if flops else 0.0,
            "never_ran": self.never_ran(),
            "not_counted": self.not_counted(),
        }

    def debug_line(self, entry: _Watched, module: Any, input: Tensor, ran: dict[str, bool]) -> None:
        if not self._debug or entry.calls != 1:
            return
        rows = input.numel() // max(input.shape[-1], 1)
        shape = f"M={rows}, N={entry.n}, K={entry.k}, input {_short(input.dtype)}"
        if not any(ran.values()):
            own = torch.get_autocast_dtype(input.device.type)
            on = torch.is_autocast_enabled(input.device.type)
            dtype = _short(own if on else module_dtype(module, input))
            messages.note(f"{entry.path}: {shape}: all GEMMs in {dtype}: {entry.reason}")
            return
        grads = "E5M2" if module._fp8_recipe.fp8_format == "hybrid" else "E4M3"
        formats = {
            "fprop": "E4M3 x E4M3, fast accumulation",
            "dgrad": f"{grads} x E4M3",
            "wgrad": f"{grads} x E4M3",
        }
        each = [f"{k} {'FP8 ' + formats[k] if v else 'BF16'}" for k, v in ran.items()]
        messages.note(f"{entry.path}: {shape}: {'; '.join(each)}")


def module_dtype(module: Any, input: Tensor) -> torch.dtype:
    weight = getattr(module, "weight", None)
    return weight.dtype if isinstance(weight, Tensor) else input.dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _saw(module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Forward hook of every GEMM module in the first step. Captures nothing."""
    from fp8patch.regions import active

    entry = _watched.get(id(module))
    input = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
    if entry is None or input is None or input.dim() == 0:
        return
    region = active()
    # Recomputation in backward repeats a forward that was counted.
    if region is not None and region.reopened:
        return
    one = input.numel() // max(input.shape[-1], 1) * entry.row_flops
    grads = torch.is_grad_enabled()
    # Reentrant checkpointing runs its blocks without gradients the first time.
    trains = grads or (region is not None and region.training is True)
    weight = getattr(module, "weight", None)
    parts = {
        "fprop": True,
        "dgrad": trains and (input.requires_grad or not grads),
        "wgrad": trains and (weight is None or bool(weight.requires_grad)),
    }
    ours = "_fp8_bank" in vars(module)
    ran = _ran(module, input) if ours else dict.fromkeys(parts, False)
    entry.calls += 1
    entry.fp8_calls += any(ran.values())
    entry.flops += one * sum(parts.values())
    entry.fp8_flops += one * sum(parts[k] and ran[k] for k in parts)
    entry.owner.debug_line(entry, module, input, ran)


def _ran(module: Any, input: Tensor) -> dict[str, bool]:
    """Which GEMMs of the call that has just returned are in FP8: the module's own rule, again."""
    from fp8patch import regions
    from fp8patch.modules.obstacles import find_obstacle, precision_of

    region = regions.active()
    none = {"fprop": False, "dgrad": False, "wgrad": False}
    if region is None or region.execution == "observe":
        return none
    precision = precision_of(module, region)
    try:
        if find_obstacle(module, input, region, precision) is not None:
            return none
    except Fp8PatchError:
        return none
    return {name: getattr(precision, name) == "fp8" for name in none}
