"""The process of one contender: builds and compiles once, then waits for its turns on a pipe.

    python … '{"workload": …, "contender": "fp8", "device": "cuda"}'    (`process.WORKER`)

A line of JSON each way. In: `warm`, `turn`, `finish`; the end of input ends the process. Out:
`started` at once, an answer to each command, `failed` instead of one.
"""

import json
import os
import sys
import traceback
from typing import Any, TextIO

__all__ = ["main"]

_ERROR_LENGTH = 400


def main(text: str) -> None:
    """Serve commands until the input ends; `text` is the JSON that is shown above."""
    # Libraries print; what goes to the parent is ours alone.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    spec = json.loads(text)
    session: Any = None
    try:
        from fp8patch.bench.facts import facts

        _import_all(spec)
        _say(answers, {"event": "started", "facts": facts(spec["device"])})
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "warm":
                session = _session(spec)
            _say(answers, _DO[command["do"]](session, command))
    except BaseException as error:  # any fault of any library becomes a row that says so
        if isinstance(error, BrokenPipeError | KeyboardInterrupt):
            return
        text = " ".join(str(error).split())[:_ERROR_LENGTH]
        said = f"{type(error).__name__}: {text}"
        _say(answers, {"event": "failed", "error": said, "traceback": traceback.format_exc()})


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _import_all(spec: dict[str, Any]) -> None:
    """Everything that the session will want, the workload's library included."""
    import fp8patch.bench.measure  # noqa: F401
    from fp8patch.bench.workloads import Workload

    Workload.from_dict(spec["workload"]).model("meta")


def _session(spec: dict[str, Any]) -> Any:
    from fp8patch.bench.contenders import CONTENDERS
    from fp8patch.bench.measure import Session
    from fp8patch.bench.workloads import Workload

    workload = Workload.from_dict(spec["workload"])
    return Session(workload, CONTENDERS[spec["contender"]], spec["device"])


def _warm(session: Any, command: dict[str, Any]) -> dict[str, Any]:
    session.warm_up(command["steps"])
    reserved = session.reserved_gib()
    session.release()
    return {
        "event": "ready",
        "reserved_gib": reserved,
        "held_gib": session.held_gib(),
        "converted": session.converted,
        "predicted_gain": session.predicted,
        "left_eager": session.left_eager(),
        "params": sum(p.numel() for p in session.model.parameters()),
    }


def _turn(session: Any, command: dict[str, Any]) -> dict[str, Any]:
    times = session.times(command["steps"], command["settle"])
    reserved = session.reserved_gib()
    session.release()
    return {"event": "turn", "times": times, "reserved_gib": reserved}


def _finish(session: Any, command: dict[str, Any]) -> dict[str, Any]:
    session.warm_up(command["settle"])
    cpu_ms = session.cpu_ms()
    kernel_ms, top = session.kernels()
    loss = session.loss()
    session.release()
    return {
        "event": "finished",
        "cpu_ms": cpu_ms,
        "kernel_ms": kernel_ms,
        "top_kernels": top,
        "loss": loss,
    }


_DO = {"warm": _warm, "turn": _turn, "finish": _finish}
