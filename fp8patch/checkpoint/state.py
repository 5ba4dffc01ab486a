"""Between a live converted model and its sidecar: take a snapshot, put one back.

The converted part is the module that `convert_model` was called on. It may sit inside the model
that is saved: in a wrapper (DDP, a compiled module, PEFT), or as one encoder of several.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fp8patch import messages
from fp8patch.checkpoint.checks import check_modules
from fp8patch.checkpoint.ranks import for_this_rank, of_all, place, write_rank_file
from fp8patch.checkpoint.sidecar import (
    BankMeta,
    Sidecar,
    fingerprint,
    has_sidecar,
    read_sidecar,
    remove_rank_files,
    remove_sidecar,
    write_sidecar,
)
from fp8patch.errors import CheckpointError
from fp8patch.modules.base import Float8Module
from fp8patch.plan.model import Plan
from fp8patch.plan.types import NORM_KINDS
from fp8patch.recipe import Recipe
from fp8patch.scaling import Bank
from fp8patch.slots import WEIGHT

__all__ = [
    "Converted",
    "another_model",
    "find_converted",
    "restore",
    "restore_from",
    "save_beside",
    "stored_plan",
    "unwrap",
]

# A scale made under one value of these means nothing under another.
_SCALE_FIELDS = ("scaling", "fp8_format", "margin")

# Set by a run that converts its models later than it loads them: takes the model, the directory
# and the index that `restore_from` was called with.
defer: Callable[[nn.Module, str | Path, int], None] | None = None


@dataclass(frozen=True, slots=True)
class Converted:
    """The converted part of a model. `path` is its place in the unwrapped model, "" for all."""

    path: str
    module: nn.Module
    plan: Plan
    bank: Bank

    def gemms(self) -> dict[str, Any]:
        """{path in the plan: converted GEMM module}, wherever a wrapper has put it since."""
        return {
            module._fp8_path: module
            for module in self.module.modules()
            if isinstance(module, Float8Module) and module._fp8_bank is self.bank
        }


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, FSDP and `torch.compile` wrappers, whose names no plan knows."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and type(model).__module__.startswith("torch.nn.parallel"):
            inner = model._modules.get("module")
        if inner is None and type(model).__module__.startswith("torch.distributed"):
            inner = model._modules.get("module") or model._modules.get("_fsdp_wrapped_module")
        if inner is None:
            return model
        model = inner


def find_converted(model: nn.Module) -> Converted | None:
    """The part of `model` that was converted, or None.

    Says so where there are several: only the first has its state saved.
    """
    model = unwrap(model)
    found = [(path, m) for path, m in model.named_modules() if "_fp8_plan" in vars(m)]
    if not found:
        return None
    if len(found) > 1:
        others = ", ".join(path or "(root)" for path, _ in found[1:])
        text = (
            f"{type(model).__name__} was converted in {len(found)} parts. FP8 state is saved and "
            f"restored for {found[0][0] or '(root)'} alone, not for {others}: convert the whole "
            "model in one call (only=[...] selects parts)."
        )
        # By what it says, not by the model: another one may get its id, and would never hear it.
        messages.once(text, text)
    path, module = found[0]
    attributes = vars(module)
    return Converted(path, module, attributes["_fp8_plan"], attributes["_fp8_bank"])


# -- saving ---------------------------------------------------------------------------------------


def save_beside(
    model: nn.Module, directory: str | Path, *, index: int = 0, first: bool | None = None
) -> bool:
    """Write the sidecar of `model` into `directory`, where its weights were just saved.

    For a model that is not converted, remove one that an earlier save has left, and say so.

    Args:
        first: Write the sidecar itself. Otherwise, only what this rank has seen by itself. By
            default the first rank does the one, and all others the other.

    Returns:
        Whether anything was written.

    Raises:
        CheckpointError: It can't be written; an older one is untouched then.
    """
    rank, _ = place()
    first = rank == 0 if first is None else first
    converted = find_converted(model)
    if converted is not None:
        _write(converted, directory, index, first)
        return True
    if not first:
        return False
    if any(isinstance(module, Float8Module) for module in model.modules()):
        messages.warn(
            f"{directory}: {type(model).__name__} is a part of a converted model, so its FP8 state "
            "is not saved beside it. Save the whole model, or revert and convert this part."
        )
    if remove_sidecar(directory, index):
        messages.note(
            f"{directory}: removed the FP8 state of an earlier save: the model just saved there "
            "is not that one."
        )
    return False


def _write(converted: Converted, directory: str | Path, index: int, first: bool) -> None:
    bank, gemms = converted.bank, converted.gemms()
    rank, size = place()
    bank.settle()
    prints = {path: _fingerprint(module.weight) for path, module in gemms.items()}
    known = {path: value for path, value in prints.items() if value is not None}
    state = dict(bank.state())
    if rank > 0:
        write_rank_file(directory, state, known, reduced=of_all(bank.group), index=index)
    if not first:
        return
    write_sidecar(
        directory,
        converted.plan.to_dict(),
        BankMeta(
            siblings=bank.siblings,
            low_precision_norms=tuple(sorted(bank.low_precision_norms)),
            norm_readers=bank.norm_readers,
            observed=bank.observed,
            **{name: getattr(bank.clock, name) for name in BankMeta.clock_flags()},
        ),
        state,
        known,
        root=converted.path,
        extra_state=any(module._fp8_extra_state for module in gemms.values()),
        world_size=size,
        index=index,
    )
    remove_rank_files(directory, index, above=size - 1)


def _fingerprint(weight: Any) -> str | None:
    """None for a weight of which this process holds a part (FSDP) or nothing (offloaded)."""
    if weight.device.type == "meta" or hasattr(weight, "full_tensor") or weight.dim() != 2:
        return None
    return fingerprint(weight)


# -- loading --------------------------------------------------------------------------------------


def restore_from(model: nn.Module, directory: str | Path, *, index: int = 0) -> bool:
    """Restore FP8 state from `directory`, from where weights were just loaded into `model`.

    Returns whether there was any; says so where that must be a surprise.

    Raises:
        CheckpointError: The sidecar can't be read, or is of another model.
    """
    converted = find_converted(model)
    if not has_sidecar(directory, index):
        if converted is not None:
            messages.note(
                f"{directory}: the weights were saved without FP8 state, so scales start anew."
            )
        return False
    if converted is None and defer is not None:
        defer(model, directory, index)
        return True
    if converted is None:
        messages.note(
            f"{directory}: holds FP8 state, and the model that loads it is not converted: ignored. "
            "Call fp8patch.convert_model(model) before loading to go on in FP8."
        )
        return False
    restore(converted, for_this_rank(read_sidecar(directory, index=index), index=index))
    return True


def restore(converted: Converted, sidecar: Sidecar) -> None:
    """Put a sidecar's state into the bank, bit for bit, as far as it fits.

    Where a weight is not the one whose fingerprint was saved, its slot starts anew; where the
    recipe scales differently, all slots do. Either is said in one line.

    Raises:
        CheckpointError: The sidecar is of another model.
    """
    bank, gemms = converted.bank, converted.gemms()
    plan = stored_plan(sidecar)
    paths = {d.path for d in plan.converted() if d.kind not in NORM_KINDS}
    known = {d.path for d in converted.plan.decisions} | set(gemms)
    strange = sorted(path for path in paths if path not in known)
    if strange:
        raise another_model(sidecar, f"it names {strange[0]!r}, which this model does not have")
    kinds = {d.path: d.kind for d in converted.plan.decisions}
    for decision in plan.converted():
        kind = kinds.get(decision.path, decision.kind)
        if kind != decision.kind:
            raise another_model(
                sidecar, f"it says {decision.path!r} is a {decision.kind}, and it is a {kind}"
            )
    _check_shapes(gemms, sidecar)
    if unlike := _unlike(plan.recipe, bank.recipe):
        messages.note(
            f"{sidecar.path}: not restored: it was saved with {_values(plan.recipe, unlike)}, and "
            f"the model is converted with {_values(bank.recipe, unlike)}. Scales start anew."
        )
        return
    if paths != set(bank.paths):
        messages.note(
            f"{sidecar.path}: holds {len(paths)} converted modules, and the model has "
            f"{len(bank.paths)}: those in both are restored."
        )
    changed = _changed(gemms, sidecar)
    ours = set(bank.paths) - _overridden_otherwise(plan, bank, sidecar)
    meta, siblings = sidecar.bank, sidecar.bank.siblings
    bank.siblings = {
        path: leader
        for path, leader in siblings.items()
        if {path, leader} <= ours and bank.can_share(path, leader)
    }
    norms, readers = set(bank.norms), meta.norm_readers
    bank.low_precision_norms = set(meta.low_precision_norms) & norms
    bank.norm_readers = {n: p for n, p in readers.items() if n in norms and p in ours}
    bank.observation = None
    bank.observed = meta.observed
    for name in BankMeta.clock_flags():
        setattr(bank.clock, name, getattr(meta, name))
    bank.restore(
        {
            (path, role): state
            for (path, role), state in sidecar.state.items()
            if path in ours and not (role == WEIGHT and path in changed)
        }
    )
    if changed:
        messages.note(
            f"{sidecar.path}: {len(changed)} of {len(gemms)} weights are not those it was saved "
            f"with ({changed[0]}, for one). Their scales are set anew from the live weights; those "
            "of activations and gradients are kept."
        )


def stored_plan(sidecar: Sidecar) -> Plan:
    """The plan of a sidecar.

    Raises:
        CheckpointError: It is none.
    """
    try:
        plan = Plan.from_dict(sidecar.plan)
        check_modules(plan, sidecar.bank, sidecar.state, sidecar.fingerprint)
        return plan
    except Exception as error:  # PlanError, RecipeError; a list where a dict is due
        raise CheckpointError(
            f"{sidecar.path}: corrupt, or written by a fp8patch that knew more (it was "
            f"{sidecar.version}): {messages.one_line(error)}."
        ) from None


def _overridden_otherwise(plan: Plan, bank: Bank, sidecar: Sidecar) -> set[str]:
    """The layers whose scales mean something else than when they were saved; said in one line."""
    saved = [d for d in plan.converted() if d.path in bank.paths]
    unlike = {d.path for d in saved if _unlike(plan.recipe_of(d), bank.recipe_of(d.path))}
    if unlike:
        messages.note(
            f"{sidecar.path}: {len(unlike)} layers had other overrides ({min(unlike)}, for one). "
            "Their scales start anew."
        )
    return unlike


def _unlike(saved: Recipe, live: Recipe) -> list[str]:
    """The fields in which scales of the two mean different things."""
    return [name for name in _SCALE_FIELDS if getattr(saved, name) != getattr(live, name)]


def _check_shapes(gemms: dict[str, Any], sidecar: Sidecar) -> None:
    for path, module in gemms.items():
        saved = sidecar.fingerprint.get(path)
        if saved is not None and _fingerprint(module.weight) is not None:
            shape = saved[saved.find("[") : saved.find("]") + 1]
            if shape != str(list(module.weight.shape)):
                raise another_model(
                    sidecar, f"{path} had shape {shape}, and has {list(module.weight.shape)}"
                )


def another_model(sidecar: Sidecar, why: str) -> CheckpointError:
    """What to raise for a sidecar that can't belong to the model."""
    return CheckpointError(
        f"{sidecar.path}: belongs to another model: {why}. Load the directory whose weights it was "
        "saved with; or delete it, and convert the plain model anew."
    )


def _changed(gemms: dict[str, Any], sidecar: Sidecar) -> list[str]:
    changed = []
    for path, module in gemms.items():
        saved, live = sidecar.fingerprint.get(path), _fingerprint(module.weight)
        if saved is not None and live is not None and saved != live:
            changed.append(path)
    return changed


def _values(recipe: Any, names: list[str]) -> str:
    return ", ".join(f"{name}={getattr(recipe, name)!r}" for name in names)
