"""Which of a script's modules is a model to run in FP8, and what one of its calls is wrapped in."""

import fnmatch
import sys
import weakref
from collections.abc import Container
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fp8patch import messages
from fp8patch.inject.outputs import find_loss, to_fp32

if TYPE_CHECKING:
    from fp8patch.blocks.compiled import CompiledBlocks
    from fp8patch.inject.history import History
    from fp8patch.inject.record import Record
    from fp8patch.plan.model import Plan

__all__ = ["Ignored", "Model", "chain", "contents", "first_float", "matches", "unconverted"]

# Classes of other FP8 libraries are no nn.Linear, and are looked for to be refused.
_FOREIGN = ("transformer_engine",)


def chain(module: nn.Module) -> list[nn.Module]:
    """`module` and what is inside it: DDP, FSDP and `torch.compile` wrappers, then the model."""
    found = [module]
    while True:
        outer = found[-1]
        inner = outer._modules.get("_orig_mod")
        where = type(outer).__module__
        if inner is None and where.startswith(("torch.nn.parallel", "torch.distributed")):
            inner = outer._modules.get("_fsdp_wrapped_module")
            inner = outer._modules.get("module") if inner is None else inner
        if inner is None:
            return found
        found.append(inner)


def contents(module: nn.Module) -> Literal["nothing", "candidates", "converted"]:
    """What there is in `module` for us.

    A single Linear that a script calls by itself is no model: nothing around it tells whether it is
    a head.
    """
    found: Literal["nothing", "candidates"] = "nothing"
    for part in module.modules():
        kind = type(part)
        if hasattr(kind, "_fp8_base"):
            return "converted"
        if isinstance(part, nn.Linear) or kind.__name__ == "Conv1D":
            if part is not module:
                found = "candidates"
        elif kind.__module__.startswith(_FOREIGN):
            found = "candidates"
    return found


def unconverted(module: nn.Module, decided: Container[nn.Module]) -> list[str]:
    """Paths of the Linears in `module` that train, and on which no plan has decided."""
    return [
        path
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear)
        and not hasattr(type(part), "_fp8_base")
        and part not in decided
        and part.weight.requires_grad
    ]


def names_of(module: nn.Module) -> set[str]:
    """Class names of a model and its wrappers, and the variables that the callers hold it in."""
    parts = chain(module)
    names = {type(part).__name__ for part in parts}
    ids = {id(part) for part in parts}
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] != "fp8patch":
            for scope in (frame.f_locals, frame.f_globals):
                names.update(key for key, value in list(scope.items()) if id(value) in ids)
        frame = frame.f_back  # type: ignore[assignment]
    return names - {"self"}


def matches(module: nn.Module, patterns: tuple[str, ...]) -> str | None:
    """The first pattern that one of the model's names matches."""
    if not patterns:
        return None
    names = names_of(module)
    return next((p for p in patterns if any(fnmatch.fnmatchcase(n, p) for n in names)), None)


def first_float(module: nn.Module) -> torch.Tensor | None:
    """A floating parameter, to ask for its device."""
    return next((p for p in module.parameters() if p.is_floating_point()), None)


class Ignored:
    """A module that is none of ours, so far: looked at again after 1, 2, 4, 8, … calls."""

    __slots__ = ("calls", "frozen", "reference")

    def __init__(self, reference: "weakref.ref[nn.Module]") -> None:
        self.reference = reference
        self.calls = 1
        # It holds something to convert, and nothing that trains.
        self.frozen = True

    def again(self) -> bool:
        self.calls += 1
        # A model that was called before its training begins must be caught when it does.
        if not self.frozen and torch.is_grad_enabled():
            return True
        return self.calls & (self.calls - 1) == 0


class Model:
    """An outermost module of which calls run under our autocasts.

    Attributes:
        name: Class name of what is inside the wrappers.
        plan: What was converted; None for a module that shares converted modules with another
            (evaluation, a copy), or without FP8.
        history: What its slots have seen; None where `plan` is.
        tokens: M of the first batch.
        blocks: What was compiled of it, if anything was to be.
    """

    def __init__(
        self,
        module: nn.Module,
        record: "Record",
        execution: Literal["fp8", "emulate", "bf16"],
        *,
        strict: bool,
        plan: "Plan | None" = None,
    ) -> None:
        parts = chain(module)
        self.reference = weakref.ref(module)
        self.inner = weakref.ref(parts[-1])
        self.name = type(parts[-1]).__name__ if plan is None else plan.model
        self.plan = plan
        self.blocks: CompiledBlocks | None = None
        self.history: History | None = None
        self.record = record
        # A model in BF16 throughout has its precision already: autocast would widen its norms.
        self.mixed = any(p.dtype == torch.float32 for p in module.parameters())
        ddp = [part for part in parts if isinstance(part, nn.parallel.DistributedDataParallel)]
        self._ddp: Any = weakref.ref(ddp[0]) if ddp else None
        self._local: Any = None
        self._reduced: Any = None
        self._probe: weakref.ref[torch.Tensor] | None = None
        if execution != "bf16":
            self._make_regions(execution, strict)

    def _make_regions(self, execution: Literal["fp8", "emulate"], strict: bool) -> None:
        from fp8patch.amp import autocast

        backend = "auto" if execution == "fp8" and not strict else execution
        self._local = autocast(backend=backend)
        wrapper = None if self._ddp is None else self._ddp()
        if wrapper is not None and torch.distributed.get_world_size(wrapper.process_group) > 1:
            self._reduced = autocast(
                backend=backend,
                amax_reduction_group=wrapper.process_group,
            )
            self._collective(True)

    def _collective(self, value: bool) -> None:
        """Whether this model's scales move in calls of its distributed wrapper alone."""
        inner = self.inner()
        for part in () if inner is None else inner.modules():
            bank = getattr(part, "_fp8_bank", None)
            if bank is not None:
                bank.collective = value

    def device_type(self) -> str:
        parameter = None if self._probe is None else self._probe()
        if parameter is None:
            module = self.reference()
            parameter = None if module is None else first_float(module)
            if parameter is None:
                return "cpu"
            self._probe = weakref.ref(parameter)
        return parameter.device.type

    def enter(self) -> tuple[list[AbstractContextManager[Any]], bool]:
        """Open the contexts of one call; also whether its outputs are to go back to FP32."""
        self.record.forward_begins()
        device = self.device_type()
        contexts: list[AbstractContextManager[Any]] = []
        cast = self.mixed and not torch.is_autocast_enabled(device)
        if cast:
            contexts.append(torch.autocast(device, torch.bfloat16))
        if self._local is not None:
            contexts.append(self._region())
            if self.record.coverage.watching and "torch._dynamo" in sys.modules:
                contexts.append(torch.compiler.set_stance("force_eager"))
        entered: list[AbstractContextManager[Any]] = []
        for context in contexts:
            context.__enter__()
            entered.append(context)
        return entered, cast

    def _region(self) -> Any:
        if self._reduced is None:
            return self._local
        wrapper = self._ddp()
        if wrapper is not None and wrapper._join_config.enable:
            # The ranks that have run out answer DDP's collectives, and know nothing of ours.
            self._reduced = None
            self._collective(False)
            messages.once(
                "join",
                "under DDP's join() amax are not reduced over the ranks: from here on each rank "
                "scales by what it sees itself, which is as correct.",
            )
            return self._local
        return self._reduced

    def finish(self, output: Any, cast: bool) -> Any:
        """The output as the script is to see it."""
        if cast:
            output = to_fp32(output)
        if self.record.wants_loss and torch.is_grad_enabled():
            loss = find_loss(output)
            if loss is not None:
                self.record.saw_loss(loss)
        return output
