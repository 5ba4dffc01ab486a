"""What every converted GEMM module shares: stock behaviour outside a region, FP8 inside.

Conversion changes the class of the module object and adds plain attributes, all named `_fp8_*`; no
Parameter is touched. Outside a region, and for an input that FP8 can't take, the module *is* its
stock class.
"""

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8patch import amp, messages
from fp8patch.errors import HardwareError
from fp8patch.modules.gemms import Float8Gemms, GemmSpec, Quantized, cast, cast_input
from fp8patch.ops.quantize import ALIGNMENT
from fp8patch.recipe import Recipe
from fp8patch.scaling import Bank
from fp8patch.slots import GRAD_OUTPUT, INPUT, WEIGHT, SlotState, grad_is_e5m2, limit

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Dropped from a pickle and a deep copy; the first use makes them anew. Views cut from their bank by
# a pickle would be frozen for good without a word.
_RUNTIME = (
    "_fp8_input_slot",
    "_fp8_weight_slot",
    "_fp8_grad_slot",
    "_fp8_device",
    "_fp8_weight_q",
    "_fp8_weight_key",
)
_EXTRA = "_extra_state"


class Float8Module(nn.Module):
    """Mixin in front of a stock class with a `weight` and a `bias`.

    `_fp8_base` is the stock class; `_fp8_in_out` says that its weight is [in, out].
    """

    _fp8_base: ClassVar[type[nn.Module]]
    _fp8_in_out: ClassVar[bool] = False
    weight: Any
    bias: Any

    _fp8_bank: Bank
    _fp8_path: str
    _fp8_extra_state: bool

    def __init__(self, *args: Any, recipe: Recipe | str | None = None, **kwargs: Any) -> None:
        """As the stock class, plus `recipe`. Conversion does not come through here."""
        super().__init__(*args, **kwargs)
        attach(self, Bank(Recipe.load(recipe), [""]), "")

    def forward(self, input: Tensor) -> Tensor:
        region = amp.active()
        if region is None:
            return stock_forward(self, input)  # type: ignore[no-any-return]
        return _forward_in_region(self, input, region)

    def refresh_weight(self, observe: bool) -> None:
        """Quantise the weight again if it is out of date and was ever used.

        Under FSDP, or offloaded to meta by a hook, there is no whole weight here: that happens in
        each forward.
        """
        whole = type(self.weight) in (nn.Parameter, Tensor) and not self.weight.is_meta
        if self._fp8_weight_q is not None and whole:
            prepare(self, observe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self._fp8_bank.recipe.name}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **fresh_runtime()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By base class: a class made for an allowlisted base has no importable name.
        return rebuild, (self._fp8_base,), self.__getstate__()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._fp8_extra_state:
            destination[prefix + _EXTRA] = pack_state(self)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        packed = state_dict.pop(prefix + _EXTRA, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._fp8_weight_stale, self._fp8_weight_key = True, None
        if packed is not None:
            unpack_state(self, packed)


def attach(module: Any, bank: Bank, path: str, extra_state: bool = False) -> None:
    """Give a module of a Float8 class what it needs besides its Parameters."""
    module.__dict__.update(fresh_runtime())
    module._fp8_bank, module._fp8_path, module._fp8_extra_state = bank, path, extra_state


def detach(module: Any) -> None:
    """Remove everything that `attach` and use have left."""
    for name in [name for name in module.__dict__ if name.startswith("_fp8_")]:
        del module.__dict__[name]


def fresh_runtime() -> dict[str, Any]:
    """The attributes of a module that no bank has bound yet."""
    return {
        **dict.fromkeys(_RUNTIME),
        "_fp8_narrow": None,
        "_fp8_weight_stale": True,
        "_fp8_weight_owned": False,
    }


def rebuild(base: type[nn.Module]) -> nn.Module:
    """An empty converted module over the stock class `base`, for unpickling and deep copies."""
    module: nn.Module = base.__new__(base)
    module.__class__ = float8_class(base)
    return module


_REGISTERED: dict[type[nn.Module], type[nn.Module]] = {}


def register(cls: type[Any]) -> type[Any]:
    """Class decorator: `cls` is what its `_fp8_base` converts to."""
    _REGISTERED[cls._fp8_base] = cls
    return cls


def float8_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class that modules of exactly class `base` are given; made once for a subclass.

    Raises:
        StopIteration: `base` is nothing that can be converted; the plan never says so.
    """
    if base not in _REGISTERED:
        mixin = next(cls for known, cls in _REGISTERED.items() if issubclass(base, known))
        front = mixin.__bases__[0]
        _REGISTERED[base] = type(f"Float8{base.__name__}", (front, base), {"_fp8_base": base})
    return _REGISTERED[base]


def stock_forward(module: Any, *args: Any) -> Any:
    """The forward of the module's stock class."""
    return module._fp8_base.forward(module, *args)


# -- inside a region ------------------------------------------------------------------------------


def _forward_in_region(module: Any, input: Tensor, region: amp.Region) -> Tensor:
    recipe: Recipe = module._fp8_bank.recipe
    precision = region.recipe or recipe
    observe = region.training is True or region.calibrating or region.reopened
    if not torch.compiler.is_compiling():
        if refusal(module, input, region, precision):
            return stock_forward(module, input)  # type: ignore[no-any-return]
        observe = amp.enter_module(module._fp8_bank, region)
        prepare(module, observe, region.calibrating)
        observation = module._fp8_bank.observation
        if observation is not None and observe:
            observation.saw_input(module._fp8_path, input)
            observation.entering_module()
            try:
                return _run(module, input, region, precision, observe)
            finally:
                observation.leaving_module()
    return _run(module, input, region, precision, observe)


def _run(
    module: Any, input: Tensor, region: amp.Region, precision: Recipe, observe: bool
) -> Tensor:
    spec = make_spec(module, input, region, precision, observe)
    rows = input.reshape(-1, input.shape[-1])
    if region.execution == "observe":
        cast_input(rows, module._fp8_input_slot, spec, False)
        return stock_forward(module, input)  # type: ignore[no-any-return]
    output: Tensor = Float8Gemms.apply(  # type: ignore[no-untyped-call]
        rows,
        module.weight,
        module.bias,
        module._fp8_weight_q,
        module._fp8_input_slot,
        module._fp8_grad_slot,
        spec,
    )
    if input.dim() != 2:
        # As nn.Linear: its output is no view, so that the caller may edit it in place.
        shape = [*input.shape[:-1], output.shape[-1]]
        output = torch.ops.aten._unsafe_view.default(output, shape)
    if observe and not region.reopened and not torch.compiler.is_compiling():
        if not amp.inside_root():
            amp.arm_backward(output, module._fp8_bank, region)
    return output


def refusal(module: Any, input: Tensor, region: amp.Region, precision: Recipe) -> bool:
    """Must this call run as the stock class? Says why, once a module, where the user can't know."""
    path, weight = module._fp8_path, module.weight
    device = input.device.type
    if (precision.fprop, precision.dgrad, precision.wgrad) == ("bf16", "bf16", "bf16"):
        return True
    # Whatever the stock class would refuse, or compute in FP64, is its own business.
    if input.dtype not in _FLOATS or weight.dtype not in _FLOATS or input.dim() == 0:
        return True
    if device == "meta":
        return True
    k, n = weight.shape if module._fp8_in_out else weight.shape[::-1]
    if input.shape[-1] != k or input.device != weight.device:
        return True
    if not torch.is_autocast_enabled(device) and input.dtype != weight.dtype:
        return True
    if (k % ALIGNMENT or n % ALIGNMENT) and module._fp8_bank.recipe.misaligned == "skip":
        messages.once(
            f"misaligned {path} {n} {k}",
            f"{path}: out_features={n}, in_features={k} is no longer a multiple of 16 (resized "
            "after conversion?), so it runs in the model's own precision. A recipe with "
            "`misaligned: pad` keeps it in FP8.",
        )
        return True
    if module._fp8_bank.recipe.scaling == "rowwise" and not region.rowwise:
        lacks = "this GPU has no FP8 GEMM with one scale a row (that needs compute capability 9.0)"
        if region.strict:
            raise HardwareError(
                f"{path}: backend='fp8' was asked for with a rowwise recipe, but {lacks}. Convert "
                "with the recipe 'delayed' or 'current', or use backend='emulate'."
            )
        messages.once("no rowwise", f"FP8 is off: {lacks}; 'delayed' and 'current' run here.")
        return True
    if region.execution == "fp8" and device != "cuda":
        if region.strict:
            raise HardwareError(
                f"{path}: backend='fp8' was asked for, but the module is on {input.device}. Move "
                "the model to a CUDA device, or use backend='emulate'."
            )
        messages.once(
            "fp8 off device", f"{path} is on {input.device}: it runs in its own precision."
        )
        return True
    return False


def make_spec(
    module: Any, input: Tensor, region: amp.Region, precision: Recipe, observe: bool
) -> GemmSpec:
    """The constants of this call."""
    recipe: Recipe = module._fp8_bank.recipe
    device = input.device.type
    autocast = torch.is_autocast_enabled(device)
    return GemmSpec(
        fprop=precision.fprop == "fp8",
        dgrad=precision.dgrad == "fp8",
        wgrad=precision.wgrad == "fp8",
        rowwise=recipe.scaling == "rowwise",
        live=recipe.scaling == "current" or region.calibrating,
        observe=observe,
        save=torch.is_grad_enabled(),
        emulate=region.execution != "fp8",
        grad_e5m2=grad_is_e5m2(recipe),
        input_limit=limit(recipe, INPUT),
        grad_limit=limit(recipe, GRAD_OUTPUT),
        out_dtype=torch.get_autocast_dtype(device) if autocast else input.dtype,
        in_out=module._fp8_in_out,
    )


# -- the quantised weight -------------------------------------------------------------------------


def prepare(module: Any, observe: bool, calibrating: bool = False) -> None:
    """Bind the slots and quantise the weight, where either is out of date."""
    bank: Bank = module._fp8_bank
    weight = module.weight
    if module._fp8_device != weight.device:
        bank.bind(module)
    key = module._fp8_weight_key
    # An optimizer that is known marks the weight stale when it steps. Any other weight may have
    # been changed through `.data`, which moves no version counter: it is good for one outermost
    # entry.
    current = (weight.data_ptr(), weight._version)
    stale = module._fp8_weight_stale
    trusted = _is_watched(module) and not stale
    if (
        key is None
        # By identity: two weak references are compared by comparing what they refer to.
        or key[0]() is not weight
        or key[1:3] != current
        or (stale and observe)
        or not (trusted or key[3] == bank.entry)
    ):
        # Observed once between two updates, so that what is counted does not depend on how often
        # the cast had to be repeated (more often before the optimizer is known: after a resume).
        first = observe and module._fp8_path not in bank.weights_seen
        _quantize_weight(module, weight, first, calibrating)
        if first:
            bank.weights_seen.add(module._fp8_path)
        module._fp8_weight_key = (weakref.ref(weight), *current, bank.entry)
        # An evaluation between two steps observes nothing and uses the scales of the last one: the
        # next training forward has yet to see this weight.
        module._fp8_weight_stale = not observe


def _is_watched(module: Any) -> bool:
    """Does whatever changes the weight announce it? A frozen one is changed by no optimizer, but
    by an adapter that is merged into it.
    """
    return bool(module._fp8_weight_owned and module.weight.requires_grad)


# Tensors born under inference_mode could not be saved for a later backward.
@torch.inference_mode(False)
@torch.no_grad()
def _quantize_weight(module: Any, weight: Tensor, observe: bool, calibrating: bool) -> None:
    recipe: Recipe = module._fp8_bank.recipe
    rows = weight.detach().t() if module._fp8_in_out else weight.detach()
    missing = -rows.shape[0] % ALIGNMENT
    if missing:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    new = cast(
        rows,
        module._fp8_weight_slot,
        limit(recipe, WEIGHT),
        e5m2=False,
        rowwise=recipe.scaling == "rowwise",
        live=recipe.scaling == "current" or calibrating,
        observe=observe,
        transpose=True,
    )
    old: Quantized | None = module._fp8_weight_q
    if old is None or not _is_watched(module) or old.rows.shape != new.rows.shape:
        # Fresh tensors: a graph that is still to run backward may hold the old ones, and what it
        # holds is right (the weight may not even have changed).
        module._fp8_weight_q = new
        return
    # In place: as in stock PyTorch, a backward through a weight that has since been stepped raises.
    for target, source in zip(old, new, strict=True):
        target.copy_(source)


# -- extra state: one tensor a module, for torch.save(model.state_dict())
# ----------------------------


def pack_state(module: Any) -> Tensor:
    """FP64 1-D: for each slot [scale, pending, n, counts x 4, history x n], after a
    `due` of the bank.

    FP64 holds every FP32 and every count up to 2^53 exactly.
    """
    bank: Bank = module._fp8_bank
    values = [float(bank.due)]
    for role in (INPUT, WEIGHT, GRAD_OUTPUT):
        path = module._fp8_path
        state = bank.read(bank.siblings.get(path, path) if role == INPUT else path, role)
        values += [float(state.scale), float(state.amax), len(state.history)]
        values += [float(count) for count in state.counts] + state.history.double().tolist()
    return torch.tensor(values, dtype=torch.float64)


def unpack_state(module: Any, packed: Tensor) -> None:
    """Undo `pack_state`."""
    bank: Bank = module._fp8_bank
    values = packed.cpu()
    bank.stepped = bool(values[0])
    at = 1
    for role in (INPUT, WEIGHT, GRAD_OUTPUT):
        scale, pending, length = (values[at + i] for i in range(3))
        stop = at + 7 + int(length)
        state = SlotState(
            values[at + 7 : stop].float(),
            scale.float(),
            pending.float(),
            values[at + 3 : at + 7].long(),
        )
        bank.write(module._fp8_path, role, state)
        at = stop
