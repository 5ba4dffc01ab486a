"""The lines that a run says, and its JSON report."""

import dataclasses
import math
import os
import platform
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fp8patch import __version__, messages
from fp8patch.inject.compile import facts, say_compiled
from fp8patch.inject.record import place, write_json
from fp8patch.inspect.advice import advise, overrides, recipe_line
from fp8patch.inspect.run import FORMAT_VERSION
from fp8patch.inspect.slots import layers_of
from fp8patch.inspect.source import source_of

if TYPE_CHECKING:
    from fp8patch.inject.models import Model
    from fp8patch.inject.record import Record
    from fp8patch.inject.track import Tracking
    from fp8patch.train_options import TrainOptions

__all__ = ["check_lines", "progress_line", "report", "say_start", "say_summary", "write_report"]


# Layers at risk that the summary names.
_MOST_RISKS = 3


class Facts(Protocol):
    """What is known of a run: `run.Run`."""

    options: "TrainOptions"
    execution: str | None
    hardware_name: str
    models: "list[Model]"
    record: "Record"
    tracking: "Tracking | None"
    overhead: float
    conversion_seconds: float

    def late(self) -> dict[str, list[str]]: ...


def say_start(run: "Facts", model: "Model") -> None:
    """What happens to one model, in a line or two."""
    if model.plan is None:
        messages.note(f"{model.name}: BF16 autocast, no FP8.")
        return
    from fp8patch.plan.types import NORM_KINDS

    plan = model.plan
    chosen = plan.converted()
    counts = Counter(d.kind for d in chosen)
    total = Counter(d.kind for d in plan.decisions)
    # A norm computes as before; what changes is the dtype that it hands on.
    normed, of = (sum(c[kind] for kind in NORM_KINDS) for c in (counts, total))
    norms = f", {normed} of {of} norms with them" if normed else ""
    gemms = [kind for kind in counts if kind not in NORM_KINDS]
    kinds = [f"{counts[kind]} of {total[kind]} {_plural(kind)}" for kind in gemms]
    share = sum(d.flops_share for d in chosen)
    messages.note(
        f"{model.name}: {', '.join(kinds)} in FP8 ({share:.1%} of GEMM FLOPs){norms}, "
        f"recipe {plan.recipe.name}, {_where(run)}."
    )
    skipped: dict[str, list[Any]] = {}
    for decision in plan.decisions:
        if decision.action == "skip":
            skipped.setdefault(decision.code, []).append(decision)
    if skipped:
        parts = [_skipped(code, decisions) for code, decisions in skipped.items()]
        messages.note(f"{model.name}: not in FP8: {'; '.join(parts)}.")


def _plural(kind: str) -> str:
    return {"linear": "Linears", "conv1d": "Conv1Ds"}.get(kind, kind)


def _skipped(code: str, decisions: list[Any]) -> str:
    from fp8patch.plan.types import CODES

    first = decisions[0]
    why = CODES.get(code, first.reason)
    if code == "slower":
        why = f"{first.reason} and the like"
    more = f" and {len(decisions) - 1} more" if len(decisions) > 1 else ""
    return f"{first.path or '(the model itself)'}{more} ({code}: {why})"


def _where(run: "Facts") -> str:
    if run.execution == "emulate":
        return "emulated (the same rounding on any device, slowly)"
    return f"on {run.hardware_name}"


def progress_line(run: "Facts", step: int) -> None:
    """One line every `log_every` steps."""
    record, every = run.record, run.options.log_every
    text = f"step {step}"
    if record.losses.last is not None:
        text += f": loss {record.losses.last:.4f}"
    recent = record.durations.values()[-max(every // record.durations.each, 1) :]
    if recent:
        text += f", {_ms(sum(recent) / len(recent))} a step"
    messages.note(text)


def say_summary(run: "Facts") -> None:
    """What the run did, for a person."""
    values = report(run, "finished")
    memory, what = run.record.peak_memory()
    median = values["median_step_seconds"]
    pace = f", median {_ms(median)} a step" if median is not None else ""
    peak = f", peak memory {memory / 2**30:.2f} GiB {what}" if memory else ""
    messages.note(f"summary: {_count(values['steps'], 'optimizer step')}{pace}{peak}.")
    if run.execution in ("fp8", "emulate"):
        _say_fp8(values)
        _say_risks(values, run.options.report)
        _say_late(run.late())
    if run.tracking is not None:
        messages.note(run.tracking.line())
    for model in run.models:
        if model.blocks is not None:
            say_compiled(model.name, model.blocks)
    overhead = values["overhead"]
    each = overhead["seconds_a_step"]
    part = f" ({each / median:.2%} of a step)" if each is not None and median else ""
    own = f"{1000 * each:.2f} ms a step{part}, " if each is not None else ""
    messages.note(
        f"fp8patch's own time: {own}planning and conversion {overhead['conversion_seconds']:.2f} s "
        "once."
    )


def _say_fp8(values: dict[str, Any]) -> None:
    cover = values["coverage"]
    if not cover["fp8_calls"]:
        messages.warn("nothing ran in FP8.")
    else:
        messages.note(
            f"in FP8: {cover['fp8_calls']} of {cover['calls']} GEMM calls, "
            f"{cover['fp8_flops_share']:.1%} of GEMM FLOPs (up to the first optimizer step)."
        )
    if cover["fp8_calls"] and cover["not_counted"]:
        messages.note(
            f"not in these figures, as it is never called: {_few(cover['not_counted'])} "
            "(what reads its weight is not seen)."
        )
    idle = cover["never_ran"]
    if idle:
        messages.note(f"converted, and not run in the first step: {_few(idle)}.")
    parts = [
        f"{role} {_ratio(r['saturated'])} saturated, {_ratio(r['non_finite'])} not finite"
        for role, r in values["ratios"].items()
    ]
    if parts:
        messages.note(f"of the values cast: {'; '.join(parts)}.")


def _say_risks(values: dict[str, Any], path: str | None) -> None:
    """The layers that lose too much to FP8, and what a recipe could say of them."""
    source = source_of(Path(path or "run.json"), values)
    advice = advise(layers_of(source.slots))
    for item in advice[:_MOST_RISKS]:
        messages.warn(f"{item.path or '(the model itself)'}: {item.why}.")
    if len(advice) > _MOST_RISKS:
        where = "--report FILE keeps them." if path is None else f"see fp8patch inspect {path}"
        messages.warn(f"{len(advice) - _MOST_RISKS} more layers lose as much; {where}")
    chosen = overrides(advice[:_MOST_RISKS], [slot.path for slot in source.slots])
    if chosen:
        messages.note(f"a recipe that helps has: {recipe_line(chosen)}")


def _say_late(late: dict[str, list[str]]) -> None:
    for name, paths in late.items():
        one = len(paths) == 1
        messages.warn(
            f"{_count(len(paths), 'Linear')} came into {name} after its conversion and "
            f"{'is' if one else 'are'} not in FP8: {_few(paths)}."
        )


def _few(paths: list[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def check_lines(run: "Facts") -> None:
    """What `--check` adds to start lines and summary."""
    from fp8patch.plan.step import Mode, step_gain

    mode: Mode = "compiled" if run.options.compiles else "eager"
    for model in run.models:
        if model.plan is None:
            continue
        gain, whole = model.plan.summary()["gemm_gain"], step_gain(model.plan, mode)
        gpu = model.plan.gpu or "a GPU"
        predicted = f"{gain:.2f}x over BF16 on its GEMMs on {gpu}" if gain else "nothing"
        if gain and whole:
            predicted += f", {whole:.2f}x on a whole step's kernels ({mode}, as BF16 then)"
        messages.note(f"check: {model.name}: predicted {predicted}, at M={model.plan.tokens}.")
    seconds = run.record.durations.values()
    times = ", ".join(_ms(value) for value in seconds)
    note = " (emulation is no measure of speed)" if run.execution == "emulate" else ""
    messages.note(f"check: measured steps: {times}{note}. Stopped after step {run.record.steps}.")


def report(run: "Facts", state: str) -> dict[str, Any]:
    """Everything, JSON-safe. `inspect.run` reads it, and tells what a history holds."""
    record = run.record
    steps = run.record.steps
    memory, what = record.peak_memory()
    return {
        "format_version": FORMAT_VERSION,
        "fp8patch_version": __version__,
        "state": state,
        "backend": run.options.backend,
        "execution": run.execution,
        "device": run.hardware_name,
        "world_size": place()[1],
        "recipe": run.options.recipe,
        "settings": _settings(run),
        "models": [_model(model) for model in run.models],
        "steps": steps,
        "step_seconds": record.durations.values(),
        "step_seconds_each": record.durations.each,
        "median_step_seconds": record.median_step(),
        "losses": [[step, loss if math.isfinite(loss) else None] for step, loss in record.losses],
        "peak_memory_bytes": memory,
        "peak_memory_kind": what,
        "coverage": record.coverage.totals(),
        "late": sorted({path for paths in run.late().values() for path in paths}),
        "ratios": _ratios(run),
        "overhead": {
            "conversion_seconds": run.conversion_seconds,
            "seconds_a_step": (run.overhead + _reading(run)) / steps if steps else None,
        },
    }


def _settings(run: "Facts") -> dict[str, Any]:
    """What another run would need to be the same, but for the script's own words."""
    options = dataclasses.asdict(run.options)
    for name in ("status_dir", "report", "sets_bf16"):
        del options[name]
    plan = next((model.plan for model in run.models if model.plan is not None), None)
    return {
        "options": options,
        "recipe": {} if plan is None else plan.recipe.to_dict(),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in ("transformers", "accelerate"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "?"))
    return found


def _ratios(run: "Facts") -> dict[str, dict[str, float]]:
    from fp8patch.inject.history import ratios

    return ratios(model.history for model in run.models if model.history is not None)


def _reading(run: "Facts") -> float:
    """Seconds that reading the slots has taken, within calls of the models."""
    return sum(model.history.seconds for model in run.models if model.history is not None)


def _model(model: "Model") -> dict[str, Any]:
    compiled = None if model.blocks is None else facts(model.blocks)
    if model.plan is None:
        return {"class": model.name, "plan": None, "compiled": compiled}
    chosen = Counter(d.kind for d in model.plan.converted())
    skipped: dict[str, list[str]] = {}
    for decision in model.plan.decisions:
        if decision.action == "skip":
            skipped.setdefault(decision.code, []).append(decision.path)
    return {
        "class": model.name,
        "converted": dict(chosen),
        "skipped": skipped,
        "tokens": model.plan.tokens,
        "plan": model.plan.summary(),
        "compiled": compiled,
        "history": None if model.history is None else model.history.to_dict(),
    }


def write_report(run: "Facts", state: str) -> None:
    """Refresh the file; a run does not end because its report can't be written."""
    path = run.options.report
    why = "" if path is None else write_json(path, report(run, state))
    if why and state == "running":
        messages.once("no report", f"the report can't be written, and the run goes on. {why}")
    elif why:
        older = " What is there is older." if path is not None and os.path.isfile(path) else ""
        messages.warn(f"the last report can't be written. {why}{older}")


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1000 * seconds:.1f} ms"


def _ratio(value: float) -> str:
    return "0" if value == 0 else f"{100 * value:.2g}%"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
