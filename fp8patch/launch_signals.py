"""A command below us that lives and dies as if it ran bare: signals, job control, exit codes.

The command stays in our process group, where the terminal's Ctrl-C and Ctrl-Z reach it without our
help, and where it may read the terminal. Only what somebody sends to us alone is passed on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fp8patch.messages import note, warn

__all__ = ["exit_as", "replace_process", "run_command"]

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
# What batch systems send ahead of the end, for the script to save a checkpoint.
_RELAYED = (*_ENDING, "SIGUSR1", "SIGUSR2")

# Seconds. One Ctrl-C may arrive twice (the terminal's, a supervisor's), and is no second one then.
_SAME_INTERRUPT = 0.5
_PATIENCE = 2.0
_GRACE = 5.0
_POLL = 1.0

_PR_SET_PDEATHSIG = 1


def run_command(command: list[str], environment: Mapping[str, str], status_dir: Path) -> int:
    """Run `command` to its end and return its code, negative where a signal ended it.

    Signals sent to this process go on to the command. A second Ctrl-C kills every process of the
    run. Once a run that was interrupted is over, armed processes that it left behind are ended too.

    Raises:
        OSError: The command cannot be started.
    """
    if not hasattr(signal, "sigtimedwait"):
        return _run_elsewhere(command, environment)
    # A signal that we were started to ignore (nohup) is ignored by the command as well.
    relayed = {s for s in map(_number, _RELAYED) if signal.getsignal(s) != signal.SIG_IGN}
    watched = relayed | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        # Open files are handed on as a shell does: `--data <(zcat x)` is one of them.
        process = subprocess.Popen(
            command, env=environment, close_fds=False, preexec_fn=_in_the_child(before)
        )
        interrupted = _wait(process, watched, status_dir)
        if interrupted:
            _end_leftovers(status_dir)
        while signal.sigtimedwait(watched, 0) is not None:
            pass  # too late: there is nobody left to tell
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.returncode


def exit_as(code: int) -> None:
    """End this process the way the command ended: with its exit code, or by the same signal.

    A shell loop stops at a Ctrl-C only if the program in it *died* of SIGINT.
    """
    if code < 0:
        import resource

        # The command has written its core; ours would only overwrite it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code  # where that signal does not end a process
    raise SystemExit(code)


def replace_process(command: list[str], environment: Mapping[str, str]) -> None:
    """Become `command`. Only returns by an exception.

    Raises:
        OSError: The command cannot be started.
    """
    # Python ignores these for itself; what comes next should not know that Python was here.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(_number(name), signal.SIG_DFL)
    os.execvpe(command[0], command, environment)


def _number(name: str) -> signal.Signals:
    return signal.Signals[name]


def _in_the_child(mask: set[signal.Signals | int]) -> Callable[[], None]:
    """What to do between fork and exec: our blocked signals are not the command's."""
    libc = None
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if libc is not None:
            # Killing us by SIGKILL must not leave a training run on the GPU that nobody sees.
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))

    return prepare


def _wait(
    process: "subprocess.Popen[bytes]", watched: set[signal.Signals], status_dir: Path
) -> bool:
    """Wait for the end of `process`; True if somebody asked for it."""
    ending = {_number(name) for name in _ENDING}
    interrupted = said = False
    first = 0.0
    while process.poll() is None:
        info = signal.sigtimedwait(watched, _POLL)
        now = time.monotonic()
        if first and not said and now - first > _PATIENCE:
            note("interrupted, and waiting for the script to end. Ctrl-C again kills it.")
            said = True
        if info is None or info.si_signo == signal.SIGCHLD:
            continue
        number = signal.Signals(info.si_signo)
        interrupted = interrupted or number in ending
        if number == signal.SIGINT:
            if first and now - first > _SAME_INTERRUPT:
                _kill(process, status_dir)
                continue
            first = first or now
        # Positive codes are the kernel's: the terminal has signalled the command as well, and a
        # second KeyboardInterrupt would break into the script's handling of the first.
        if info.si_code <= 0:
            process.send_signal(number)
    return interrupted


def _kill(process: "subprocess.Popen[bytes]", status_dir: Path) -> None:
    warn("interrupted twice: killing the run.")
    process.kill()
    for pid in _processes_of(status_dir):
        _send(pid, signal.SIGKILL)


def _end_leftovers(status_dir: Path) -> None:
    """End armed processes that an interrupted run left: ranks keep a GPU, and wait for ever.

    Armed ones only: a logger that still uploads is none of our business.
    """
    left = _armed(status_dir)
    if not left:
        return
    warn(f"the interrupted run left processes behind, which are ended now: {len(left)}.")
    for pid in left:
        _send(pid, signal.SIGTERM)
    until = time.monotonic() + _GRACE
    while _armed(status_dir) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in _armed(status_dir):
        _send(pid, signal.SIGKILL)


def _armed(status_dir: Path) -> list[int]:
    return [pid for pid in _processes_of(status_dir) if (status_dir / f"{pid}.json").exists()]


def _processes_of(status_dir: Path) -> list[int]:
    """Living processes of the run: those whose environment names its status directory.

    Neither the process group nor parenthood finds them: torchrun gives every rank a session of its
    own, and ranks outlive a launcher that is killed.
    """
    mark = os.fsencode(status_dir.name)
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or somebody else's
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _run_elsewhere(command: list[str], environment: Mapping[str, str]) -> int:
    """`run_command` where nothing tells who sent a signal: SIGINT counts as the terminal's."""
    process = subprocess.Popen(command, env=environment, close_fds=False)
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name) and signal.getsignal(_number(name)) != signal.SIG_IGN:
            signal.signal(_number(name), lambda number, _: process.send_signal(number))
    interrupts = 0
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts > 1:
                process.kill()
