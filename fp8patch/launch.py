"""The parent of a `fp8patch train` run: what to start, in which environment, and what came of it.

It stays above the run, loads no torch, and touches nothing that the script can see but three
environment variables. The other half is `inject/patch.py`, in every process below.
"""

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8patch.errors import Fp8PatchError
from fp8patch.launch_signals import replace_process, run_command
from fp8patch.messages import warn
from fp8patch.train_options import ENV, TrainOptions

__all__ = ["BOOTSTRAP", "child_environment", "launcher_command", "run", "script_command"]

# The folder whose `sitecustomize.py` every Python of the run loads.
BOOTSTRAP = Path(__file__).resolve().parent / "bootstrap"

_MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
_FLAGS = {"fp8": "--fp8", "emulate": "--emulate"}


def script_command(script: str, args: list[str], *, nproc: int | None = None) -> list[str]:
    """The command for `fp8patch train SCRIPT ARGS…`; with `nproc`, torchrun on this machine.

    Raises:
        Fp8PatchError: There is no such script.
    """
    if script != "-" and not Path(script).exists():
        launcher = _find(script) is not None
        hint = (
            f"To run the command {script!r}, put -- before it: fp8patch train -- {script} …"
            if launcher
            else "fp8patch train takes the path of a Python script, or -- and a command."
        )
        raise Fp8PatchError(f"{script}: no such script. {hint}")
    # Python runs a folder that has a __main__.py.
    if Path(script).is_dir() and not (Path(script) / "__main__.py").is_file():
        raise Fp8PatchError(
            f"{script}: is a folder, without a __main__.py that Python could run. Give the path "
            "of a script in it."
        )
    if nproc is None:
        return [sys.executable, script, *args]
    # -P: with `-m` alone it would take an `inspect.py` of the folder we are in for Python's own.
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(nproc), script, *args]


def launcher_command(words: list[str]) -> list[str]:
    """The command for `fp8patch train -- LAUNCHER…`, its program found.

    Raises:
        Fp8PatchError: There is no such program, or it would turn on Accelerate's own FP8.
    """
    program = _find(words[0])
    if program is None:
        hint = f"It is neither on PATH nor beside {sys.executable}."
        if Path(words[0]).is_file():
            hint = "It is a file that cannot be executed; for a Python script, leave out the --: "
            hint += f"fp8patch train {words[0]} …"
        raise Fp8PatchError(f"{words[0]}: no such command. {hint}")
    if any("accelerate" in word for word in words[:3]):
        _refuse_accelerate_fp8(words)
    return [program, *words[1:]]


def run(command: list[str], options: TrainOptions) -> int:
    """Run `command` with every process of it patched, and say so if none was.

    Under backend `off` this process becomes the command, in the environment that it was started
    in, and does not return.

    Args:
        command: From `script_command` or `launcher_command`.
        options: `status_dir` and `sets_bf16` are filled in here.

    Returns:
        The command's exit code, negative where a signal ended it. Under `fp8` and `emulate` 1
        instead of 0, if no process was armed or nothing ran in FP8.

    Raises:
        Fp8PatchError: The command cannot be started, or the environment asks for what conflicts.
    """
    try:
        if options.backend == "off":
            replace_process(command, _without_us(os.environ))
        with tempfile.TemporaryDirectory(
            prefix="fp8patch-train-", ignore_cleanup_errors=True
        ) as folder:
            status_dir = Path(folder).resolve()
            options = dataclasses.replace(options, status_dir=str(status_dir))
            environment = child_environment(options, os.environ)
            code = run_command(command, environment, status_dir)
            return _verdict(code, options, _read_status(status_dir))
    except OSError as error:
        raise Fp8PatchError(f"{command[0]} cannot be started: {error.strerror}.") from None


def child_environment(options: TrainOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, and what makes a process of the run find its way to `inject.patch.arm`.

    Raises:
        Fp8PatchError: Accelerate's own FP8 is on, or the installation's path cannot be used.
    """
    if os.pathsep in str(BOOTSTRAP):
        raise Fp8PatchError(
            f"fp8patch is installed in {BOOTSTRAP.parent}, and PYTHONPATH cannot name a folder "
            f"with a {os.pathsep!r} in it. Install it in another folder."
        )
    child = _without_us(environ)
    mode = child.get(_MIXED_PRECISION, "")
    if mode.lower() == "fp8":
        raise Fp8PatchError(_accelerate_fp8(f"{_MIXED_PRECISION}={mode} is set"))
    ignored = sorted(name for name in child if name.startswith("ACCELERATE_FP8_"))
    if ignored:
        warn(
            f"{', '.join(ignored)} is set, and configures Accelerate's own FP8, which is off "
            f"under fp8patch."
        )
    # Accelerate and the Trainer ask here; what the user chose for them stays.
    if not mode:
        child[_MIXED_PRECISION] = "bf16"
        options = dataclasses.replace(options, sets_bf16=True)
    path = child.get("PYTHONPATH")
    # An empty entry would be the working directory.
    child["PYTHONPATH"] = f"{BOOTSTRAP}{os.pathsep}{path}" if path else str(BOOTSTRAP)
    child.update(options.to_env())
    return child


def _without_us(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` as it is, unless it is that of a process inside another run."""
    child = dict(environ)
    if child.pop(ENV, None) is not None:
        entries = child.get("PYTHONPATH", "").split(os.pathsep)
        rest = [entry for entry in entries if entry != str(BOOTSTRAP)]
        child.pop("PYTHONPATH", None)
        if any(rest):
            child["PYTHONPATH"] = os.pathsep.join(rest)
    return child


def _find(program: str) -> str | None:
    """The program as a shell finds it, or beside our own Python (an environment not activated)."""
    return shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))


def _refuse_accelerate_fp8(words: list[str]) -> None:
    for option, value in zip(words, [*words[1:], ""], strict=True):
        name, _, joined = option.replace("-", "_").partition("=")
        if name == "__mixed_precision" and (joined or value).lower() == "fp8":
            raise Fp8PatchError(_accelerate_fp8("accelerate launch has --mixed_precision fp8"))


def _accelerate_fp8(what: str) -> str:
    return (
        f"{what}: Accelerate would convert the model by itself, and both at once compute wrong "
        f"results. Use bf16 there; fp8patch does the FP8."
    )


def _read_status(folder: Path) -> list[dict[str, Any]]:
    """What the armed processes reported; a file that is not whole reports nothing."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            status = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(status, dict) and status.get("armed"):
            found.append(status)
    return found


def _verdict(code: int, options: TrainOptions, armed: list[dict[str, Any]]) -> int:
    """The exit code, after saying what a successful run did not do.

    A script that failed has said why, and a remark of ours below it would only hide that.
    """
    if code != 0:
        return code
    if not armed:
        problem = (
            "nothing was patched: no process of this run imported torch with fp8patch in it. "
            "python -I, -E and -S leave it out, as does a launcher that empties the environment "
            "or starts processes on other machines (run fp8patch train on each of them)."
        )
    elif options.backend != "bf16" and not any(status.get("ran_fp8") for status in armed):
        # Where `auto` found no GPU for FP8, the processes have said that; a launcher, which imports
        # torch as well, meets no model and decides nothing.
        decided = {status.get("backend") for status in armed} - {None}
        if options.backend == "auto" and decided and decided <= {"off", "bf16"}:
            return 0
        problem = (
            f"nothing ran in FP8: of {len(armed)} armed "
            f"{'process' if len(armed) == 1 else 'processes'}, none ran a converted layer. Models "
            f"are converted at the first forward of one that trains; --roots names others."
        )
    else:
        return 0
    flag = _FLAGS.get(options.backend)
    if flag is None:
        warn(problem)
        return 0
    warn(f"{problem} The script ended with 0, and this command with 1, because of {flag}.")
    return 1
