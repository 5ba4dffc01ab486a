"""Who runs in a benchmark: names, what each is, and how it changes the workload's model.

All train the same model code on the same batch. What is in FP8 is decided once, by our plan, and
every FP8 contender converts that list of Linears; only `ours-head-bf16` leaves the head out, and
`ours-norm-bf16` lets every norm write BF16, as Transformer Engine's do.
"""

import contextlib
import difflib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fp8patch.amp import autocast
from fp8patch.bench.gpt import GptLayers
from fp8patch.bench.workloads import Workload
from fp8patch.blocks.compiled import compile_blocks
from fp8patch.convert import convert_model
from fp8patch.errors import Fp8PatchError
from fp8patch.plan.model import Plan, plan_model
from fp8patch.plan.step import step_gain
from fp8patch.recipe import Recipe

__all__ = [
    "BASE", "CONTENDERS", "DEFAULT", "Contender", "Mode", "Prepared", "best_of", "expand", "prepare"
]  # fmt: skip

Family = Literal["bf16", "ours", "torchao", "te-swap", "te-layer"]
Mode = Literal["eager", "compile", "graphs"]

# Ratios are to this one; every group of contenders that run side by side has it.
BASE = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to train.

    Attributes:
        name: As `--contenders` takes it.
        family: Whose FP8; `bf16` is none.
        mode: Eager, blocks compiled, or compiled under CUDA graphs.
        recipe: torchao's recipe; ours and Transformer Engine's are delayed scaling.
        head: Convert heads that can be; otherwise they stay in BF16.
        norm_output: As a recipe has it, for ours.
        group: The contender that this is a variant of: the best of a group stands for it.
    """

    name: str
    family: Family
    mode: Mode = "eager"
    recipe: str = "delayed"
    head: bool = True
    norm_output: Literal["auto", "bf16"] = "auto"
    group: str | None = None


_TORCHAO: tuple[tuple[str, Mode], ...] = (("torchao", "compile"), ("torchao-graphs", "graphs"))

CONTENDERS: dict[str, Contender] = {
    entry.name: entry
    for entry in (
        Contender(name=BASE, family="bf16"),
        Contender(name="bf16-compile", family="bf16", mode="compile"),
        Contender(name="bf16-graphs", family="bf16", mode="graphs"),
        Contender(name="fp8", family="ours"),
        Contender(name="fp8-compile", family="ours", mode="compile"),
        Contender(name="fp8-graphs", family="ours", mode="graphs"),
        Contender(name="ours-head-bf16", family="ours", mode="compile", head=False),
        Contender(name="ours-norm-bf16", family="ours", mode="compile", norm_output="bf16"),
        Contender(name="ours-norm-bf16-graphs", family="ours", mode="graphs", norm_output="bf16"),
        *(
            Contender(
                name=f"{group}-{recipe}", family="torchao", mode=mode, recipe=recipe, group=group
            )
            for group, mode in _TORCHAO
            for recipe in ("tensorwise", "rowwise")
        ),
        Contender(name="te-swap", family="te-swap", group="te"),
        Contender(name="te-layer", family="te-layer", group="te"),
    )
}
_GROUPS = tuple(dict.fromkeys(c.group for c in CONTENDERS.values() if c.group))
DEFAULT = ("bf16", "bf16-compile", "bf16-graphs", "fp8", "fp8-compile", "fp8-graphs")
_LAYER_BUILDERS = ("gpt-4096", "vit-huge")


def expand(names: Sequence[str], workload: Workload) -> list[Contender]:
    """The contenders of these names, `bf16` first, groups (`torchao`, `te`) as their variants.

    Raises:
        Fp8PatchError: A name that is none.
    """
    chosen: dict[str, Contender] = {BASE: CONTENDERS[BASE]}
    for name in names:
        if name in CONTENDERS:
            chosen[name] = CONTENDERS[name]
        elif name in _GROUPS:
            chosen.update({c.name: c for c in CONTENDERS.values() if c.group == name})
            if workload.name not in _LAYER_BUILDERS:
                chosen.pop("te-layer", None)
        else:
            allowed = [*CONTENDERS, *_GROUPS]
            close = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise Fp8PatchError(
                f"no contender named {name!r}.{hint} Allowed: {', '.join(sorted(allowed))}."
            )
    return list(chosen.values())


def best_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each group, the fastest of its variants under the group's name."""
    best = []
    for group in _GROUPS:
        ran = [
            row
            for row in rows
            if row["step_ms"] is not None and CONTENDERS[row["contender"]].group == group
        ]
        if ran:
            fastest = min(ran, key=lambda row: float(row["step_ms"]))
            best.append({**fastest, "contender": group, "best_of": fastest["contender"]})
    return best


@dataclass(slots=True)
class Prepared:
    """A model made ready for one contender.

    Attributes:
        region: Opens what the forward runs in, besides BF16 autocast.
        before_step: What has to be called before each step.
        converted: GEMM modules in FP8.
        predicted: What our plan says that FP8 gains in a step, run in the same mode, ours or not;
            None for an unknown GPU.
        left_eager: Blocks that were not compiled after all, and why.
    """

    model: nn.Module
    region: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    before_step: Callable[[], None] = lambda: None
    converted: int = 0
    predicted: float | None = None
    left_eager: Callable[[], dict[str, str]] = dict


def prepare(contender: Contender, workload: Workload, model: nn.Module, device: str) -> Prepared:
    """Convert and compile `model` as `contender` does.

    Raises:
        Fp8PatchError: Its library is not installed, or it has nothing to do on this model.
    """
    if contender.family == "bf16":
        prepared = Prepared(model)
    elif contender.family == "te-layer":
        from fp8patch.bench.te import replace_layers

        prepared = Prepared(*replace_layers(model))
    else:
        prepared = _convert(contender, workload, model, device)
    if contender.mode != "eager":
        _compile(prepared, contender)
    return prepared


def _convert(contender: Contender, workload: Workload, model: nn.Module, device: str) -> Prepared:
    include = workload.include if contender.head else ()
    recipe = Recipe(norm_output=contender.norm_output)
    plan = plan_model(model, recipe, include=include, tokens=workload.tokens)
    paths = [d.path for d in plan.converted() if d.kind in ("linear", "conv1d")]
    how: Literal["eager", "compiled"] = "eager" if contender.mode == "eager" else "compiled"
    predicted = step_gain(plan, how, workload.optimizer)
    if contender.family == "ours":
        if not contender.head and not _leaves_out_a_head(plan, model, workload):
            raise Fp8PatchError("no head of this model can run in FP8: the same as fp8-compile.")
        convert_model(model, plan)
        backend: Any = "fp8" if device == "cuda" else "emulate"
        return Prepared(model, lambda: autocast(backend=backend), _nothing, len(paths), predicted)
    if contender.family == "torchao":
        count = _torchao(model, set(paths), contender.recipe)
        return Prepared(model, contextlib.nullcontext, _nothing, count, predicted)
    from fp8patch.bench.te import region, swap

    return Prepared(model, region, _nothing, swap(model, set(paths)), predicted)


def _nothing() -> None:
    """What most contenders do before a step."""


def _leaves_out_a_head(plan: Plan, model: nn.Module, workload: Workload) -> bool:
    everything = plan_model(model, include=workload.include, tokens=workload.tokens)
    return len(everything.converted()) > len(plan.converted())


def _torchao(model: nn.Module, paths: set[str], recipe: str) -> int:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise Fp8PatchError(
            f"torchao is not installed ({error}). pip install torchao, or leave it out of "
            "--contenders."
        ) from None
    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda module, path: path in paths,
    )
    return sum(type(module).__name__ == "Float8Linear" for module in model.modules())


def _compile(prepared: Prepared, contender: Contender) -> None:
    """Compile the repeated blocks, as a user of this package does, or with torch alone for peers.

    Raises:
        Fp8PatchError: There are none.
    """
    graphs = contender.mode == "graphs"
    blocks = _blocks(prepared.model)  # for its error, too
    if contender.family in ("bf16", "ours"):
        compiled = compile_blocks(prepared.model, cuda_graphs=graphs)
        prepared.left_eager = lambda: dict(compiled.left)
    else:
        for block in blocks:
            block.compile(mode="reduce-overhead" if graphs else None)
        if graphs:
            prepared.before_step = torch.compiler.cudagraph_mark_step_begin


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of every stack of layers, innermost: what is compiled on its own."""
    if isinstance(model, GptLayers):
        return list(model.layers)
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    repeated = [s for s in stacks if len(s) > 1 and len({type(child) for child in s}) == 1]
    layers = [layer for stack in repeated for layer in stack if not _is_leaf(layer)]
    outer = {id(layer) for layer in layers for inner in layer.modules() if inner in repeated}
    innermost = [layer for layer in layers if id(layer) not in outer]
    if not innermost:
        raise Fp8PatchError("this model has no repeated layers to compile one by one.")
    return innermost


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None
