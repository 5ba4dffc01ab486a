"""RMSNorms of any class: known by what they compute, converted in place, one kernel where it pays.

There is no GPU here: `kernels` makes eager calls take the kernel's path with its CPU form.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from plan_cases import RMS, GatedRMSNorm, holder
from quiet import DYNAMO
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

import fp8patch
from fp8patch import numerics
from fp8patch.modules import norm as norms
from fp8patch.modules import norm_function

pytestmark = [
    # Said by stock nn.RMSNorm of the dtypes that it is tested with.
    pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning"),
    # Dynamo's own, as in test_compile.py.
    *DYNAMO,
]

D = 32
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Named(nn.Module):
    """Its parameter is no `weight`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.epsilon = nn.Parameter(torch.ones(width)), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)) * self.gamma


BUILDERS: dict[str, Any] = {
    "llama": lambda: LlamaRMSNorm(D, 1e-5),
    "gemma": lambda: GemmaRMSNorm(D, 1e-5),
    "t5": lambda: T5LayerNorm(D, 1e-5),
    "torch": lambda: nn.RMSNorm(D, 1e-5),
    "layer": lambda: nn.LayerNorm(D, 1e-5),
    "plain layer": lambda: nn.LayerNorm(D, 1e-5, elementwise_affine=False),
    "named": lambda: Named(D),
}


class Block(nn.Module):
    """Pre-norm: only GEMMs read the norm."""

    def __init__(self, norm: nn.Module, narrow: bool = True) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(D, 64), nn.Linear(64, D)
        self.narrow = narrow

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return (x if self.narrow else h) + self.down(torch.relu(self.up(h)))


def scrambled(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    return norm


def converted(name: str, narrow: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    block = Block(scrambled(BUILDERS[name]()), narrow)
    return fp8patch.convert_model(block, fp8patch.Recipe(**options), include=("*",))


def tokens(dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def fp8(model: nn.Module, x: Tensor, autocast: bool = True) -> Tensor:
    with torch.autocast("cpu", BF16, enabled=autocast), fp8patch.autocast(backend="emulate"):
        result: Tensor = model(x)
    return result


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The specs of the calls that took the kernel's path."""
    calls: list[Any] = []
    norm = norm_function.norm

    def counted(*args: Any) -> Any:
        if not torch.compiler.is_compiling():
            calls.append(args)
        return norm(*args)

    monkeypatch.setattr(norms, "_has_kernel", lambda input: True)
    monkeypatch.setattr(norm_function, "norm", counted)
    return calls


@pytest.mark.parametrize("name", BUILDERS)
def test_it_is_converted_in_place_and_back(name: str) -> None:
    norm = BUILDERS[name]()
    stock, parameters = type(norm), dict(norm.named_parameters())
    model = fp8patch.convert_model(Block(norm), include=("*",))
    assert model.norm is norm
    assert isinstance(norm, stock)
    assert isinstance(norm, norms.Float8Norm)
    assert type(norm).__name__ == f"Float8{stock.__name__}"
    assert all(p is parameters[n] for n, p in norm.named_parameters())
    fp8patch.revert_model(model)
    assert type(norm) is stock
    assert not [n for n in vars(norm) if n.startswith("_fp8")]


@pytest.mark.parametrize("name", BUILDERS)
def test_off_is_stock_bit_for_bit(name: str, kernels: list[Any]) -> None:
    model, stock = converted(name), scrambled(BUILDERS[name]())
    for _ in range(2):
        fp8(model, tokens()).sum().backward()
    assert kernels
    kernels.clear()
    for dtype in (FP32, BF16):
        x = tokens(dtype)
        for autocast in (False, True):
            with torch.autocast("cpu", BF16, enabled=autocast):
                want, got = stock(x), model.norm(x)
                with fp8patch.autocast(backend="emulate"), fp8patch.autocast(enabled=False):
                    inner = model.norm(x)
            assert got.dtype == inner.dtype == want.dtype
            assert torch.equal(got, want)
            assert torch.equal(inner, want)
    assert not kernels


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["llama", "gemma", "torch"])
def test_copies_go_on_by_themselves(name: str, copied: str) -> None:
    model = converted(name)
    for _ in range(2):
        fp8(model, tokens()).sum().backward()
    other = copy.deepcopy(model) if copied == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert type(other.norm) is type(model.norm)
    assert other.norm._fp8_form == model.norm._fp8_form
    outputs: list[Tensor] = []
    for m in (model, other):
        m.norm.register_forward_hook(lambda module, args, output: outputs.append(output))
    assert torch.equal(fp8(model, tokens()), fp8(other, tokens()))
    assert [t.dtype for t in outputs] == [BF16, BF16]
    assert type(fp8patch.revert_model(other).norm) is type(BUILDERS[name]())


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma", "t5", "torch"])
def test_the_output_is_narrow_where_only_gemms_read_it(
    name: str, narrow: bool, kernels: list[Any]
) -> None:
    model, outputs = converted(name, narrow), list[Tensor]()
    model.norm.register_forward_hook(lambda module, args, output: outputs.append(output))
    for _ in range(3):
        fp8(model, tokens()).sum().backward()
    assert [t.dtype for t in outputs] == [FP32, *([BF16 if narrow else FP32] * 2)]


@pytest.mark.parametrize("weights", [FP32, BF16])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_kernel_writes_what_the_stock_class_writes(
    name: str, weights: torch.dtype, kernels: list[Any]
) -> None:
    """The same dtype for every kind of call, and values and gradients nearer than one rounding."""
    model = converted(name, narrow=False).to(weights)
    stock = scrambled(BUILDERS[name]()).to(weights)
    for dtype in (FP32, BF16, FP16):
        for autocast in (False, True):
            given = [tokens(dtype).requires_grad_() for _ in "ab"]
            with torch.autocast("cpu", BF16, enabled=autocast):
                try:
                    want = stock(given[0])
                except RuntimeError:  # mixed dtypes, which F.layer_norm refuses
                    with fp8patch.autocast(backend="emulate"), pytest.raises(RuntimeError):
                        model.norm(given[1])
                    continue
                with fp8patch.autocast(backend="emulate"):
                    got = model.norm(given[1])
            assert got.dtype == want.dtype, (dtype, autocast)
            # Stock forms round on the way; ours do once.
            bar = 45 if BF16 in (dtype, weights) else 60 if dtype == FP16 else 130
            assert numerics.sqnr(want.detach(), got.detach()) > bar
            for module, y in ((stock, want), (model.norm, got)):
                module.zero_grad()
                (y.float() * torch.linspace(-1, 1, D)).sum().backward()
            assert given[0].grad is not None
            assert given[1].grad is not None
            assert given[1].grad.dtype == dtype
            assert numerics.sqnr(given[0].grad, given[1].grad) > bar
            for a, b in zip(stock.parameters(), model.norm.parameters(), strict=True):
                assert a.grad is not None
                assert b.grad is not None
                assert b.grad.dtype == a.grad.dtype
                assert numerics.sqnr(a.grad, b.grad) > bar
    assert kernels


def test_eps_is_read_when_it_is_used(kernels: list[Any]) -> None:
    model, x = converted("named"), tokens() * 1e-2
    model.norm.epsilon = 0.5
    y = fp8(model.norm, x, autocast=False)
    assert numerics.sqnr(Named.forward(model.norm, x), y) > 110
    assert len(kernels) == 1


def test_what_only_the_class_knows_stays_with_it(kernels: list[Any]) -> None:
    """nn.RMSNorm without an eps takes one from the dtype; a norm over two dimensions."""
    model = fp8patch.convert_model(
        holder(a=nn.RMSNorm(D), b=nn.LayerNorm([5, D])), allow_empty=True
    )
    assert isinstance(model.a, norms.Float8RMSNorm)
    x = tokens()
    assert torch.equal(fp8(model.a, x), nn.RMSNorm(D)(x))
    assert torch.equal(fp8(model.b, x), nn.LayerNorm([5, D])(x))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        fp8(converted("plain layer").norm, torch.randn(3, 2 * D))
    assert not kernels


def test_a_gate_is_not_lost(kernels: list[Any]) -> None:
    """Mamba's norm is a plain one when it is called without a gate, as the plan calls it."""
    model = fp8patch.convert_model(holder(norm=MambaRMSNormGated(D, D)), allow_empty=True)
    assert isinstance(model.norm, norms.Float8Norm)
    x, gate = tokens(), tokens() + 1
    stock = MambaRMSNormGated(D, D)
    for arguments in ((x, gate), (x, None)):
        assert torch.equal(fp8(model.norm, *arguments[:1], autocast=False), stock(x))
        with fp8patch.autocast(backend="emulate"):
            assert torch.equal(model.norm(*arguments), stock(*arguments))
            assert torch.equal(model.norm(x, gate=gate), stock(x, gate))


def test_one_that_computes_more_is_refused() -> None:
    model = holder(norm=RMS(D), up=nn.Linear(D, D))
    plan = fp8patch.plan_model(model, include=("*",))
    other = holder(norm=GatedRMSNorm(D), up=nn.Linear(D, D))
    type(other.norm).__name__, name = "RMS", type(other.norm).__name__
    try:
        with pytest.raises(fp8patch.ConversionError, match="norm is an RMSNorm, and it computes"):
            fp8patch.convert_model(other, plan)
    finally:
        type(other.norm).__name__ = name
    assert type(other.up) is nn.Linear


def test_a_subclass_on_the_list_is_converted_too() -> None:
    mine = type("LayerNorm", (nn.LayerNorm,), {"__module__": "timm.layers.norm"})
    model = fp8patch.convert_model(Block(mine(D)), include=("*",))
    assert isinstance(model.norm, (mine, norms.Float8Norm))
    for _ in range(2):
        fp8(model, tokens()).sum().backward()
    assert model.norm._fp8_narrow


def test_a_norm_that_reads_a_norm_keeps_it_wide(kernels: list[Any]) -> None:
    class Two(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            return x + self.down(torch.relu(self.up(h))) + self.second(h)

    model: Any = Two(BUILDERS["llama"]())
    model.second = BUILDERS["llama"]()
    fp8patch.convert_model(model, include=("*",))
    for _ in range(2):
        fp8(model, tokens()).sum().backward()
    assert (model.norm._fp8_narrow, model.second._fp8_narrow) == (False, False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_takes_the_same_path(reentrant: bool, kernels: list[Any]) -> None:

    class Outer(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block, self.checkpointed = Block(BUILDERS["llama"]()), checkpointed

        def forward(self, x: Tensor) -> Tensor:
            if not self.checkpointed:
                return self.block(x)  # type: ignore[no-any-return]
            return checkpoint(self.block, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    models = [fp8patch.convert_model(Outer(flag), include=("*",)) for flag in (True, False)]
    for _ in range(3):
        grads = []
        for model in models:
            model.zero_grad()
            x = tokens().requires_grad_()
            fp8(model, x).sum().backward()
            grads.append([x.grad, *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "in_graphs"), [("llama", False), ("llama", True), ("layer", True)]
)
def test_compiled_code_has_stock_operations_unless_told(
    name: str, in_graphs: bool, kernels: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "kernels_in_graphs", in_graphs)
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def keep(traced: torch.fx.GraphModule, inputs: Any) -> Any:
            targets.extend(str(node.target) for node in traced.graph.nodes)
            return make_boxed_func(traced.forward)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)

    torch._dynamo.reset()
    model, plain = converted(name), converted(name)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        grads = []
        for call, module in ((compiled, model), (plain, plain)):
            module.zero_grad()
            x = tokens().requires_grad_()
            fp8(call, x).sum().backward()
            grads.append([x.grad, *(p.grad for p in module.parameters())])
        for a, b in zip(*grads, strict=True):
            assert a is not None
            assert b is not None
            assert numerics.sqnr(b, a) > 130
    for operator in ("fp8patch.norm.default", "fp8patch.norm_backward.default"):
        assert (operator in targets) == in_graphs
    assert "fp8patch.quantize.default" in targets
    torch._dynamo.reset()
