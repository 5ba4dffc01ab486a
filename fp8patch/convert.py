"""Apply a plan to a model, in place, and undo it.

Conversion changes the class of module objects and adds plain attributes. No Parameter is created,
copied, renamed, re-wrapped or re-ordered, so optimizers, ties, hooks and wrappers built before stay
right.
"""

import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fp8patch.checkpoint.hooks import install
from fp8patch.errors import ConversionError
from fp8patch.modules import linear, norm  # noqa: F401  (linear: registers its class)
from fp8patch.modules.aligned import AlignedLinear
from fp8patch.modules.base import Float8Module, attach, detach, float8_class
from fp8patch.modules.norm_forms import NormForm, NormProbe
from fp8patch.plan.model import Decision, Plan, plan_model, stock_class
from fp8patch.plan.types import GEMM_KINDS, NORM_KINDS
from fp8patch.recipe import Recipe
from fp8patch.roots import unwatch_root, watch_root
from fp8patch.scaling import Bank

_Model = TypeVar("_Model", bound=nn.Module)


def convert_model(
    model: _Model,
    plan: Plan | Recipe | str | Path | None = None,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    include: Sequence[str] = (),
    allow_empty: bool = False,
    extra_state: bool = False,
) -> _Model:
    """Convert `model` in place and return it. Its weights must be loaded by now.

    Args:
        model: Any `nn.Module`.
        plan: A plan (from `plan_model`, applied as it is), or the recipe to plan with.
        only, skip, include: Glob patterns over module paths, for planning here.
        allow_empty: A plan that converts nothing is fine.
        extra_state: Put FP8 state into `state_dict()` too, one tensor a module under the key
            `<module>._extra_state`, for `torch.save(model.state_dict())`. Off, the keys are the
            stock model's; `fp8patch.save` and `save_pretrained` write a sidecar instead.

    Raises:
        ConversionError: The model can't be converted as it is, or there is nothing to convert.
        PlanError: A pattern matches nothing.
        RecipeError: The recipe can't be loaded.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(
            f"convert_model takes a torch.nn.Module, not {type(model).__name__} ({model!r:.60}). "
            "Load the model first; `fp8patch convert` works on a directory."
        )
    refuse_unsupported(model)
    if isinstance(plan, Plan):
        if only or skip or include:
            raise ConversionError(
                "only, skip and include choose what goes into a plan, and a finished Plan was "
                "given. Pass them to plan_model instead."
            )
    else:
        recipe = Recipe.load(plan)
        plan = plan_model(model, recipe, only=only, skip=skip, include=include)
    decisions = plan.converted()
    gemms = [d for d in decisions if d.kind not in NORM_KINDS]
    if not gemms and not allow_empty:
        raise ConversionError(nothing_to_convert(plan))
    norms = [d.path for d in decisions if d.kind in NORM_KINDS]
    layers = {d.path: plan.recipe_of(d) for d in gemms if d.overrides}
    bank = Bank(plan.recipe, [d.path for d in gemms], norms, layers)
    # All found before one is changed: a plan for another model leaves this one as it is.
    modules = [_submodule(model, decision) for decision in decisions]
    heads = [_submodule(model, d) for d in plan.decisions if gemms and d.aligned_to is not None]
    # (Not one that is sharded already: FSDP has given it a class of its own.)
    heads = [head for head in heads if type(head) is nn.Linear]
    probe = NormProbe()
    forms = [_form(d, module, probe) for d, module in zip(decisions, modules, strict=True)]
    for decision, module, form in zip(decisions, modules, forms, strict=True):
        _convert(module, decision.path, bank, extra_state, form)
    for head in heads:
        head.__class__ = AlignedLinear
        _rebind_forward(head, nn.Linear)
    model.__dict__["_fp8_plan"] = plan
    install()
    parts: list[nn.Module] = [model, *_converted_children(model)]
    for part in parts:
        if not isinstance(part, Float8Module):
            part.__dict__["_fp8_bank"] = bank
            watch_root(part)
    return model


def revert_model(model: _Model) -> _Model:
    """Undo `convert_model`: every module is its stock class again, with the weights as they are.

    Raises:
        ConversionError: Something else has changed the class of a converted module since.
    """
    for path, module in model.named_modules():
        base = getattr(type(module), "_fp8_base", None)
        if base is not None and type(module) not in (AlignedLinear, float8_class(base)):
            raise ConversionError(
                f"{path or 'the model'} is a {type(module).__name__}: its class was changed after "
                "conversion (parametrized, or sharded). Undo that first, then revert."
            )
    for module in model.modules():
        unwatch_root(module)
        base = getattr(type(module), "_fp8_base", None)
        if base is not None:
            was = type(module)
            module.__class__ = base
            _rebind_forward(module, was)
        detach(module)
    return model


def is_converted(model: nn.Module) -> bool:
    """Does `model` hold a converted module?"""
    return any(hasattr(type(module), "_fp8_base") for module in model.modules())


def refuse_unsupported(model: nn.Module) -> None:
    """Raise for what must not be converted, before anything is touched.

    Raises:
        ConversionError: With the reason, and what to do instead.
    """
    if isinstance(model, nn.DataParallel):
        raise ConversionError(
            "the model is wrapped in nn.DataParallel, whose replicas share one set of scales "
            "across threads. Use DistributedDataParallel, one process a GPU: `--nproc N` of "
            "`fp8patch train`, or torchrun."
        )
    if is_converted(model):
        raise ConversionError(
            "the model is already converted. Call fp8patch.revert_model(model) first to convert it "
            "with another recipe."
        )
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None):
        method = getattr(model, "quantization_method", "quantised weights")
        raise ConversionError(
            f"the model's weights are already quantised ({method}). FP8 training needs the "
            "high-precision weights: load the model without a quantization_config."
        )
    for path, module in model.named_modules():
        origin = type(module).__module__
        if origin.startswith("transformer_engine"):
            raise ConversionError(
                f"{path or 'the model'} is a Transformer Engine module ({type(module).__name__}), "
                "which runs in FP8 by its own rules. Convert the model before, or instead."
            )
        if origin.startswith("torchao.float8"):
            raise ConversionError(
                f"{path} was converted by torchao ({type(module).__name__}). Use one of the two."
            )
        if type(module).__name__ == "FullyShardedDataParallel" and not getattr(
            module, "_use_orig_params", True
        ):
            raise ConversionError(
                f"{path or 'the model'} is FSDP1 without original parameters: its weights are "
                "pieces of one flat tensor. Pass use_orig_params=True, or use fully_shard (FSDP2)."
            )
        if origin.startswith("deepspeed"):
            raise ConversionError(
                "the model is wrapped by DeepSpeed, which owns its weights. Use DDP or fully_shard."
            )


def nothing_to_convert(plan: Plan) -> str:
    """What to say where `plan` converts no GEMM: how many are skipped, for which reasons."""
    skipped = Counter(d.code for d in plan.decisions if d.kind in GEMM_KINDS)
    if not skipped:
        return (
            "nothing to convert: the model holds no nn.Linear and no Conv1D. allow_empty=True "
            "(--allow-empty) is for where that is expected."
        )
    listed = ", ".join(f"{count} {code}" for code, count in sorted(skipped.items()))
    return (
        f"nothing to convert: all {skipped.total()} candidates are skipped ({listed}). "
        "`fp8patch plan` shows each reason; include=[PATTERN] (--include PATTERN) overrides most "
        "of them; allow_empty=True (--allow-empty) goes on without FP8."
    )


def _submodule(model: nn.Module, decision: Decision) -> nn.Module:
    try:
        module = model.get_submodule(decision.path)
    except AttributeError as error:
        raise ConversionError(
            f"the plan names {decision.path}, which this model does not have. It was made for "
            "another model: plan again."
        ) from error
    name = stock_class(module).__name__
    if name != decision.class_name:
        raise ConversionError(
            f"{decision.path} is a {name}, and the plan was made for a {decision.class_name}: "
            "plan again."
        )
    return module


def _form(decision: Decision, module: nn.Module, probe: NormProbe) -> NormForm | None:
    """How an RMSNorm computes; None for everything else."""
    if decision.kind != "rmsnorm":
        return None
    form = probe.form(module, stock_class(module))
    if form is None:
        raise ConversionError(
            f"the plan says that {decision.path} is an RMSNorm, and it computes something else "
            "here: plan again."
        )
    return form


def _convert(module: Any, path: str, bank: Bank, extra_state: bool, form: NormForm | None) -> None:
    if type(module).__name__ == "Conv1D":
        from fp8patch.modules import conv1d  # noqa: F401  (imports transformers)
    was = type(module)
    module.__class__ = float8_class(was, None if form is None else norm.Float8RMSNorm)
    attach(module, bank, path, extra_state)
    if form is not None:
        module._fp8_form = form
    _rebind_forward(module, was)


def _rebind_forward(module: Any, was: Any) -> None:
    """Have the instance call the forward of its new class where it holds that of the old one.

    accelerate's hooks keep the old bound forward, call that, and leave it on the instance when they
    are removed.
    """
    for name in ("_old_forward", "forward"):
        if getattr(module.__dict__.get(name), "__func__", None) is was.forward:
            setattr(module, name, types.MethodType(type(module).forward, module))


def _converted_children(model: nn.Module) -> list[nn.Module]:
    ours = Float8Module, norm.Float8Norm, AlignedLinear
    children = [child for child in model.children() if not isinstance(child, ours)]
    return [child for child in children if is_converted(child) and type(child) is not nn.ModuleList]
