"""The rules that decide about one candidate, in their order; the first that applies gives the code.

First what the user chose, then what cannot be converted at all, then what is better left alone
(which `include` lifts), then alignment (which nothing lifts), then the predicted gain.
N is out_features, K in_features.
"""

import re
from dataclasses import dataclass

import torch
from torch import nn

from fp8patch.plan.patterns import Selection, logical_path
from fp8patch.plan.types import NORM_KINDS, Action
from fp8patch.plan.walk import CONV1D, Candidate, Place, foreign, qualified_name
from fp8patch.recipe import Recipe

__all__ = ["ALIGNMENT", "Facts", "Verdict", "decide", "gather_facts", "padded"]

# FP8 tensor cores take rows of 16 bytes: cuBLASLt and torch's scaled GEMM refuse other N and K.
ALIGNMENT = 16
# A head of fewer outputs than one tile is a classifier, a box or a value, whatever it is called.
_SMALL = 16
# What FP8 copies are made from; autocast leaves FP64 alone, and so does a converted module.
_CONVERTIBLE = (torch.float32, torch.bfloat16, torch.float16)

# Subclasses that were read, and compute what their base does.
_DROP_IN = frozenset(
    {
        "transformers.models.falcon.modeling_falcon.FalconLinear",
        "timm.layers.norm.LayerNorm",
        "timm.layers.LayerNorm",
        CONV1D,
    }
)
_HEAD_LEAVES = frozenset(
    "lm_head embed_out vocab_projector proj_out lm_loss generator_lm_head output_projection output "
    "decoder head logits to_logits predictions".split()
)
_HEAD_PARTS = frozenset({"lm_head", "lm_heads", "predictions"})
_CLASSIFIER = re.compile(
    r".*classifier|scores?|.*_predictor|qa_outputs|.*_output|.*_head|head|head_dist|fc|regression"
    r"|seq_relationship|logits_proj|summary"
)
_ROUTER = re.compile(r"(.*_)?routers?|gate|gating|shared_expert_gate")
_LORA = re.compile(r"lora_.*")
_FACTORS = {"w": "w", "1 + w": "(1 + w)"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about one candidate: action, reason code and sentence."""

    action: Action
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What only the whole model can tell; modules and parameters by `id`."""

    heads: frozenset[int]
    embeddings: dict[int, str]
    vocabularies: frozenset[int]
    labels: frozenset[int]
    attention_children: frozenset[int]
    keep_in_fp32: tuple[tuple[str, re.Pattern[str]], ...]
    last_linear: int | None


def gather_facts(places: list[Place], candidates: list[Candidate]) -> Facts:
    """Read heads, embeddings, vocabulary and label counts, and precision islands off the model."""
    heads: set[int] = set()
    embeddings: dict[int, str] = {}
    sizes: dict[str, set[int]] = {"vocab_size": set(), "num_labels": set(), "num_classes": set()}
    children: set[int] = set()
    islands: list[tuple[str, re.Pattern[str]]] = []
    for place in places:
        module, path = place.module, place.paths[0]
        heads.update(_output_embeddings(module))
        if isinstance(module, nn.Embedding):
            embeddings.setdefault(id(module._parameters.get("weight")), path)
        if isinstance(module, nn.MultiheadAttention):
            children.update(id(child) for child in module.children())
        config = vars(module).get("config")
        for name, found in sizes.items():
            values = (vars(module).get(name), getattr(config, name, None))
            found.update(v for v in values if isinstance(v, int) and not isinstance(v, bool))
        islands.extend((path, pattern) for pattern in _fp32_names(module))
    linears = [c for c in candidates if c.kind in ("linear", "conv1d")]
    labels = sizes["num_labels"] | sizes["num_classes"]
    return Facts(
        heads=frozenset(heads),
        embeddings=embeddings,
        vocabularies=frozenset(sizes["vocab_size"]),
        # Detection models add a class for "nothing here".
        labels=frozenset(labels | {n + 1 for n in labels}),
        attention_children=frozenset(children),
        keep_in_fp32=tuple(islands),
        last_linear=id(linears[-1].module) if linears else None,
    )


def decide(
    candidate: Candidate, facts: Facts, selection: Selection, recipe: Recipe, *, meta: bool
) -> Verdict:
    """The verdict on one candidate, but for the predicted gain."""
    pattern = selection.skipped_by(candidate.paths)
    if pattern is not None:
        return Verdict("skip", "pattern", f'skipped by the pattern "{pattern}"')
    if not selection.selects(candidate.paths):
        return Verdict("skip", "not_selected", "no --only pattern selects it")
    found = _impossible(candidate, facts, meta=meta)
    if found is not None:
        return Verdict("skip", *found)
    advised = None if selection.includes(candidate.paths) else _inadvisable(candidate, facts)
    crooked = _misaligned(candidate)
    if advised is not None:
        code, reason = advised
        # Said here too: lifting the first reason would only bring up the second one.
        second = crooked and code != "classifier" and recipe.misaligned == "skip"
        also = f"; and {crooked}" if second else ""
        return Verdict("skip", code, reason + also)
    if crooked and recipe.misaligned == "skip":
        fix = 'Set "misaligned: pad" in the recipe to convert it with padding'
        return Verdict("skip", "misaligned", f"{crooked}. {fix}")
    code = "hooked" if "_old_forward" in vars(candidate.module) else "ok"
    return Verdict("convert", code, _converted(candidate, crooked is not None))


def padded(size: int) -> int:
    """`size` rounded up to what FP8 GEMMs take."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _converted(candidate: Candidate, pad: bool) -> str:
    if candidate.kind in NORM_KINDS:
        what = "keeps its arithmetic; its output is made for the FP8 GEMM that reads it"
        if candidate.form is None:
            return what
        return f"RMSNorm (x / rms(x) * {_FACTORS[candidate.form.factor]}): {what}"
    if pad:
        shape = f"{padded(candidate.n)} x {padded(candidate.k)}"
        return f"runs in FP8, its weight padded to {shape} inside the FP8 copy"
    if candidate.kind == "conv1d":
        return "runs in FP8, its weight read as [in, out]"
    return "runs in FP8"


def _impossible(candidate: Candidate, facts: Facts, *, meta: bool) -> tuple[str, str] | None:
    """Why the module cannot be converted, whatever the user says."""
    module, stock = candidate.module, candidate.stock
    name = stock.__name__
    if foreign(stock) or any(_quantized(p) for p in candidate.parameters):
        return "quantized", f"{name} holds quantised weights or runs in another FP8 library"
    norm = candidate.kind == "rmsnorm"
    if candidate.kind in ("mha", "experts") or (norm and candidate.form is None):
        return "unsupported", _unsupported(candidate)
    wide = next((p.dtype for p in candidate.parameters if p.dtype not in _CONVERTIBLE), None)
    if wide is not None:
        return "dtype", (
            f"{str(wide).removeprefix('torch.')} weights stay as they are; FP8 takes float32, "
            "bfloat16 and float16"
        )
    if not norm and ("parametrizations" in module._modules or "weight" not in module._parameters):
        return "parametrized", (
            "its weight is no plain Parameter of the module (parametrized, weight-normed, pruned "
            "or flattened)"
        )
    if id(module) in facts.attention_children:
        return "bypassed", "nn.MultiheadAttention reads its weight and never calls it"
    known = norm or stock in (nn.Linear, nn.LayerNorm) or qualified_name(stock) in _DROP_IN
    if not known:
        base = {"linear": nn.Linear, "norm": nn.LayerNorm}.get(candidate.kind)
        if base is not None and not issubclass(stock, base):
            return "unsupported", f"{name} is a norm of its own kind, not nn.LayerNorm"
        base_name = base.__name__ if base is not None else "Conv1D"
        return "subclass", f"{name} is a subclass of {base_name} and may compute something else"
    replaced = vars(module).get("forward")
    if replaced is not None and not _is_hooked(module, stock):
        return "instance_forward", (
            "its forward was replaced on the instance (kernelize, or a patch), so that a converted "
            "class would never be called"
        )
    if not meta and any(p.device.type == "meta" for p in candidate.parameters):
        return "meta_weight", "its weights are on the meta device: load or materialise them first"
    if not candidate.n * candidate.k:
        return "empty", "its weight has no elements, so there is nothing to compute"
    return None


def _unsupported(candidate: Candidate) -> str:
    if candidate.kind == "mha":
        return "nn.MultiheadAttention runs a fused function of its own, which stays in BF16"
    if candidate.kind == "experts":
        count = candidate.parameters[0].shape[0]
        return f"{count} experts in one 3-D Parameter: grouped FP8 GEMMs do not exist here yet"
    return "named an RMSNorm, but computes more than x / rms(x) times its weight"


def _inadvisable(candidate: Candidate, facts: Facts) -> tuple[str, str] | None:
    """Why the module is better left alone; `include` overrules each of these."""
    island = _island(candidate, facts)
    if candidate.kind in NORM_KINDS:
        return island
    parts = logical_path(candidate.path).split(".")
    if any(_LORA.fullmatch(part) for part in parts):
        return "lora", "LoRA adapter: too small to gain, and all that trains"
    head = _head(candidate, facts, parts)
    if head is not None:
        return head
    if any(_ROUTER.fullmatch(part) for part in parts):
        return "router", "router or gate: rounding would change which experts are chosen"
    return island or _classifier(candidate, facts, parts)


def _head(candidate: Candidate, facts: Facts, parts: list[str]) -> tuple[str, str] | None:
    embedding = facts.embeddings.get(id(candidate.module._parameters.get("weight")))
    if embedding is not None:
        return "tied_head", f"output head: shares its weight with the embedding {embedding}"
    vocabulary = candidate.n in facts.vocabularies
    named = parts[-1] in _HEAD_LEAVES and vocabulary
    inside = bool(_HEAD_PARTS & set(parts)) and (vocabulary or candidate.k in facts.vocabularies)
    if id(candidate.module) in facts.heads or named or inside or parts[-1] == "lm_head":
        return "head", "output head: its logits need more digits than FP8 has"
    return None


def _classifier(candidate: Candidate, facts: Facts, parts: list[str]) -> tuple[str, str] | None:
    small, labels = candidate.n < _SMALL, candidate.n in facts.labels
    named = any(_CLASSIFIER.fullmatch(part) for part in parts)
    # Inside a repeated block it is no head, however small: wavlm's gru_rel_pos_linear, for one.
    alone = not any(part.isdigit() for part in parts)
    last = id(candidate.module) == facts.last_linear
    if named and (small or labels) or (alone and labels and last):
        return "classifier", f"task head: {candidate.n} outputs, small and sensitive to rounding"
    if alone and small:
        return "classifier", f"only {candidate.n} outputs: too small to gain, and no repeated block"
    return None


def _island(candidate: Candidate, facts: Facts) -> tuple[str, str] | None:
    for prefix, pattern in facts.keep_in_fp32:
        inner = candidate.path.removeprefix(f"{prefix}.") if prefix else candidate.path
        if (not prefix or inner != candidate.path) and pattern.search(f"{inner}.weight"):
            return "keep_in_fp32", "the model keeps it in FP32 (_keep_in_fp32_modules)"
    return None


def _misaligned(candidate: Candidate) -> str | None:
    """What is wrong with the shape for an FP8 GEMM, as a clause."""
    if candidate.kind not in ("linear", "conv1d"):
        return None
    wrong = [
        f"{label}={size}"
        for label, size in (("out_features", candidate.n), ("in_features", candidate.k))
        if size % ALIGNMENT
    ]
    if not wrong:
        return None
    verb = "is not a multiple" if len(wrong) == 1 else "are not multiples"
    return f"{' and '.join(wrong)} {verb} of {ALIGNMENT}, as FP8 GEMMs require"


def _quantized(parameter: torch.Tensor) -> bool:
    # Not FP64 nor complex numbers, which nobody quantises to: those are of another dtype.
    plain = (*_CONVERTIBLE, torch.float64, torch.complex64, torch.complex128)
    # FSDP's DTensor is a plain weight, cut in pieces; torchao's subclasses are not.
    return parameter.dtype not in plain or foreign(type(parameter))


def _is_hooked(module: nn.Module, stock: type[nn.Module]) -> bool:
    """Whether what the instance calls in the end is its class's own forward, which can be rebound.

    accelerate puts a hook around it, and leaves it on the instance when the hook is removed.
    """
    held = (vars(module).get(name) for name in ("_old_forward", "forward"))
    functions = [getattr(method, "__func__", None) for method in held]
    return type(module).forward in functions or stock.forward in functions


def _output_embeddings(module: nn.Module) -> list[int]:
    if getattr(type(module), "get_output_embeddings", None) is None:
        return []
    try:
        head = module.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return []
    if isinstance(head, nn.ModuleList):
        return [id(child) for child in head]
    return [id(head)] if isinstance(head, nn.Module) else []


def _fp32_names(module: nn.Module) -> list[re.Pattern[str]]:
    """The names that a transformers model keeps in FP32, matched as whole path components."""
    names: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        value = getattr(module, attribute, None)
        if isinstance(value, list | tuple | set | frozenset):
            names.update(name for name in value if isinstance(name, str))
    return [re.compile(rf"(^|\.){re.escape(name)}($|\.)") for name in sorted(names)]
