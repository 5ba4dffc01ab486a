"""Where a forward begins and ends: hooks on the root of a model, and their stand-in without a root.

Whether a forward is a *training* forward is decided once, where the outermost one begins, by
whether gradients are enabled there: reentrant checkpointing runs its blocks without gradients the
first time, and what they see must be observed all the same. `module.training` is not consulted: a
model in eval mode can be trained, and dropout has nothing to do with FP8.
"""

import dataclasses
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fp8patch import input_cache, messages
from fp8patch.backward import arm_backward
from fp8patch.compiler import outside_compiler
from fp8patch.fused_loss import FusedLosses
from fp8patch.observation import WatchReaders
from fp8patch.regions import (
    Region,
    RootCall,
    active,
    canonical,
    close_abandoned,
    new_entry,
    set_region,
    state,
)
from fp8patch.scaling import Bank


def watch_root(root: nn.Module) -> None:
    """Let the calls of `root` mark where a forward begins and ends. `root._fp8_bank` must be set.

    Also for a direct child that holds most of a model: PEFT calls the `forward` of a model that it
    wraps, past the hooks of the root but not past those of its children.

    Both hooks are module-level functions that capture nothing: a closure would make a deep copy of
    the model compute with the original's weights.
    """
    root.register_forward_pre_hook(enter_root)
    root.register_forward_hook(leave_root, always_call=True)


def unwatch_root(root: nn.Module) -> None:
    """Undo `watch_root`."""
    for hooks in (root._forward_pre_hooks, root._forward_hooks):
        for key, hook in list(hooks.items()):
            if hook in (enter_root, leave_root):
                del hooks[key]
                root._forward_hooks_always_called.pop(key, None)


@outside_compiler
def enter_root(root: Any, args: Any) -> None:
    """Forward pre-hook of a converted root."""
    close_abandoned()
    depth = _drop_interrupted()
    region = active()
    bank: Bank = root._fp8_bank
    if region is None:
        if bank.entry == -1 and not state.blocks and torch.is_grad_enabled():
            messages.once(
                "outside",
                f"{type(root).__name__} is converted, but called outside fp8patch.autocast(): it "
                "computes as the stock model. Put the forward inside a `with` block, or run the "
                "script with `fp8patch train`.",
            )
        return
    bank.owners.attach(root)
    if region.reopened or state.roots:
        training = True if region.training is None else region.training
    else:
        training = torch.is_grad_enabled()
        if training or state.trained:
            new_entry(training)
    call = RootCall(root, region, training, depth)
    if not region.reopened:
        if training and region.group is not None and not bank.all_bound and bank.due:
            _bind_all(root, bank)
        again = bank.entry == state.entry
        bank.enter(state.entry, training, region.group)
        if "torch._dynamo" in sys.modules:
            if not bank.all_bound:
                _bind_compiled(root, bank, training)
            if again and not state.roots and (members := list(bank.members())):
                # One more evaluation: other weights may have been loaded since the last one, and
                # what is compiled does not look.
                bank.late.catch_up()
                members[0].refresh_weights(members, training)
        if training and bank.observation is not None and not state.roots:
            call.contexts = _observing(root, bank)
        if training and not state.roots and bank.recipe.loss == "fused":
            losses = FusedLosses(root)
            losses.__enter__()
            call.contexts.append(losses)
    state.roots.append(call)
    if region.training is not training:  # (Not where a root inside another one is called.)
        region = dataclasses.replace(region, training=training)
    set_region(canonical(region))


def _drop_interrupted() -> int:
    """Forget calls that ended without their hook (none is run for a KeyboardInterrupt).

    Returns how many Python frames there are.
    """
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    if state.region is None or not state.region.reopened:
        thread = threading.get_ident()
        while state.roots and state.roots[-1].thread == thread and state.roots[-1].depth >= depth:
            call = state.roots.pop()
            call.close()
            set_region(call.previous)
    return depth


def _bind_all(root: nn.Module, bank: Bank) -> None:
    """Before amax are reduced: what was restored (or copied) is no module's until that is used, and
    a rank that has evaluated by itself has used some that the others have not."""
    gemms = set(bank.paths)
    for module in root.modules():
        ours = getattr(module, "_fp8_bank", None) is bank
        if ours and getattr(module, "_fp8_path", None) in gemms:
            weight: Any = module.weight
            if module._fp8_device != weight.device and weight.device.type != "meta":
                bank.bind(module)


def _bind_compiled(root: nn.Module, bank: Bank, training: bool) -> None:
    """What a compiled block may call before any eager forward did: it can't bind it by itself."""
    for block in root.modules():
        if block._compiled_call_impl is not None:
            for module in block.modules():
                if getattr(module, "_fp8_bank", None) is bank and hasattr(module, "first_use"):
                    first_use: Any = module.first_use
                    first_use(training)


def _observing(root: nn.Module, bank: Bank) -> list[AbstractContextManager[Any]]:
    assert bank.observation is not None
    bank.observation.frugal = any(m._compiled_call_impl is not None for m in root.modules())
    contexts: list[AbstractContextManager[Any]] = [WatchReaders(bank.observation)]
    if "torch._dynamo" in sys.modules:
        contexts.append(torch.compiler.set_stance("force_eager"))
    for context in contexts:
        context.__enter__()
    return contexts


@outside_compiler
def leave_root(root: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a converted root; runs after a failed forward too."""
    if not state.roots or state.roots[-1].root is not root:
        return
    if state.roots[-1].thread != threading.get_ident():
        return  # The stock model, beside a call of it that is running.
    call = state.roots.pop()
    call.close()
    input_cache.forget()
    region = state.region
    set_region(call.previous)
    bank: Any = root._fp8_bank
    bank.late.catch_up()  # (Nothing has asked for a weight.)
    if output is None and sys.exc_info()[0] is not None:
        return  # The forward has raised.
    if call.training and not state.roots and region is not None and not region.reopened:
        if bank.observation is not None:
            bank.observation.saw_result(output)
        armed = arm_backward(output, bank, region)
        if not armed and any(parameter.requires_grad for parameter in root.parameters()):
            messages.once(
                f"output of {type(root)}",
                f"no gradient can reach what {type(root).__name__} returns, so its backward will "
                "not be noticed: return the tensors that the loss is computed from (gradient "
                "checkpointing would recompute without FP8 otherwise).",
            )


@outside_compiler
def enter_module(bank: Bank, region: Region) -> bool:
    """A converted module of `bank` is about to run in eager; returns whether it is observed.

    Most of the time its root has done all this; it has not where a part of the model is called by
    itself, or where a wrapper calls the root's `forward` past its hooks (PEFT does).
    """
    if region.reopened:
        return True
    training = torch.is_grad_enabled() if region.training is None else region.training
    if training and not state.roots and bank.due:
        new_entry(training)
    bank.enter(state.entry, training, region.group)
    bank.late.catch_up()
    if region.calibrating:
        region.banks[bank] = None
    return training or region.calibrating


def read_early() -> None:
    """Weights wait for the first compiled block, but something else that is being compiled reads
    them: quantise them now, and from the next forward on where it begins.
    """
    for call in state.roots:
        bank: Any = call.root._fp8_bank
        if bank.late.waits:
            bank.late.read_early = True
            bank.late.catch_up_while_tracing()


# Run while its caller is traced, and a constant in the graph: no graph break. (As
# torch._dynamo.assume_constant_result does it, which would import the compiler.)
read_early._dynamo_marked_constant = True  # type: ignore[attr-defined]


def inside_root() -> bool:
    """Is a converted root being called (so that its outputs will be armed)?"""
    return bool(state.roots)
