"""Compiled blocks are the eager ones, bit for bit: outputs, gradients, slots."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from quiet import DYNAMO, FRESH
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8patch
from fp8patch.slots import SlotState

# Dynamo's own: it looks at .grad of whatever it is given, and makes a Function to trace one.
pytestmark = [*DYNAMO, FRESH]

D = 32


class Block(nn.Module):
    """q, k and v of one input (siblings), and two layers in a row.

    Nothing in it that AOTAutograd decomposes: those round otherwise, in stock blocks too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 64), nn.Linear(64, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + torch.relu(self.q(h)) * self.k(h) + self.v(h)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(recipe: str | fp8patch.Recipe) -> Any:
    torch.manual_seed(0)
    return fp8patch.convert_model(Model(), recipe, include=("*",))


def train(model: Any, first: int, last: int, x: Tensor) -> list[Tensor]:
    """Steps `first` to `last`; every output and every gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for step in range(first, last):
        for micro in range(2):
            inputs = (x * (step + 1 + micro)).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
                y = model(inputs)
            y.float().square().mean().backward()
            seen += [y.detach(), inputs.grad]
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def slots(model: Any) -> dict[Any, SlotState]:
    return dict(model._fp8_bank.state())


def differing(a: list[Tensor], b: list[Tensor]) -> list[int]:
    pairs = enumerate(zip(a, b, strict=True))
    return [i for i, (p, q) in pairs if p.dtype != q.dtype or not torch.equal(p, q)]


def compile_blocks(model: Any) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    return counter


def test_stock_blocks_compile_bit_for_bit() -> None:
    """What the tests below rely on."""
    torch.manual_seed(0)
    eager = Model()
    compiled = copy.deepcopy(eager)
    compile_blocks(compiled)
    x = torch.randn(2, 8, D)
    assert not differing(train(eager, 0, 3, x), train(compiled, 0, 3, x))


# One graph serves both blocks, unless an override tells them apart.
@pytest.mark.parametrize(
    ("recipe", "graphs"),
    [
        ("delayed", 1),
        ("rowwise", 1),
        (fp8patch.Recipe(overrides={"*.up": {"scaling": "rowwise"}, "*.k": {"margin": 2}}), 1),
        (fp8patch.Recipe(overrides={"blocks.0.down": {"wgrad": "bf16"}}), 2),
    ],
    ids=["delayed", "rowwise", "overrides", "override of a block"],
)
def test_compiled_blocks_equal_eager_ones(recipe: str | fp8patch.Recipe, graphs: int) -> None:
    eager, compiled = build(recipe), build(recipe)
    x = torch.randn(2, 8, D)
    for model in (eager, compiled):
        train(model, 0, 1, x)  # the observation step
    assert compiled._fp8_bank.siblings
    counter = compile_blocks(compiled)
    assert not differing(train(eager, 1, 4, x), train(compiled, 1, 4, x))
    same_slots(compiled, eager)
    assert counter.frame_count == graphs
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with fp8patch.autocast(backend="emulate"):
            assert torch.equal(compiled(x), eager(x))
    same_slots(compiled, eager)


def test_compiled_from_the_first_step_on() -> None:
    """The first step runs eagerly, whatever was compiled."""
    eager, compiled = build("delayed"), build("delayed")
    compile_blocks(compiled)
    x = torch.randn(2, 8, D)
    assert not differing(train(eager, 0, 3, x), train(compiled, 0, 3, x))
    same_slots(compiled, eager)


def test_a_copy_runs_compiled_at_its_first_use() -> None:
    """No module of a copy has met its bank yet."""
    eager = build("delayed")
    x = torch.randn(2, 8, D)
    train(eager, 0, 2, x)
    compiled = copy.deepcopy(eager)
    compile_blocks(compiled)
    assert not differing(train(eager, 2, 4, x), train(compiled, 2, 4, x))
    same_slots(compiled, eager)


def test_evaluated_before_it_is_trained() -> None:
    eager, compiled = build("delayed"), build("delayed")
    compile_blocks(compiled)
    x = torch.randn(2, 8, D)
    with torch.no_grad(), fp8patch.autocast(backend="emulate"):
        assert torch.equal(compiled(x), eager(x))


def same_slots(model: Any, reference: Any) -> None:
    ours, theirs = slots(model), slots(reference)
    assert ours.keys() == theirs.keys()
    for key, state in theirs.items():
        # Not the counts: merged casts count once.
        for name in ("history", "scale", "amax"):
            assert torch.equal(getattr(state, name), getattr(ours[key], name)), (key, name)


def test_off_compiles_to_the_stock_block() -> None:
    x = torch.randn(2, 8, D)
    model, stock = build("delayed"), Model()
    stock.load_state_dict(model.state_dict())
    train(model, 0, 1, x)
    stock.load_state_dict(model.state_dict())
    for part in (*model.blocks, *stock.blocks):
        part.compile(fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(enabled=False):
        y = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        z = stock(x)
    assert torch.equal(y, z)


@pytest.mark.parametrize("why", ["all bf16", "resized"])
def test_what_runs_as_stock_in_eager_does_compiled(why: str) -> None:
    """The rule of when a call is stock is the same rule, traced."""
    recipe = (
        fp8patch.Recipe(fprop="bf16", dgrad="bf16", wgrad="bf16") if why == "all bf16" else None
    )
    eager, compiled = (fp8patch.convert_model(Model(), recipe, include=("*",)) for _ in "ab")
    compiled.load_state_dict(eager.state_dict())
    x = torch.randn(2, 8, D)
    for model in (eager, compiled):
        train(model, 0, 1, x)
        if why == "resized":
            for block in model.blocks:
                resized = torch.nn.Parameter(block.up.weight[:-1].detach().clone())
                block.up.weight, block.up.out_features = resized, resized.shape[0]
                block.up.bias = torch.nn.Parameter(block.up.bias[:-1].detach().clone())
                block.down.weight = torch.nn.Parameter(block.down.weight[:, :-1].detach().clone())
                block.down.in_features -= 1
    compile_blocks(compiled)
    with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
        assert torch.equal(eager(x), compiled(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_whole_model_compiled_by_its_owner(in_place: bool) -> None:
    """What a script does: `torch.compile(model)`, then train: the first step is seen."""
    eager, model = build("delayed"), build("delayed")
    compiled = model if in_place else torch.compile(model, backend="aot_eager")
    if in_place:
        model.compile(backend="aot_eager")
    x = torch.randn(2, 8, D)
    assert not differing(train(eager, 0, 4, x), train(compiled, 0, 4, x))
    same_slots(model, eager)
    assert model._fp8_bank.siblings == eager._fp8_bank.siblings != {}


@pytest.mark.parametrize("how", ["loaded", "in place"])
def test_weights_change_between_two_evaluations(how: str) -> None:
    """In one region, which is one entry: what is compiled looks at no weight by itself."""
    model, x = build("delayed"), torch.randn(2, 8, D)
    train(model, 0, 2, x)
    compiled = torch.compile(model, backend="eager")
    others = {n: -p if p.dim() == 2 else p for n, p in model.state_dict().items()}
    with torch.no_grad(), fp8patch.autocast(backend="emulate"):
        for _ in range(2):
            old = compiled(x)
        if how == "loaded":
            model.load_state_dict(others)
        else:
            for name, parameter in model.named_parameters():
                parameter.copy_(others[name])
        new = compiled(x)
        assert torch.equal(new, model(x))
    assert not torch.equal(new, old)


def test_the_compiler_is_not_imported_for_nothing() -> None:
    code = "import fp8patch.convert, fp8patch.amp, sys; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_hugging_face_model_compiled_by_its_owner() -> None:
    """Its forward reads attributes of tensors, which the first step's watch must hand through."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    model = fp8patch.convert_model(transformers.LlamaForCausalLM(config))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(26).reshape(2, 13)
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
            loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert model._fp8_bank.siblings
