"""The parent's end of a worker: start it, send commands, receive what it says, end it."""

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from queue import Queue
from typing import Any

from fp8patch import child_python
from fp8patch.bench.contenders import Contender
from fp8patch.bench.workloads import Workload

__all__ = ["WORKER", "Events", "Worker"]

Events = Queue[tuple["Worker", dict[str, Any]]]

WORKER = child_python.command("fp8patch.bench.worker", "main")
# Inductor takes every core for each process otherwise.
_COMPILE_THREADS = 4
_TAIL = 4000


class Worker:
    """One contender's process. Everything it says goes into `events`; its end is a `failed`."""

    def __init__(
        self,
        contender: Contender,
        workload: Workload,
        device: str,
        events: Events,
        command: Sequence[str] = WORKER,
    ) -> None:
        self.contender = contender
        self._events = events
        self._closing = False
        spec = {"workload": workload.to_dict(), "contender": contender.name, "device": device}
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(_COMPILE_THREADS), **os.environ}
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [*command, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            # Compilers start children of their own: they end with it.
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        return self.contender.name

    def send(self, do: str, **values: Any) -> None:
        """A command; that nobody is there to read it is seen by the reader."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass

    def close(self, patience: float = 0.0) -> None:
        """End it; after `patience` seconds by force, and its children with it."""
        self._closing = True
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # all gone
        self._process.wait()
        self._reader.join()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        failed = False
        with self._process.stdout as answers:
            for line in answers:
                message = json.loads(line)
                failed = failed or message["event"] == "failed"
                self._events.put((self, message))
        code = self._process.wait()
        if failed or self._closing:
            return
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        error = f"the process ended with {how}"
        self._events.put((self, {"event": "failed", "error": error, "traceback": self._tail()}))

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-_TAIL:]
