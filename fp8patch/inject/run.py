"""One armed process: its options, the models it has found, and what it says about them."""

import atexit
import os
import time
import weakref
from typing import Any

import torch
from torch import nn

from fp8patch import messages
from fp8patch.errors import Fp8PatchError
from fp8patch.inject import compat, conflicts, sidecar, track
from fp8patch.inject.compile import compile_model
from fp8patch.inject.models import (
    Ignored,
    Model,
    chain,
    contents,
    first_float,
    matches,
    unconverted,
)
from fp8patch.inject.plan import make_plan
from fp8patch.inject.progress import CHECK_STEPS, Progress
from fp8patch.inject.record import Record, Status, rank
from fp8patch.inject.training import has_optimizer, is_trainable, track_optimizers, trains
from fp8patch.train_options import TrainOptions

__all__ = ["Run"]

_BF16_ENV = "ACCELERATE_MIXED_PRECISION"


class Run:
    """What `arm` sets up.

    Attributes:
        execution: What the backend became, at the first model; None before.
        models: Models that were found to train.
        tracking: What --track asks for; None without it.
        overhead: Seconds spent around the calls of models.
        off: `auto` found no FP8: everything is as without us.
    """

    def __init__(self, options: TrainOptions, from_parent: bool) -> None:
        self.options = options
        self.from_parent = from_parent
        self.status = Status(options.status_dir)
        self.execution: str | None = None
        self.hardware_name = ""
        self.models: list[Model] = []
        self.overhead = 0.0
        self.conversion_seconds, self.off = 0.0, False
        tells = bool(options.report or options.log_every)
        self.record = Record(tells, lambda: self._progress.after_step())
        self.tracking = track.tracking(options, self.models, self.record)
        self._progress: Progress = Progress(self)
        self._known: dict[int, Model | Ignored] = {}
        self._refusal: Fp8PatchError | None = None
        self._banks: list[Any] = []
        self._unmatched = set(options.roots)
        self._decided: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._pid = os.getpid()
        self._said = False
        if options.backend != "off":
            track_optimizers()
            sidecar.listen()
        atexit.register(self._at_exit)

    # -- starting and ending ------------------------------------------------------------------

    def refuse_early(self) -> None:
        """What can be refused before the script has loaded its data."""
        backend = self.options.backend
        if backend in ("fp8", "emulate", "auto"):
            conflicts.check_environment()
        if backend == "fp8":
            reason = conflicts.no_fp8_in_this_build()
            if reason is not None:
                raise conflicts.refuse_hardware(reason)
        if backend == "auto" and self.options.sets_bf16 and conflicts.surely_no_fp8():
            os.environ.pop(_BF16_ENV, None)

    def close(self) -> None:
        atexit.unregister(self._at_exit)
        self.record.close()

    def _at_exit(self) -> None:
        # A forked worker inherits this, and is not the run.
        if os.getpid() != self._pid:
            return
        try:
            self.finish()
        except Exception as error:  # a lost GPU, a full disk: the script has had its say
            messages.warn(f"no summary: {type(error).__name__}: {error}")

    def _settle_in(self) -> None:
        """A process that was forked after `arm`, and trains, is a rank of its own."""
        if os.getpid() == self._pid:
            return
        from multiprocessing.util import Finalize

        self._pid = os.getpid()
        self.status = Status(self.options.status_dir)
        self.status.write(armed=True)
        # Python leaves such a process without running what is registered with atexit.
        Finalize(None, self._at_exit, exitpriority=1)

    def finish(self) -> None:
        """The last word: summary, report, status."""
        if self.models and not self._said and rank() == 0:
            # Not before: where torch's import was broken off, this would begin another one.
            from fp8patch.inject import report

            self._said = True
            self.record.fetch()
            self.record.arrived(wait=True)
            for model in self.models:
                if model.history is not None:
                    model.history.finish()
            # A first forward that raised has said why, and nothing is to hide that.
            if self.record.steps or not compat.crashed:
                report.say_summary(self)
            report.write_report(self, "failed" if compat.crashed else "finished")
            if self.options.check and self.record.steps < CHECK_STEPS:
                messages.warn(f"--check: the script ended after {self.record.steps} steps.")
        if self._unmatched and self.models and rank() == 0:
            messages.warn(f"--roots: no model is called {', '.join(sorted(self._unmatched))}.")
        self.write_status()

    def write_status(self) -> None:
        """Tell the parent how far this process is."""
        self.status.write(
            backend=self.execution,
            ran_fp8=self.record.coverage.ran_fp8,
            steps=self.record.steps,
            models=[model.name for model in self.models],
        )

    def banks(self) -> list[Any]:
        """The banks of all converted models; they outlive their models."""
        return self._banks

    def late(self) -> dict[str, list[str]]:
        """{model: paths of the Linears that were put into it after its conversion}."""
        found: dict[str, list[str]] = {}
        for model in self.models if self._banks else ():
            inner = model.inner()
            paths = [] if inner is None else unconverted(inner, self._decided)
            if paths:
                found[model.name] = paths
        return found

    # -- models -------------------------------------------------------------------------------

    def model_of(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Model | None:
        """The model whose outermost call this is, converted by now; None for anything else.

        Raises:
            Fp8PatchError: It can't be converted.
        """
        known = self._known.get(id(module))
        if isinstance(known, Model) or self.off:
            return known if isinstance(known, Model) else None
        if known is not None and not known.again():
            return None
        if self._refusal is not None:
            raise self._refusal
        try:
            return self._consider(module, args, kwargs)
        except Fp8PatchError as error:
            # A script that catches this goes on without FP8 only by saying so.
            self._refusal = error
            raise

    def _consider(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Model | None:
        found = contents(module)
        if found == "converted":
            return self._share(module)
        if self.execution == "bf16" and any(part in self._decided for part in module.modules()):
            # The inner model, evaluated by itself, or one that was wrapped since.
            return self._remember(module, Model(module, self.record, "bf16", strict=False))
        named = matches(module, self.options.roots) if found == "candidates" else None
        if named is not None:
            self._unmatched.discard(named)
        if found == "nothing" or not (named or trains(module)):
            self._ignore(module, frozen=found == "nothing" or not is_trainable(module))
            return None
        probe = first_float(module)
        if probe is None or probe.device.type == "meta":
            return None
        started = time.perf_counter()
        if self.execution is None and self._waits(probe.device):
            self._ignore(module, frozen=False)
            return None
        if self.execution is None:
            self._resolve(probe.device)
        if self.off:
            return None
        self._settle_in()
        model = self._convert(module, args, kwargs)
        self.conversion_seconds += time.perf_counter() - started
        if model is None:
            self._ignore(module, frozen=True)
            return None
        return self._remember(module, model)

    def _waits(self, device: torch.device) -> bool:
        """A trial call on the CPU, before the model moves to the GPU, decides nothing."""
        if self.options.backend not in ("auto", "fp8") or device.type == "cuda":
            return False
        if not torch.cuda.is_available():
            return False
        if rank() == 0:
            messages.once("waits", "a model was called on the CPU: FP8 waits for one on the GPU.")
        return True

    def _resolve(self, device: torch.device) -> None:
        from fp8patch.hardware import detect, resolve_backend
        from fp8patch.recipe import Recipe

        hardware = detect(device)
        self.hardware_name = hardware.name
        rowwise = Recipe.load(self.options.recipe).scaling == "rowwise"
        capable = hardware.rowwise if rowwise else hardware.fp8
        if self.options.backend == "fp8" and not capable:
            raise conflicts.refuse_hardware(hardware.reason)
        self.execution = resolve_backend(self.options.backend, hardware, "off", rowwise=rowwise)
        if self.execution == "off":
            self.off = True
            late = self.options.sets_bf16 and os.environ.pop(_BF16_ENV, None) is not None
            rest = " Accelerate was told to use BF16, and does." if late else ""
            if self.options.compiles:
                rest += " Nothing is compiled either: --no-fp8 --compile compiles without FP8."
                rest += " CUDA graphs need a GPU." if self.options.cuda_graphs else ""
            if rank() == 0:
                messages.note(
                    f"FP8 is off: {hardware.reason} The script runs in its own precision; "
                    f"--emulate computes FP8's rounding on any device.{rest}"
                )
        self.write_status()

    def _convert(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Model | None:
        from fp8patch.inject import report

        execution: Any = self.execution
        inner = chain(module)[-1]
        plan: Any = None
        if execution == "bf16":
            self._decided.update(inner.modules())
        else:
            conflicts.check_model(module)
            plan = make_plan(inner, self.options, execution, args, kwargs, others=bool(self.models))
            if plan is None:
                return None
            from fp8patch.convert import convert_model
            from fp8patch.inject import pickling

            convert_model(inner, plan)
            pickling.install()
            sidecar.restore(inner)
            bank = vars(inner)["_fp8_bank"]
            # Or else each micro-batch of the first step would count as a step.
            bank.clock.optimizer_seen |= has_optimizer(module)
            self._banks.append(bank)
            self._decided.update(inner.modules())
            self.record.coverage.watch(inner, plan)
        strict = self.options.backend == "fp8"
        model = Model(module, self.record, execution, strict=strict, plan=plan)
        if plan is not None:
            model.history = self._history(vars(inner)["_fp8_bank"])
        self.record.watch(module, torch.device(model.device_type()))
        self.models.append(model)
        if rank() == 0:
            report.say_start(self, model)
        model.blocks = compile_model(module, inner, self.options)
        return model

    def _history(self, bank: Any) -> Any:
        from fp8patch.inject.history import History

        return History(bank, self.options.read_every, fresh=self.options.track)

    def _share(self, module: nn.Module) -> Model | None:
        """`module` holds converted modules: an evaluation, a copy, a wrapper made later."""
        for part in chain(module):
            if isinstance(part, nn.DataParallel):
                conflicts.check_model(part)
        if self.execution is None:  # the script converted it by itself
            probe = first_float(module)
            self._resolve(torch.device("cpu") if probe is None else probe.device)
        if self.off or self.execution == "bf16":
            return None
        self._say_what_is_new(module)
        execution: Any = self.execution
        model = Model(module, self.record, execution, strict=self.options.backend == "fp8")
        if not self.models:
            self._adopt(module, model)
        return self._remember(module, model)

    def _say_what_is_new(self, module: nn.Module) -> None:
        """A part was called first, and converted as a model; now the whole is."""
        if not self.models or not torch.is_grad_enabled():
            return
        new = unconverted(module, self._decided)
        if new and rank() == 0:
            messages.warn(
                f"{len(new)} Linears of {type(chain(module)[-1]).__name__} are not in FP8 ({new[0]}"
                ", for one): a part of it was called first, and converted by itself."
            )

    def _adopt(self, module: nn.Module, model: Model) -> None:
        from fp8patch.inject import report

        part = next((m for m in module.modules() if "_fp8_plan" in vars(m)), None)
        if part is None:
            return
        model.plan = vars(part)["_fp8_plan"]
        bank = vars(part)["_fp8_bank"]
        self._banks.append(bank)
        model.history = self._history(bank)
        self.record.coverage.watch(part, model.plan)
        self.record.watch(module, torch.device(model.device_type()))
        self.models.append(model)
        if rank() == 0:
            report.say_start(self, model)
        model.blocks = compile_model(module, chain(module)[-1], self.options)

    def _ignore(self, module: nn.Module, *, frozen: bool) -> None:
        known = self._known.get(id(module))
        if not isinstance(known, Ignored):
            known = self._known[id(module)] = Ignored(self._weakly(module))
        known.frozen = frozen

    def _remember(self, module: nn.Module, model: Model) -> Model:
        model.reference = self._weakly(module)
        self._known[id(module)] = model
        return model

    def _weakly(self, module: nn.Module) -> "weakref.ref[nn.Module]":
        """A reference that takes the entry with it: ids are used again."""
        key, known = id(module), self._known
        return weakref.ref(module, lambda _: known.pop(key, None))
