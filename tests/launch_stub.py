"""Runs of `fp8patch train` whose child side is a stub, and whose torch is one where that will do.

A user's own `sitecustomize`, which the bootstrap loads in turn, puts both in: the product has no
door for them.
"""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

_SITE = """
import os, sys, types

def arm():
    import json
    options = json.loads(os.environ["FP8PATCH_TRAIN"])
    status = {"armed": True, "backend": options["backend"], "ran_fp8": not os.environ.get("IDLE")}
    with open(os.path.join(options["status_dir"], f"{os.getpid()}.json"), "w") as file:
        json.dump(status, file)
    with open(os.environ["ARMED_LOG"], "a") as file:
        file.write(f"{os.getpid()} {os.path.basename(sys.argv[0])}\\n")

stub = types.ModuleType("fp8patch.inject.patch")
stub.arm = arm
sys.modules["fp8patch.inject.patch"] = stub
"""


@dataclass
class Bench:
    """A folder with a script, a stub, and what a run in it is given."""

    folder: Path
    environment: dict[str, str]

    def script(self, text: str, name: str = "s.py") -> str:
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    @property
    def armed(self) -> list[str]:
        """Name of the program of each process that was armed, in no order."""
        log = self.folder / "armed.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return sorted(line.partition(" ")[2] for line in lines)

    def start(self, *command: str, **extra: object) -> "subprocess.Popen[str]":
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, text=True, **{**pipes, **extra}
        )

    def train(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "fp8patch", "train", *words]

    def run(self, *command: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        with self.start(*command, start_new_session=True) as process:
            try:
                out, err = process.communicate(stdin, timeout=120)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def make_bench(folder: Path, *, real_torch: bool = False) -> Bench:
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    if not real_torch:
        (site / "torch.py").write_text("")
    names = ("PYTHONPATH", "FP8PATCH_TRAIN", "ACCELERATE_MIXED_PRECISION")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    checkout = str(Path(__file__).resolve().parent.parent)
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(site), checkout]),
        "ARMED_LOG": str(folder / "armed.log"),
        "OMP_NUM_THREADS": "1",
    }
    return Bench(folder, environment)
