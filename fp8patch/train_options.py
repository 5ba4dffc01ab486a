"""What a `fp8patch train` run was asked for, on its way to every process. No torch in here.

One environment variable carries it as JSON, because that is what every launcher hands on: torchrun,
`accelerate launch`, and children that the script spawns by itself.

Each process that armed itself reports to the parent through a file, `status_dir/<pid>.json`,
written to a temporary name and renamed: on arming, and again while it runs and when it exits.

    {"armed": true, "rank": 0, "backend": "fp8", "ran_fp8": true, "steps": 120, ...}

`backend` is what `auto` became here. The directory is the parent's, and is gone once the parent is:
a process that outlives the parent has to bear that.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args

from fp8patch.errors import Fp8PatchError, HardwareError
from fp8patch.hardware import Backend

__all__ = ["ENV", "TrainOptions"]

ENV = "FP8PATCH_TRAIN"

_PATTERNS = ("only", "skip", "include", "roots")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of one run. Frozen; `dataclasses.replace` makes another.

    Attributes:
        backend: What to compute in; `auto` is decided by each process, which knows its GPU.
        recipe: A built-in recipe's name, or the absolute path of a YAML file.
        only, skip, include: Globs over module paths, as in `plan_model`.
        tokens: Tokens in a step, for the predicted gain; None takes the first batch.
        roots: Globs over class names of models to convert besides what trains.
        compat: Supply names that scripts of other library versions expect.
        report: Absolute path of the JSON report, or None.
        compile: Compile the repeated blocks of each model.
        cuda_graphs: Compile them, and replay them as CUDA graphs.
        track: Log what slots see to the trackers that the script has started.
        log_every: Say a line, and read every slot, each so many steps. 0 says none; slots are then
            read at every step for a report, else at every tenth, and less often as the run goes
            on.
        check: Stop after the third step, with plan, coverage and step times.
        sets_bf16: The parent set ACCELERATE_MIXED_PRECISION=bf16, which the user had not: a process
            in which `auto` becomes `off` takes it out again, before Accelerate reads it.
        status_dir: Absolute path of the directory for status files; the parent fills it in.

    Raises:
        Fp8PatchError: A pattern that cannot match anything, or a number out of range.
        HardwareError: No such backend.
    """

    backend: Backend = "auto"
    recipe: str = "delayed"
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    tokens: int | None = None
    roots: tuple[str, ...] = ()
    compat: bool = False
    report: str | None = None
    compile: bool = False
    cuda_graphs: bool = False
    track: bool = False
    log_every: int = 0
    check: bool = False
    sets_bf16: bool = False
    status_dir: str = ""

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            allowed = ", ".join(get_args(Backend))
            raise HardwareError(f"unknown backend {self.backend!r}. Allowed: {allowed}.")
        for field in _PATTERNS:
            for pattern in getattr(self, field):
                _check_pattern(field, pattern)
        if self.tokens is not None and self.tokens < 1:
            raise Fp8PatchError(f"tokens: {self.tokens} is not allowed. Use at least 1.")
        if self.log_every < 0:
            raise Fp8PatchError(f"log_every: {self.log_every} is not allowed. Use 0 or more.")

    @property
    def compiles(self) -> bool:
        """Blocks are to be compiled, in one way or the other."""
        return self.compile or self.cuda_graphs

    @property
    def read_every(self) -> int:
        """Optimizer steps from one reading of the slots to the next, at first."""
        return self.log_every or (1 if self.report else 10)

    def to_env(self) -> dict[str, str]:
        """The environment variable that carries these options, as `{name: value}`."""
        return {ENV: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self | None:
        """The options that `environ` (of this process) carries, or None without the variable.

        Raises:
            Fp8PatchError: The variable holds something else, such as another version's options.
        """
        text = (os.environ if environ is None else environ).get(ENV)
        if not text:
            return None
        try:
            values: dict[str, Any] = json.loads(text)
            fields: dict[str, Any] = {
                key: tuple(value) if key in _PATTERNS else value for key, value in values.items()
            }
            return cls(**fields)
        except (ValueError, TypeError, AttributeError) as error:
            raise Fp8PatchError(
                f"{ENV} does not hold the options of a run ({error}). `fp8patch train` sets it; "
                f"unset it, or use the same fp8patch version in the parent and in the script's "
                f"environment."
            ) from None


def _check_pattern(field: str, pattern: object) -> None:
    if not isinstance(pattern, str) or not pattern or re.search(r"[\s/]", pattern):
        over = "class names" if field == "roots" else "dotted module paths"
        raise Fp8PatchError(
            f"{field}: the pattern {pattern!r} can match nothing. Use a glob over {over}, such as "
            f'"{"Bert*" if field == "roots" else "*.mlp.*"}", and give the option once for each.'
        )
