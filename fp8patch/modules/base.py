"""What every converted GEMM module shares: stock behaviour outside a region, FP8 inside.

Conversion changes the class of the module object and adds plain attributes, all named `_fp8_*`; no
Parameter is touched. Outside a region, and for an input that FP8 can't take, the module *is* its
stock class.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8patch import regions
from fp8patch.backward import arm_backward
from fp8patch.compiler import nothing_compiles, outside_compiler
from fp8patch.modules import bias_copies, ready
from fp8patch.modules.again import find_again
from fp8patch.modules.extra_state import pack_state, unpack_state
from fp8patch.modules.gemms import (
    Float8Gemms,
    GemmSpec,
    Operands,
    cast_input,
    needs_transpose,
    rows_of,
    run_gemms,
    shared_input,
)
from fp8patch.modules.obstacles import (
    check_override,
    find_obstacle,
    precision_of,
    report_obstacle,
)
from fp8patch.modules.weight_batch import refresh_together
from fp8patch.modules.weights import WeightState, is_whole, prepare
from fp8patch.recipe import Recipe
from fp8patch.roots import enter_module, inside_root, read_early
from fp8patch.scaling import Bank
from fp8patch.slots import GRAD_OUTPUT, INPUT, Place, grad_is_e5m2, limit

# Dropped from a pickle and a deep copy; the first use makes them anew. Views cut from their bank by
# a pickle would be frozen for good without a word.
_RUNTIME = (
    "_fp8_input_slot",
    "_fp8_weight_slot",
    "_fp8_grad_slot",
    "_fp8_place",
    "_fp8_device",
    "_fp8_weight_q",
    "_fp8_bias",
    "_fp8_ready",
)
_EXTRA = "_extra_state"


class Float8Module(nn.Module):
    """Mixin in front of a stock class with a `weight` and a `bias`.

    `_fp8_base` is the stock class; `_fp8_in_out` says that its weight is [in, out].
    """

    _fp8_base: ClassVar[type[nn.Module]]
    _fp8_registered: ClassVar[type[nn.Module]]
    _fp8_in_out: ClassVar[bool] = False
    weight: Any
    bias: Any

    _fp8_bank: Bank
    _fp8_recipe: Recipe
    _fp8_path: str
    _fp8_extra_state: bool
    _fp8_weight_q: Any
    _fp8_weight_state: WeightState

    def __init__(self, *args: Any, recipe: Recipe | str | None = None, **kwargs: Any) -> None:
        """As the stock class, plus `recipe`. Conversion does not come through here."""
        super().__init__(*args, **kwargs)
        attach(self, Bank(Recipe.load(recipe), [""]), "")

    def forward(self, input: Tensor) -> Tensor:
        region = regions.active()
        if region is None:
            return stock_forward(self, input)  # type: ignore[no-any-return]
        return _forward_in_region(self, input, region)

    def outdate_weight(self, replaced: bool = False) -> None:
        """The weight has changed; `replaced`: into another one altogether."""
        self._fp8_weight_state.change(replaced)

    def refresh_weights(self, members: list[Any], observe: bool) -> None:
        """Quantise every weight of `members` (all of this bank) again that is out of date.

        Biases are copied, where a training forward (`observe`) begins.
        """
        for module in refresh_together(members, observe):
            module.refresh_weight(observe)
        if observe:
            bias_copies.refresh(members)

    def refresh_weight(self, observe: bool) -> None:
        """Quantise the weight again if it is out of date and was ever used.

        Where there is no whole weight, that happens in each forward.
        """
        if self._is_whole() and self._fp8_weight_q is not None:
            prepare(self, observe)

    def first_use(self, observe: bool) -> None:
        """Bind and quantise now: a compiled forward can't do it when it needs it."""
        if self._is_whole() and self._fp8_weight_q is None:
            prepare(self, observe)

    def _is_whole(self) -> bool:
        known, whole = self._fp8_weight_state, is_whole(self.weight)
        known.gathered = not whole
        if not whole:
            known.saw_shard(self.weight)
        return whole

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self._fp8_bank.recipe.name}{_changed(self)}"

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, **fresh_runtime()}
        state.pop("_compiled_call_impl", None)  # As nn.Module does.
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (self._fp8_registered, self._fp8_base), self.__getstate__()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._fp8_extra_state:
            destination[prefix + _EXTRA] = pack_state(self)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        packed = state_dict.pop(prefix + _EXTRA, None)
        if _is_another(self.weight, state_dict.get(prefix + "weight")):
            # What was measured on another model says nothing about this one. (The same weights
            # loaded again, after a sidecar was restored, leave its scales alone.)
            self._fp8_bank.forget(self._fp8_path)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.outdate_weight()
        if packed is not None:
            unpack_state(self, packed)


def _changed(module: Any) -> str:
    """That a layer has overrides, for its repr."""
    return "" if module._fp8_recipe is module._fp8_bank.recipe else " with overrides"


def _is_another(weight: Tensor, loaded: Any) -> bool:
    if not isinstance(loaded, Tensor) or loaded.shape != weight.shape or weight.is_meta:
        return isinstance(loaded, Tensor)
    if type(weight) not in (nn.Parameter, Tensor) or type(loaded) not in (nn.Parameter, Tensor):
        return True  # In pieces (DTensor): not worth gathering to compare.
    return not torch.equal(weight.detach(), loaded.detach().to(weight.device, weight.dtype))


def attach(module: Any, bank: Bank, path: str, extra_state: bool = False) -> None:
    """Give a module of a Float8 class what it needs besides its Parameters."""
    module.__dict__.update(fresh_runtime())
    module._fp8_bank, module._fp8_path, module._fp8_extra_state = bank, path, extra_state
    # One object for all layers with the same overrides: what compiles them tells them apart by it.
    module._fp8_recipe = bank.recipe_of(path)


def detach(module: Any) -> None:
    """Remove everything that `attach` and use have left."""
    for name in [name for name in module.__dict__ if name.startswith("_fp8_")]:
        del module.__dict__[name]


def fresh_runtime() -> dict[str, Any]:
    """The attributes of a module that no bank has bound yet."""
    return {
        **dict.fromkeys(_RUNTIME),
        "_fp8_narrow": None,
        "_fp8_weight_state": WeightState(),
    }


def rebuild(registered: type[nn.Module], base: type[nn.Module]) -> nn.Module:
    """An empty converted module over the stock class `base`, for unpickling and deep copies.

    By base class, because a class made for an allowlisted base has no importable name. `registered`
    is the class that it was made like: in a new process, finding it by name is what registers it.
    """
    assert registered in _REGISTERED.values()
    module: nn.Module = base.__new__(base)
    module.__class__ = float8_class(base, registered)
    return module


_REGISTERED: dict[type[nn.Module], type[nn.Module]] = {}


def register(cls: type[Any]) -> type[Any]:
    """Class decorator: `cls` is what its `_fp8_base` converts to."""
    _REGISTERED[cls._fp8_base] = cls._fp8_registered = cls
    return cls


def float8_class(base: type[nn.Module], like: type[nn.Module] | None = None) -> type[nn.Module]:
    """The class that modules of exactly class `base` are given; made once for a subclass.

    Args:
        like: A registered class, for what is known by its behaviour and has no base to tell
            (RMSNorms).

    Raises:
        StopIteration: `base` is nothing that can be converted; the plan never says so.
    """
    if base not in _REGISTERED:
        mixin = like or next(c for known, c in _REGISTERED.items() if issubclass(base, known))
        front = mixin.__bases__[0]
        names = {"_fp8_base": base, "_fp8_registered": mixin}
        _REGISTERED[base] = type(f"Float8{base.__name__}", (front, base), names)
    return _REGISTERED[base]


def stock_forward(module: Any, *args: Any) -> Any:
    """The forward of the module's stock class."""
    return module._fp8_base.forward(module, *args)


# -- inside a region ------------------------------------------------------------------------------


def _forward_in_region(module: Any, input: Tensor, region: regions.Region) -> Tensor:
    if not torch.compiler.is_compiling():
        if nothing_compiles():
            # Found once: asking a module for a Parameter takes a microsecond.
            weight = module.weight
            spec = ready.recall(module, weight, input, region)
            if spec is not None:
                bias = module.bias
                copy = bias_copies.current(module, bias)
                return _run(module, weight, bias, input, spec, copy)
        return _forward_in_eager(module, input, region)
    if module._fp8_bank.late.waits:
        read_early()
    # What the first step shows is seen in eager only, whoever compiled what; so is a first use, and
    # a weight that FSDP had yet to gather where the root was entered.
    unknown = module._fp8_bank.observation is not None or module._fp8_weight_q is None
    known = module._fp8_weight_state
    if unknown or (known.gathered and not known.ahead):
        return _forward_in_eager(module, input, region)
    # Everything that looks at or moves the bank was done where the root was entered.
    precision = precision_of(module, region)
    if find_obstacle(module, input, region, precision) is not None:
        return stock_forward(module, input)  # type: ignore[no-any-return]
    observe = region.training is True or region.calibrating or region.reopened
    spec = make_spec(module, input, region, precision, observe)
    return _run(module, module.weight, module.bias, input, spec)


@outside_compiler
def _forward_in_eager(module: Any, input: Tensor, region: regions.Region) -> Tensor:
    precision = precision_of(module, region)
    obstacle = find_obstacle(module, input, region, precision)
    if obstacle is not None:
        report_obstacle(obstacle, module, input, region)
        return stock_forward(module, input)  # type: ignore[no-any-return]
    if region.recipe is not None:
        check_override(module._fp8_bank.recipe, region.recipe)
    observe = enter_module(module._fp8_bank, region)
    prepare(module, observe, region.calibrating)
    spec = make_spec(module, input, region, precision, observe)
    if region.execution == "observe":
        cast_input(rows_of(input), module._fp8_input_slot, spec, False)
        return stock_forward(module, input)  # type: ignore[no-any-return]
    observation = module._fp8_bank.observation
    if observation is not None and observe:
        observation.saw_input(module._fp8_path, input)
        observation.entering_module()
        try:
            return _run_at_the_edge(module, input, spec, region, observation.frugal)
        finally:
            observation.leaving_module()
    if observe and not region.reopened and not region.calibrating:
        ready.note(module, input, region, spec)
        bias_copies.want(module, spec)
    return _run_at_the_edge(module, input, spec, region)


def _run_at_the_edge(
    module: Any, input: Tensor, spec: GemmSpec, region: regions.Region, frugal: bool = False
) -> Tensor:
    """As `_run`; a module that is called by itself has to let backward know of the region."""
    output = _run(module, module.weight, module.bias, input, spec, frugal=frugal)
    if spec.observe and not region.reopened and not inside_root():
        arm_backward(output, module._fp8_bank, region)
    return output


def _run(
    module: Any,
    weight: Tensor,
    bias: Tensor | None,
    input: Tensor,
    spec: GemmSpec,
    bias_copy: Tensor | None = None,
    frugal: bool = False,
) -> Tensor:
    weight_q, slot, grad_slot = module._fp8_weight_q, module._fp8_input_slot, module._fp8_grad_slot
    output: Tensor
    if torch.compiler.is_compiling():
        place: Place | None = module._fp8_place
        if place is not None:
            slot, grad_slot = place.rows.slot(place.input), place.rows.slot(place.grad)
        operands = Operands(weight_q, None, slot, grad_slot)
        output = Float8Gemms.apply(input, weight, bias, operands, spec)  # type: ignore[no-untyped-call]
    else:
        transpose = needs_transpose(spec, weight)
        again = None
        if frugal and transpose and spec.fprop and not spec.rowwise:
            again = find_again(input, slot, spec.input_limit, spec.live)
        input_q = shared_input(input, slot, spec, transpose and again is None)
        operands = Operands(weight_q, input_q, slot, grad_slot, bias_copy, again)
        output = run_gemms(input, weight, bias, operands, spec)
    return output


def make_spec(
    module: Any, input: Tensor, region: regions.Region, precision: Recipe, observe: bool
) -> GemmSpec:
    """The constants of this call."""
    recipe: Recipe = module._fp8_recipe
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
