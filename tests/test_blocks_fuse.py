"""The pass that makes an activation and a cast one operator, on the graphs that Inductor gets."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from quiet import FRESH, INDUCTOR
from torch import Tensor, nn

import fp8patch
from fp8patch import messages
from fp8patch.blocks import compiling
from fp8patch.blocks import fuse as fusing
from fp8patch.inspect.metrics import metrics
from fp8patch.ops import quantize_form

transformers = pytest.importorskip("transformers")

pytestmark = [*INDUCTOR, FRESH]

D = 32
CAST = "fp8patch.quantize.default"


class Graphs:
    """A backend: Inductor up to the point where it would write code, run as it is.

    Attributes:
        casts: By graph, how often each cast is in it: CAST, the form of one that has a form,
            "grads of" a form, and "transpose" where that is made again.
        saved: By forward graph, shapes and dtypes of what it returns.
    """

    def __init__(self, fuse: bool, keep_less: bool = False) -> None:
        self.casts: list[Counter[str]] = []
        self.saved: list[Any] = []
        self._options = compiling.for_inductor(keep_less) if fuse else {}

    def __call__(self, gm: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(gm, inputs, inner_compile=self._inner, config_patches=self._options)

    def _inner(self, gm: Any, inputs: Any, **kwargs: Any) -> Any:
        from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
        from torch._inductor.virtualized import V

        view_to_reshape(gm)
        with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            post_grad_passes(gm, is_inference=False)
        gm.recompile()
        gm.graph.lint()
        named = [(str(node.target), node) for node in gm.graph.nodes]
        casts = [CAST for name, _ in named if name == CAST]
        casts += [node.args[2] for name, node in named if "quantize_form" in name]
        casts += [f"grads of {node.args[3]}" for name, node in named if "activation_grads" in name]
        casts += ["transpose" for name, _ in named if "transpose_again" in name]
        self.casts.append(Counter(casts))
        if not kwargs.get("is_backward"):
            results = gm.graph.output_node().args[0]
            vals = [n.meta["val"] for n in results if isinstance(n, torch.fx.Node)]
            self.saved.append([(v.shape, v.dtype) for v in vals if isinstance(v, Tensor)])
        return make_boxed_func(gm.forward)


class Mlp(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.activation(self.up(x)))
        return y


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, 2 * D, bias=False), nn.Linear(D, 2 * D, bias=False)
        self.down = nn.Linear(2 * D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.blocks = nn.ModuleList([block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def train(
    block: Callable[[], nn.Module], fuse: bool, steps: int = 3, keep_less: bool = False
) -> tuple[list[Tensor], Graphs]:
    """Outputs, gradients and slots of a few steps, and the graphs."""
    torch.manual_seed(0)
    model: Any = fp8patch.convert_model(Model(block), include=("*",))
    graphs = Graphs(fuse, keep_less)
    fp8patch.compile_blocks(model, backend=graphs)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for step in range(steps):
        # The last batch has another shape: sizes that move.
        x = torch.randn(2, 16 if step < steps - 1 else 9, D)
        with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
            y = model(x)
        y.float().square().mean().backward()
        seen += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]
        optimizer.step()
        optimizer.zero_grad()
    seen.append(torch.tensor(list(metrics(model).values())))
    return seen, graphs


def gelu() -> nn.Module:
    return Mlp(nn.GELU())


def gelu_tanh() -> nn.Module:
    return Mlp(nn.GELU(approximate="tanh"))


# By block: what its casts are in forward and in backward.
CASES: dict[Any, tuple[dict[str, int], dict[str, int]]] = {
    gelu: ({CAST: 1, "gelu": 1}, {"to_bf16": 1, "gelu_backward": 1}),
    gelu_tanh: ({CAST: 1, "gelu_tanh": 1}, {"to_bf16": 1, "gelu_tanh_backward": 1}),
    # The gradient of `up` is one, too: the gradient times silu(gate).
    Gated: ({CAST: 1, "silu_mul": 1}, {CAST: 1, "to_bf16": 1, "silu_mul": 1}),
}


@pytest.mark.parametrize("block", CASES)
def test_one_operator_and_not_another_bit(block: Callable[[], nn.Module]) -> None:
    apart, before = train(block, fuse=False)
    fused, after = train(block, fuse=True)
    forward, backward = CASES[block]
    # Twice: for the first shape, and for all others.
    assert after.casts == [forward, backward] * 2
    assert all(casts.keys() == {CAST} for casts in before.casts)
    assert after.saved == before.saved
    assert all(torch.equal(a, b) for a, b in zip(apart, fused, strict=True))


def test_a_wrong_form_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    apart, _ = train(gelu, fuse=False, steps=2)
    monkeypatch.setitem(quantize_form.FORMS, "gelu", quantize_form.FORMS["gelu_tanh"])
    fused, _ = train(gelu, fuse=True, steps=2)
    assert not all(torch.equal(a, b) for a, b in zip(apart, fused, strict=True))


class Leaky(Mlp):
    """What comes out of the activation is read twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.up(x))
        y: Tensor = x + self.down(h) + h[..., :D]
        return y


def leaky() -> nn.Module:
    return Leaky(nn.GELU())


def nearly_gelu() -> nn.Module:
    return Mlp(lambda x: x * 0.5 * (torch.erf(x * 0.7) + 1))


@pytest.mark.parametrize("block", [leaky, nearly_gelu])
def test_left_as_it_is(block: Callable[[], nn.Module]) -> None:
    _, graphs = train(block, fuse=True, steps=2)
    assert graphs.casts[0] == {CAST: 2}


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_blocks_of_hugging_face(name: str) -> None:
    sizes = {
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * D,
    }
    if name == "bert":
        config: Any = transformers.BertConfig(**sizes, vocab_size=64)
        inputs = {"input_ids": torch.arange(32).view(2, 16)}
    else:
        config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4)
        inputs = {"pixel_values": torch.ones(2, 3, 16, 16)}
    model = transformers.AutoModel.from_config(config)
    model = fp8patch.convert_model(model, include=("*layer*",))
    graphs = Graphs(fuse=True)
    fp8patch.compile_blocks(model, backend=graphs)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
            model(**inputs).last_hidden_state.float().square().mean().backward()
    forward, backward = graphs.casts
    assert (forward["gelu"], backward["gelu_backward"]) == (1, 1)


def test_what_is_compiled_is_found_again_for_the_same_operators_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files: list[str] = []
    monkeypatch.setattr(fusing, "get_hash_for_files", lambda paths: files.extend(paths))
    fusing.FUSE_CASTS.uuid()
    named = {Path(file).name for file in files}
    wanted = {
        "fuse.py",
        "fuse_parts.py",
        "fuse_stored.py",
        "quantize.py",
        "quantize_form.py",
        "gemm.py",
    }
    assert wanted | {"wide_rows.py"} <= named


def test_inductor_takes_the_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_seen", set())
    options = compiling.for_inductor(keep_less=True)
    assert torch.compile(lambda x: x, options=dict(options)) is not None
    # A pass that somebody else has set stays, and that is said.
    with torch._inductor.config.patch(post_grad_custom_pre_pass=lambda graph: None):
        assert compiling.for_inductor(keep_less=True).keys() == {"joint_custom_post_pass"}
    assert "post_grad_custom_pre_pass already" in capsys.readouterr().err
    with torch._inductor.config.patch(joint_custom_post_pass=lambda graph: None):
        assert compiling.for_inductor(keep_less=True).keys() == {"post_grad_custom_pre_pass"}
    assert "joint_custom_post_pass already" in capsys.readouterr().err


def losses_on_a_gpu(graphs: bool, block: Callable[[], nn.Module] = gelu) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = fp8patch.convert_model(Model(block).cuda(), include=("*",))
    fp8patch.compile_blocks(model, cuda_graphs=graphs)
    caches = torch._inductor.config.patch(force_disable_caches=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(5):
        x = torch.randn(2, 16, D, generator=torch.Generator().manual_seed(1)).cuda()
        with caches:
            with torch.autocast("cuda", torch.bfloat16), fp8patch.autocast(backend="fp8"):
                y = model(x)
            loss = y.float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*force_disable_caches:UserWarning")
# PyTorch makes an empty one first, on purpose, to have a pool.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("graphs", [False, True], ids=["compiled", "graphs"])
def test_inductors_own_code(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    plain = fusing._fuse
    monkeypatch.setattr(fusing, "_fuse", lambda *args: calls.append(plain(*args)) or calls[-1])
    fused = losses_on_a_gpu(graphs)
    # Without graphs, the activation's gradient is an operator already: see keep_less.py.
    assert calls == ([False, True] * 2 if graphs else [False, True, False])
    monkeypatch.setattr(compiling, "for_inductor", lambda keep_less: {})
    apart = losses_on_a_gpu(graphs)
    assert len(calls) == (4 if graphs else 3)
    # Some FP8 values are one step off.
    assert fused == pytest.approx(apart, rel=1e-3)
    assert apart[-1] < apart[0]
