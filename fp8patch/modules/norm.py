"""`Float8LayerNorm` and `Float8RMSNorm`: norms that write what the GEMMs after them read.

Under autocast, stock LayerNorm returns FP32, and every cast that follows pays for the width. Where
only GEMMs read the output (pre-LN blocks; the first training step sees it), nothing is lost by
writing the autocast dtype: they would round to it, or to FP8, anyway. Where the output is also the
residual stream (post-LN: BERT) it stays as the stock class writes it, unless the recipe says
`norm_output: bf16`.

On a GPU, eager calls run as one kernel forward, which also makes the cast that the GEMM after it
reads, and one backward. A compiler is given the stock operations instead, which it fuses with the
residual addition and the dropout around them.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fp8patch import regions
from fp8patch.compiler import nothing_compiles, outside_compiler
from fp8patch.input_cache import remember
from fp8patch.modules import ready
from fp8patch.modules.autograd_calls import quick_apply
from fp8patch.modules.base import attach, rebuild, register
from fp8patch.modules.gemms import Quantized
from fp8patch.modules.norm_cast import cast_for_reader
from fp8patch.modules.norm_forms import NormForm
from fp8patch.modules.norm_function import Cast, Normalize, NormSpec
from fp8patch.ops.norm import DTYPES, MAX_COLUMNS, kernels
from fp8patch.recipe import Recipe
from fp8patch.roots import enter_module
from fp8patch.scaling import Bank

# Whether compiled code calls the kernels too. To compare both: set it before anything is compiled.
kernels_in_graphs = False


class Float8Norm(nn.Module):
    """Mixin in front of a stock norm: FP32 statistics and, where that loses nothing, a narrow
    output.

    Outside a region, and for a call with anything besides one tensor, it *is* its stock class.
    """

    _fp8_base: ClassVar[type[nn.Module]]
    _fp8_registered: ClassVar[type[nn.Module]]
    # How an RMSNorm computes; None for a LayerNorm.
    _fp8_form: NormForm | None = None
    _fp8_bank: Bank
    _fp8_path: str
    # None until the bank knows this norm.
    _fp8_narrow: bool | None
    # Path of the module that reads the output.
    _fp8_reader: str | None

    def __init__(self, *args: Any, recipe: Recipe | str | None = None, **kwargs: Any) -> None:
        """As the stock class, plus `recipe`. Conversion does not come through here."""
        super().__init__(*args, **kwargs)
        attach(self, Bank(Recipe.load(recipe), (), [""]), "")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region = regions.active()
        base: Any = self._fp8_base
        # Some RMSNorms take a gate, or skip themselves on a flag.
        if region is None or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return base.forward(self, *args, **kwargs)
        input: Tensor = args[0]
        if not torch.compiler.is_compiling():
            if nothing_compiles() and (call := _recall(self, input, region)) is not None:
                return _run(input, call)
            return _forward_in_eager(self, input, region)
        # What the first step shows is seen in eager only, whoever compiled what; and so is a first
        # use.
        if self._fp8_bank.observation is not None or self._fp8_narrow is None:
            return _forward_in_eager(self, input, region)
        if kernels_in_graphs and (call := _kernel_call(self, input, region)) is not None:
            return Normalize.apply(input, call.weight, call.bias, call.spec)  # type: ignore[no-untyped-call]
        return _stock(self, input)

    def first_use(self, observe: bool) -> None:
        """Meet the bank now: a compiled forward can't."""
        if self._fp8_narrow is None:
            self._fp8_bank.adopt_norm(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has a bank of its own, which has to get to know it.
        state = {**self.__dict__, "_fp8_narrow": None, "_fp8_ready": None}
        state.pop("_compiled_call_impl", None)  # As nn.Module does.
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (self._fp8_registered, self._fp8_base), self.__getstate__()


@register
class Float8LayerNorm(Float8Norm, nn.LayerNorm):
    """`nn.LayerNorm` inside `autocast`: input [..., K] -> [..., K]."""

    _fp8_base = nn.LayerNorm


@register
class Float8RMSNorm(Float8Norm, nn.RMSNorm):
    """`nn.RMSNorm` inside `autocast`; the class of any other RMSNorm is made like this one."""

    _fp8_base = nn.RMSNorm

    def __init__(self, *args: Any, recipe: Recipe | str | None = None, **kwargs: Any) -> None:
        """As the stock class, plus `recipe`. Conversion does not come through here."""
        super().__init__(*args, recipe=recipe, **kwargs)
        known = isinstance(self.eps, float)
        self._fp8_form = NormForm("w", self.eps or 0.0, "weight", "eps" if known else None)


# -- inside a region ------------------------------------------------------------------------------


# `Normalize.apply` where nothing is traced.
_normalize = quick_apply(Normalize)


class _Call(NamedTuple):
    """What `Normalize` is called with."""

    weight: Tensor | None
    bias: Tensor | None
    spec: NormSpec
    cast: Cast | None = None


@outside_compiler
def _forward_in_eager(norm: Any, input: Tensor, region: regions.Region) -> Tensor:
    bank: Bank = norm._fp8_bank
    observe = enter_module(bank, region)
    if norm._fp8_narrow is None:
        bank.adopt_norm(norm)
    # Recomputation shows nothing new, and nobody watches who reads what; nor in an evaluation.
    observation = bank.observation if observe and not region.reopened else None
    call = _kernel_call(norm, input, region)
    if call is None:
        output = _stock(norm, input)
    else:
        if observation is not None:
            # The watcher of torch functions does not see a custom one.
            observation.saw_function("norm", (input,), {})
        elif bank.observation is None:
            cast = cast_for_reader(norm, input, call.spec.dtype, region, observe)
            call = call._replace(cast=cast)
            if observe and not region.reopened and not region.calibrating:
                noted = call.spec, cast, _dtypes(call.weight, call.bias)
                ready.note(norm, input, region, noted)
        output = _run(input, call)
    if observation is not None:
        observation.saw_norm(norm._fp8_path, output)
    return output


def _recall(norm: Any, input: Tensor, region: regions.Region) -> _Call | None:
    """This call, if it is like the one that was noted."""
    noted = ready.recall_any(norm, input, region)
    if noted is None:
        return None
    spec, cast, dtypes = noted.spec
    now = _parameters(norm, input)
    if now is None or not _fits(input, now) or now.eps != spec.eps:
        return None
    if _dtypes(now.weight, now.bias) != dtypes:
        return None
    return _Call(now.weight, now.bias, spec, cast)


def _dtypes(*vectors: Tensor | None) -> list[torch.dtype | None]:
    return [None if vector is None else vector.dtype for vector in vectors]


def _run(input: Tensor, call: _Call) -> Tensor:
    made: list[Quantized] = []
    output: Tensor = _normalize(input, *call, made)
    if made and call.cast is not None:
        remember(output, call.cast.key, made[0])
    return output


def _stock(norm: Any, input: Tensor) -> Tensor:
    output: Tensor = norm._fp8_base.forward(norm, input)
    narrow = _narrow_dtype(norm, input)
    return output if narrow is None else output.to(narrow)


def _narrow_dtype(norm: Any, input: Tensor) -> torch.dtype | None:
    """The autocast dtype where the output may have it."""
    device = input.device.type
    if norm._fp8_narrow and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


class _Parameters(NamedTuple):
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    center: bool
    offset: bool


def _kernel_call(norm: Any, input: Tensor, region: regions.Region) -> _Call | None:
    """None where the call has to run as the stock class."""
    # Calibration may look at the model's own precision.
    if region.execution == "observe" or not _has_kernel(input):
        return None
    found = _parameters(norm, input)
    if found is None or not _fits(input, found):
        return None
    dtype = _narrow_dtype(norm, input) or _stock_dtype(norm, input, found.weight)
    if dtype not in DTYPES:
        return None
    spec = NormSpec(found.eps, found.center, found.offset, dtype)
    return _Call(found.weight, found.bias, spec)


def _has_kernel(input: Tensor) -> bool:
    return input.is_cuda and kernels() is not None


def _parameters(norm: Any, input: Tensor) -> _Parameters | None:
    form: NormForm | None = norm._fp8_form
    if form is None:
        # Over several dimensions, or refused by the stock class.
        if tuple(norm.normalized_shape) != input.shape[-1:]:
            return None
        return _Parameters(norm.weight, norm.bias, float(norm.eps), True, False)
    if form.eps_name is None:
        return None
    eps = float(getattr(norm, form.eps_name))
    return _Parameters(getattr(norm, form.weight), None, eps, False, form.factor == "1 + w")


def _fits(input: Tensor, found: _Parameters) -> bool:
    # Subclasses of Tensor (DTensor, fake tensors) know better how they are normalised.
    if type(input) not in (Tensor, nn.Parameter) or input.dtype not in DTYPES or not input.dim():
        return False
    width = input.shape[-1]
    for vector in found.weight, found.bias:
        if vector is None:
            continue
        same = vector.shape == (width,) and vector.stride() == (1,)
        same = same and vector.device == input.device
        if not same or vector.dtype not in DTYPES or type(vector) not in (Tensor, nn.Parameter):
            return False
    return 0 < width <= MAX_COLUMNS


def _stock_dtype(norm: Any, input: Tensor, weight: Tensor | None) -> torch.dtype | None:
    """What the stock class returns for such an input: asked of it, once for each kind of call.

    Llama's multiplies in the wider of two dtypes, Gemma's returns the input's, `nn.LayerNorm` FP32
    under autocast. None where a compiler meets the first of its kind.
    """
    device = input.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    key = (input.dtype, None if weight is None else weight.dtype, autocast)
    known: dict[Any, torch.dtype] = getattr(norm, "_fp8_dtypes", {})
    if key not in known and not torch.compiler.is_compiling():
        one = input.new_ones((1,) * (input.dim() - 1) + input.shape[-1:])
        with torch.no_grad():
            known[key] = norm._fp8_base.forward(norm, one).dtype
        norm._fp8_dtypes = known
    return known.get(key)
