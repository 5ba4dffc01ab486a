"""What `inspect` and `report` are given: a run's report, or a patched directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fp8patch.errors import CheckpointError
from fp8patch.inspect.run import read_report, slots_of
from fp8patch.inspect.slots import SlotPoints

__all__ = ["Source", "read_source"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A run or a checkpoint.

    Attributes:
        path: What the user named.
        models: Class names; a second model of one class is "Name#2".
        recipe: The recipe's name.
        slots: Of every model; paths begin with "Name#2:" where there are several models.
        values: The report as it is; empty for a checkpoint.
    """

    path: Path
    kind: Literal["run", "checkpoint"]
    models: tuple[str, ...]
    recipe: str
    slots: tuple[SlotPoints, ...]
    values: Mapping[str, Any] = field(default_factory=dict)


def read_source(path: str | Path, *, sqnr: bool = False) -> Source:
    """The report file, or the patched directory, at `path`.

    Args:
        sqnr: Measure the SQNR of weights; of a directory only.

    Raises:
        CheckpointError: There is none, it is damaged, or not what it should be.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        from fp8patch.checkpoint.sidecar import SIDECAR, has_sidecar
        from fp8patch.inspect.checkpoint import read_checkpoint

        if not has_sidecar(path):
            raise CheckpointError(
                f"{path}: holds no {SIDECAR}, so it is no patched model's folder. Give one that "
                "`fp8patch convert` or `fp8patch.save` wrote, or the file of `fp8patch train "
                "--report`."
            )
        plan, slots = read_checkpoint(path, sqnr=sqnr)
        return Source(
            path=path,
            kind="checkpoint",
            models=(plan.model,),
            recipe=plan.recipe.name,
            slots=tuple(slots),
        )
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or folder. Give the file of `fp8patch train --report`, or a "
            "patched model's folder."
        )
    if sqnr:
        raise CheckpointError(
            f"{path}: is a report, and holds no weights to measure an SQNR on. Give a folder."
        )
    return source_of(path, read_report(path))


def source_of(path: Path, values: Mapping[str, Any]) -> Source:
    """The report `values`, which `read_report` gave or a run is about to write."""
    named = _names([model["class"] for model in values["models"]])
    several = sum(model.get("history") is not None for model in values["models"]) > 1
    slots: list[SlotPoints] = []
    for name, model in zip(named, values["models"], strict=True):
        slots += slots_of(model, f"{name}:" if several else "")
    return Source(
        path=path,
        kind="run",
        models=tuple(named),
        recipe=Path(values["recipe"]).stem,
        slots=tuple(slots),
        values=values,
    )


def _names(classes: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    names = []
    for name in classes:
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names
