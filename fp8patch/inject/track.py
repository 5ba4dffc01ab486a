"""`--track`: what the slots saw, as a few figures for the trackers that the script has started.

A reading is logged after the optimizer step in which it is seen to have arrived, under the step it
is of: one step later, mostly, as scales move in the forward after a step.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fp8patch import messages
from fp8patch.inject import trackers
from fp8patch.inject.record import rank

if TYPE_CHECKING:
    from fp8patch.inject.models import Model
    from fp8patch.inject.record import Record
    from fp8patch.train_options import TrainOptions

__all__ = ["Tracking", "figures", "tracking"]


def figures(counts: Any) -> dict[str, float]:
    """The ratios of one reading, under the names that `fp8patch.metrics` has, but without a path.

    Args:
        counts: FP64 [modules, 3, 4]: the four counts of each role.

    Returns:
        `fp8/<role>/<ratio>` over all values that were cast, and `fp8/<role>/<ratio>_worst`, that of
        the module where it is highest. A role in which nothing was cast is left out.
    """
    from fp8patch.numerics import FLUSHED, NON_FINITE, SATURATED, SEEN
    from fp8patch.slots import ROLES

    ratios = {"saturated": SATURATED, "flushed": FLUSHED, "non_finite": NON_FINITE}
    found: dict[str, float] = {}
    for role, name in enumerate(ROLES):
        cast = counts[counts[:, role, SEEN] > 0, role]
        for key, column in ratios.items() if len(cast) else ():
            found[f"fp8/{name}/{key}"] = float(cast[:, column].sum() / cast[:, SEEN].sum())
            found[f"fp8/{name}/{key}_worst"] = float((cast[:, column] / cast[:, SEEN]).max())
    return found


class Tracking:
    """Of one run; `models` and `record` are the run's own."""

    def __init__(self, models: "Sequence[Model]", record: "Record") -> None:
        self._models, self._record = models, record
        self._readings = 0
        self._active = False
        self._took: dict[str, None] = {}
        self._failed: set[str] = set()
        trackers.listen()
        trackers.before_end(self.flush)

    def after_step(self) -> None:
        """An optimizer step is over, and the script has not gone on."""
        trackers.stepped(self._record.steps)
        self._active = self._active or bool(trackers.active())
        self.flush()

    def flush(self) -> None:
        """Log the readings that have arrived; waits for none."""
        for index, model in enumerate(self._models):
            prefix = f"fp8/{model.name}_{index + 1}" if index else "fp8"
            for step, counts in [] if model.history is None else model.history.take():
                if rank() == 0:
                    self._record.arrived()  # no wait either
                    values = {**figures(counts), **self._also()}
                    self._log({prefix + k.removeprefix("fp8"): v for k, v in values.items()}, step)

    def _also(self) -> dict[str, float]:
        """What is at hand besides."""
        found = {"fp8/flops_share": float(self._record.coverage.totals()["fp8_flops_share"])}
        if self._record.durations.last is not None:
            found["fp8/step_seconds"] = self._record.durations.last
        return found

    def _log(self, values: dict[str, float], step: int) -> None:
        taken = False
        for name, log in trackers.active():
            try:
                log(dict(values), step)
            except Exception as error:  # a full disk, a lost connection: the run goes on
                if name not in self._failed:
                    self._failed.add(name)
                    messages.warn(
                        f"--track: {name} did not take the figures of step {step} "
                        f"({type(error).__name__}: {messages.one_line(error)}). The run goes on."
                    )
            else:
                taken = True
                self._took[name] = None
        self._readings += taken

    def line(self) -> str:
        """What the summary says of it."""
        if self._readings:
            what = "reading" if self._readings == 1 else "readings"
            return f"--track: {self._readings} {what} logged to {', '.join(self._took)}."
        why = (
            "no tracker was active. One is what accelerator.init_trackers has started, or a "
            "Trainer's callback (report_to)"
        )
        if self._failed:
            why = f"{', '.join(sorted(self._failed))} took none of it"
        elif all(model.history is None for model in self._models):
            why = "nothing is in FP8"
        elif self._active:
            why = (
                "the run ended before a reading had come; with --log-every N one comes after "
                "N + 1 steps"
            )
        return f"--track: nothing was logged: {why}."


def tracking(
    options: "TrainOptions", models: "Sequence[Model]", record: "Record"
) -> Tracking | None:
    """What `options` ask for; hooks the script's libraries then."""
    return Tracking(models, record) if options.track and options.backend != "off" else None
