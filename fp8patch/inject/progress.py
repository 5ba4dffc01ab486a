"""What is told of a run while it goes on: when its numbers have come, and not too often."""

import time
from typing import TYPE_CHECKING, Protocol

from fp8patch.inject.record import rank

if TYPE_CHECKING:
    from fp8patch.inject.report import Facts

    class Run(Facts, Protocol):
        """What is known of a run, and how to tell its parent: `run.Run`."""

        def write_status(self) -> None: ...


__all__ = ["CHECK_STEPS", "Progress"]

# Where --check stops.
CHECK_STEPS = 3

# A large model's history takes a while to write: this part of a run goes into its report at most,
# besides the first half second.
_WRITING = 0.01
_WRITING_AT_FIRST = 0.5


class Progress:
    """Sends for the numbers at a step that is due, and tells them at the step where they arrive."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._awaited = 0
        self._written = 0.0
        self._began = time.perf_counter()

    def after_step(self) -> None:
        """An optimizer step is over.

        Raises:
            SystemExit: It was the last one of --check.
        """
        started = time.perf_counter()
        run, record, options = self._run, self._run.record, self._run.options
        stop = options.check and record.steps >= CHECK_STEPS
        if record.due(options.log_every) or stop:
            record.fetch()
            self._awaited = record.steps
        if self._awaited and record.arrived(wait=stop):
            self._tell(self._awaited)
            self._awaited = 0
        if run.tracking is not None:
            run.tracking.after_step()
        run.overhead += time.perf_counter() - started
        if stop:
            if rank() == 0:
                from fp8patch.inject import report

                report.check_lines(run)
            raise SystemExit(0)

    def _tell(self, step: int) -> None:
        from fp8patch.inject import report

        if rank() == 0:
            every = self._run.options.log_every
            if every and step % every == 0:
                report.progress_line(self._run, step)
            started = time.perf_counter()
            if self._written <= _WRITING_AT_FIRST + _WRITING * (started - self._began):
                report.write_report(self._run, "running")
                self._written += time.perf_counter() - started
        self._run.write_status()
