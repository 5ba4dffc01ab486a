"""Find the candidates of a model: what could run in FP8, before anything is decided.

The walk reads classes, shapes and parameter tables. It never calls a module of the model.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fp8patch.modules.norm_forms import NormForm, NormProbe
from fp8patch.plan.types import Kind

__all__ = [
    "CONV1D",
    "Candidate",
    "Place",
    "find_candidates",
    "foreign",
    "kind_of",
    "qualified_name",
    "stock_class",
    "walk",
]

CONV1D = "transformers.pytorch_utils.Conv1D"
# Layers of other low-precision libraries: listed, so that the plan can say why they are left alone.
_FOREIGN_ROOTS = frozenset(
    {
        "torchao",
        "bitsandbytes",
        "transformer_engine",
        "auto_gptq",
        "gptqmodel",
        "awq",
        "hqq",
        "optimum",
        "compressed_tensors",
        "quanto",
    }
)
_EXPERT_NAMES = re.compile(r"(gate_up|gate|up|down|in|out)_proj|w[123]|wi(_[01])?|wo|fc[12]")


@dataclass(frozen=True, slots=True)
class Place:
    """A module and every path it is registered under; the first is the one it is known by."""

    module: nn.Module
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that could run in FP8. N is out_features, K in_features."""

    paths: tuple[str, ...]
    kind: Kind
    module: nn.Module
    stock: type[nn.Module]
    n: int
    k: int
    parameters: tuple[torch.Tensor, ...]
    form: NormForm | None = None

    @property
    def path(self) -> str:
        return self.paths[0]


def qualified_name(cls: type) -> str:
    """`package.module.Class`, by which classes of optional packages are known without an import."""
    return f"{cls.__module__}.{cls.__qualname__}"


def stock_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user's model was written with.

    Looks through our own conversion (`_fp8_base`) and through FSDP2, which changes `Linear` to a
    `FSDPLinear` with the bases (FSDPModule, Linear).
    """
    cls: type[nn.Module] = type(module)
    while True:
        base = cls.__dict__.get("_fp8_base")
        if (
            base is None
            and len(cls.__bases__) > 1
            and cls.__bases__[0].__name__ in ("FSDPModule", "ReplicateModule")
        ):
            base = cls.__bases__[-1]
        if base is None:
            return cls
        cls = base


def foreign(cls: type) -> bool:
    """Whether the class is a layer of another quantisation or FP8 library."""
    root, *rest = cls.__module__.split(".")
    return root in _FOREIGN_ROOTS or (root == "transformers" and rest[:1] == ["integrations"])


def walk(model: nn.Module) -> list[Place]:
    """All modules in the order of `named_modules()`, each once, with all of its paths."""
    paths: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}

    def visit(module: nn.Module, path: str, above: frozenset[int]) -> None:
        key = id(module)
        modules.setdefault(key, module)
        paths.setdefault(key, []).append(path)
        if key in above:  # a module that contains itself: its paths would never end
            return
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name, above | {key})

    visit(model, "", frozenset())
    return [Place(module, tuple(paths[key])) for key, module in modules.items()]


def find_candidates(places: list[Place]) -> list[Candidate]:
    """Every candidate, in the order of the walk."""
    probe = NormProbe()
    found: list[Candidate] = []
    for place in places:
        stock = stock_class(place.module)
        found.extend(_module_candidate(place, stock, probe))
        found.extend(_experts(place, stock))
    return found


def _module_candidate(
    place: Place, stock: type[nn.Module], probe: NormProbe
) -> Iterator[Candidate]:
    module = place.module
    shape = _shape(module, stock)
    if shape is not None:
        kind, n, k = shape
        # An MHA's out_proj is a module of its own; everything else owns what is below it, such as
        # the originals of a parametrized weight.
        parameters = tuple(module.parameters(recurse=kind != "mha"))
        yield Candidate(place.paths, kind, module, stock, n, k, parameters)
        return
    vectors = _vectors(module)
    if not vectors:
        return
    width = vectors[0].numel()
    named = "RMSNorm" in stock.__name__
    form = probe.form(module, stock)
    if form is not None or named:
        yield Candidate(place.paths, "rmsnorm", module, stock, width, width, vectors, form)
    elif "LayerNorm" in stock.__name__:
        yield Candidate(place.paths, "norm", module, stock, width, width, vectors)


def _vectors(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """The parameters of a childless module, where all of them are vectors."""
    parameters = tuple(p for p in module._parameters.values() if p is not None)
    if module._modules or any(_dims(p) != 1 for p in parameters):
        return ()
    return parameters


def _dims(parameter: torch.Tensor) -> int:
    """0 for what a lazy module has not shaped yet, and cannot be asked."""
    return 0 if isinstance(parameter, nn.parameter.UninitializedParameter) else parameter.dim()


def _shape(module: nn.Module, stock: type[nn.Module]) -> tuple[Kind, int, int] | None:
    """(kind, N, K) of a module known by its class, or None."""
    if issubclass(stock, nn.LayerNorm):
        width = 1
        for size in module.normalized_shape:  # type: ignore[union-attr]
            width *= int(size)
        return "norm", width, width
    if issubclass(stock, nn.MultiheadAttention):
        width = int(module.embed_dim)  # type: ignore[arg-type]
        return "mha", 3 * width, width
    if any(qualified_name(base) == CONV1D for base in stock.__mro__):
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            return "conv1d", int(weight.shape[1]), int(weight.shape[0])
    elif issubclass(stock, nn.Linear) or foreign(stock):
        n, k = getattr(module, "out_features", None), getattr(module, "in_features", None)
        if isinstance(n, int) and isinstance(k, int):
            return "linear", n, k
    return None


def kind_of(module: nn.Module, probe: NormProbe) -> Kind | None:
    """What `module` is to a plan, by its class or by what it computes; None for neither."""
    stock = stock_class(module)
    shape = _shape(module, stock)
    if shape is None:
        return None if probe.form(module, stock) is None else "rmsnorm"
    return shape[0]


def _experts(place: Place, stock: type[nn.Module]) -> Iterator[Candidate]:
    """The 3-D parameters that hold one matrix per expert: [E, N, K], or [E, K, N] where so marked.

    A 3-D parameter alone says little: XLNet's projections, Funnel's r_kernel and convolution
    kernels are 3-D too. So the owner, or a module around it, has to be called expert or MoE.
    """
    if stock.__module__.split(".")[0] == "torch":
        return
    path = place.paths[0]
    said = re.search(r"experts?\b|moe", f"{path.rsplit('.', 1)[-1]} {stock.__name__}", re.I)
    for name, parameter in place.module._parameters.items():
        if parameter is None or _dims(parameter) != 3 or 1 in parameter.shape:
            continue
        if not said and not (_EXPERT_NAMES.fullmatch(name) and "expert" in path.lower()):
            continue
        n, k = _expert_shape(place.module, name, parameter)
        paths = tuple(f"{p}.{name}" if p else name for p in place.paths)
        yield Candidate(paths, "experts", place.module, stock, n, k, (parameter,))


def _expert_shape(owner: nn.Module, name: str, parameter: torch.Tensor) -> tuple[int, int]:
    """(N, K) of one expert. What goes down to the hidden width has it as N, the rest as K."""
    _, a, b = (int(size) for size in parameter.shape)
    if getattr(owner, "is_transposed", None) is True:
        return b, a
    hidden = next(
        (
            v
            for key in ("hidden_size", "hidden_dim", "d_model")
            if isinstance(v := getattr(owner, key, None), int)
        ),
        None,
    )
    goes_down = name.startswith(("down", "w2", "wo", "out", "fc2"))
    transposed = hidden is not None and a != b and hidden == (b if goes_down else a)
    return (b, a) if transposed else (a, b)
