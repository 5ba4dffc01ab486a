"""`compile_blocks`: which blocks it finds, when they run compiled, and what can't be."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from quiet import DYNAMO, FRESH
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fp8patch
from fp8patch import messages
from fp8patch.blocks import calls as blocks_calls
from fp8patch.blocks import compiling, run
from fp8patch.blocks.find import find_blocks, structure, variants

# Dynamo's own: it looks at .grad of whatever it is given, and makes a Function to trace one.
pytestmark = [*DYNAMO, FRESH]

D = 32


class Block(nn.Module):
    def __init__(self, features: int = D) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, 64), nn.Linear(64, features)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """What goes into its first block has a gradient, as after an embedding."""

    def __init__(self, kind: Any = Block, count: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.blocks = nn.ModuleList([kind() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


class Two(nn.Module):
    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


def convert(model: nn.Module) -> Any:
    return fp8patch.convert_model(model, include=("*",))


def build(kind: Any = Block, count: int = 3) -> Any:
    torch.manual_seed(0)
    return convert(Model(kind, count))


def compile_blocks(model: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return fp8patch.compile_blocks(model, backend=counter), counter


def step(model: Any, x: Tensor, optimizer: Any = None) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
        y = model(x)
    y.float().square().mean().backward()
    seen = [y.detach(), *(p.grad.clone() for p in model.parameters())]
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return seen


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(a, b, strict=True))


def paths(model: nn.Module) -> list[str]:
    return [block.path for block in find_blocks(model)]


# -- which blocks ----------------------------------------------------------------------------------


def test_blocks_of_a_list_and_of_a_sequential() -> None:
    model = nn.ModuleDict({"a": nn.ModuleList([Block(), Block()]), "b": nn.Sequential(Block())})
    assert paths(convert(model)) == ["a.0", "a.1"]  # one block is none
    model = nn.Sequential(nn.Linear(D, D), Block(), nn.ReLU(), Block())
    assert paths(convert(model)) == ["1", "3"]


def test_the_inner_repetition_counts_where_it_is_most_of_the_outer() -> None:
    def stage(inner: int) -> nn.Module:
        return nn.ModuleDict({"blocks": Model(count=inner), "down": nn.Linear(D, 64)})

    stages = nn.ModuleList([stage(2), stage(3)])
    inner = [f"{s}.blocks.blocks.{b}" for s, n in ((0, 2), (1, 3)) for b in range(n)]
    assert paths(convert(stages)) == inner

    class Adapted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.adapters = nn.ModuleList([nn.Sequential(nn.Linear(D, 16)) for _ in range(2)])
            self.wide = nn.Linear(D, 256)

    assert paths(convert(nn.ModuleList([Adapted(), Adapted()]))) == ["0", "1"]


def test_a_stack_of_one_layer_is_one_where_nothing_is_repeated() -> None:
    assert paths(convert(nn.ModuleDict({"layers": nn.ModuleList([Block()])}))) == ["layers.0"]
    assert paths(convert(nn.ModuleList([Block()]))) == ["0"]
    # Not a single Linear, and not beside layers that are repeated.
    assert paths(convert(nn.ModuleList([nn.Sequential(nn.Linear(D, D))]))) == []
    both = nn.ModuleDict({"a": nn.ModuleList([Block()]), "b": Model()})
    assert {path[0] for path in paths(convert(both))} == {"b"}


def test_linears_in_a_row_are_no_blocks() -> None:
    assert paths(convert(nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)))) == []


def test_a_model_without_fp8_has_blocks_that_hold_linears() -> None:
    model = Model()
    assert len(paths(model)) == 3
    # What is converted counts, where anything is.
    torch.manual_seed(0)
    both = Two(Model(), Model())
    fp8patch.convert_model(both, only=("a.*",), include=("*",))
    assert {path[0] for path in paths(both)} == {"a"}


def test_a_shared_block_is_found_once() -> None:
    block = Block()
    assert len(paths(convert(nn.ModuleList([block, block, Block()])))) == 2


def test_structures_and_their_variants() -> None:
    blocks = [Block() for _ in range(4)]
    assert len({structure(block) for block in (*blocks, Block(16))}) == 2
    frozen = Block()
    frozen.up.weight.requires_grad_(False)
    assert structure(frozen) != structure(blocks[0])
    for i, block in enumerate(blocks):
        block.layer_idx, block.shift = i, i % 2  # type: ignore[assignment]
    assert variants(blocks) == 2


# -- how they run ----------------------------------------------------------------------------------


def test_compiled_training_is_eager_training() -> None:
    """Bit for bit, over shapes, with evaluation in between; two graphs, static and dynamic."""
    eager, compiled = build(), build()
    found, counter = compile_blocks(compiled)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, compiled)]
    graphs = []
    for shape in ((4, 8), (4, 8), (4, 12), (3, 12), (4, 16), (4, 8)):
        x = torch.randn(*shape, D)
        a, b = (step(m, x, o) for m, o in zip((eager, compiled), optimizers, strict=True))
        assert equal(a, b)
        before = counter.frame_count
        with torch.no_grad(), fp8patch.autocast(backend="emulate"):
            assert torch.equal(eager(x), compiled(x))
        assert counter.frame_count == before
        graphs.append(before)
    assert graphs == [0, 1, 2, 2, 2, 2]  # the first step is watched, and eager
    assert found.left == {}
    assert list(found.structures.values()) == [3]


def test_without_fp8_the_first_step_is_compiled() -> None:
    torch.manual_seed(0)
    model = Model()
    _, counter = compile_blocks(model)
    x = torch.randn(2, 8, D)
    with torch.no_grad():
        model(x)
    assert counter.frame_count == 0
    model(x).sum().backward()
    assert counter.frame_count == 1
    torch._dynamo.reset()
    with fp8patch.autocast(backend="emulate"):
        model(x).sum().backward()
    assert counter.frame_count == 2


def test_a_copy_is_compiled_at_its_first_use() -> None:
    """Its scales are known, so nothing is to be observed; no module has met its bank."""
    model = build()
    x = torch.randn(2, 8, D)
    for _ in range(2):
        step(model, x, torch.optim.SGD(model.parameters(), lr=0.1))
    eager, compiled = copy.deepcopy(model), copy.deepcopy(model)
    found, counter = compile_blocks(compiled)
    assert equal(step(eager, x), step(compiled, x))
    assert counter.frame_count == 1
    assert found.left == {}


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x if mask is None else x * mask)


class MaskedModel(Model):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x, mask=mask)
        return x


def test_memory_of_the_eager_step_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[int] = []
    steps = 0
    monkeypatch.setattr(blocks_calls, "_give_back", lambda: at.append(steps))
    model = build()
    compile_blocks(model)
    for number in range(1, 5):
        steps = number
        step(model, torch.randn(2, 8, D))
    assert at == [2]  # the first is watched


def test_with_a_mask_and_without_are_two_graphs_each() -> None:
    model = MaskedModel(Masked)
    _, counter = compile_blocks(model)
    graphs = []
    for length in (8, 12, 16, 8):
        x = torch.randn(2, length, D)
        for mask in (None, torch.ones(2, length, 1)):
            model(x, mask).sum().backward()
        graphs.append(counter.frame_count)
    assert graphs == [2, 4, 4, 4]


class Caching(Model):
    """What it was told about its cache goes into `told`."""

    def forward(self, x: Tensor, use_cache: bool | None = None, **kwargs: Any) -> Tensor:
        self.told = use_cache
        return super().forward(x)


class Outer(nn.Module):
    """Hands on what its config says, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Caching()

    def forward(self, x: Tensor, use_cache: bool | None = None, cache: Any = None) -> Tensor:
        use_cache = True if use_cache is None else use_cache
        y: Tensor = self.inner(x, use_cache=use_cache, cache=cache)
        return y


def test_training_runs_without_a_cache_unless_it_is_asked_for() -> None:
    model: Any = Outer()
    found, counter = compile_blocks(model)
    assert found.without_cache
    x = torch.randn(2, 8, D)
    for kwargs in ({"use_cache": True}, {"cache": object()}):
        model(x, **kwargs).sum().backward()
        assert model.inner.told is True
        assert counter.frame_count == 0
    with torch.no_grad():
        model(x)
    assert model.inner.told is True
    model(x).sum().backward()
    assert model.inner.told is False
    assert counter.frame_count == 1


def test_what_breaks_is_left_eager_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Breaks(Block):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model = convert(Two(Model(Breaks), Model()))
    found, counter = compile_blocks(model)
    for _ in range(3):
        step(model, torch.randn(2, 8, D), torch.optim.SGD(model.parameters(), lr=0.1))
    (name,) = found.left
    assert name == "a.blocks.0 to a.blocks.2 (Breaks)"
    said = capsys.readouterr().err
    assert said.count("left eager") == 1
    # Where the model has to be changed, and none of Dynamo's hints.
    line = Breaks.forward.__code__.co_firstlineno + 1
    assert f", at forward in test_blocks.py, line {line}." in said
    assert repr(found).startswith(f"CompiledBlocks({name}: 3; b.blocks.0 to ")
    assert f"{name} left eager: " in repr(found)
    assert "TORCHDYNAMO" not in said
    assert "Hint" not in said
    assert counter.frame_count == 1


def test_what_the_model_raises_is_no_reason_to_leave_it_eager(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Raises(Block):
        def forward(self, x: Tensor, wrong: bool = False) -> Tensor:
            if wrong:
                raise ValueError("the model's own")
            return super().forward(x)

    class Wrong(Model):
        wrong = False

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            for block in self.blocks:
                x = block(x, self.wrong)
            return x

    model = convert(Wrong(Raises))
    found, counter = compile_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, torch.randn(2, 8, D), optimizer)
    model.wrong = True
    with pytest.raises(ValueError, match="the model's own"):
        step(model, torch.randn(2, 8, D), optimizer)
    model.wrong = False
    step(model, torch.randn(2, 8, D), optimizer)
    assert found.left == {}
    assert counter.frame_count == 1
    assert "eager" not in capsys.readouterr().err


def test_one_layer_several_times_in_a_list_is_compiled() -> None:
    model = convert(Model())
    model.blocks = nn.ModuleList([model.blocks[0]] * 2)
    found, counter = compile_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, torch.randn(2, 8, D), optimizer)
    assert found.names == ("blocks.0",)
    assert counter.frame_count == 1


def test_one_odd_call_leaves_the_others_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_seen", set())

    class Odd(Block):
        def forward(self, x: Tensor, odd: bool = False) -> Tensor:
            if odd:
                torch._dynamo.graph_break()
            return super().forward(x)

    class Asked(Model):
        odd = False

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            for block in self.blocks:
                x = block(x, self.odd)
            return x

    model = convert(Asked(Odd, 6))
    found, counter = compile_blocks(model)

    def steps(count: int, odd: bool) -> None:
        model.odd = odd
        for _ in range(count):
            step(model, torch.randn(2, 8, D))

    steps(3, odd=False)
    steps(1, odd=True)
    steps(2, odd=False)
    assert found.left == {}
    assert found.compiled == {"blocks.0 to blocks.5 (Odd)": 6}
    assert counter.frame_count == 1
    assert capsys.readouterr().err.count("a call ran eagerly") == 1
    # Not for ever.
    steps(run._MOST_ODD_CALLS - 1, odd=True)
    assert list(found.left) == ["blocks.0 to blocks.5 (Odd)"]
    assert capsys.readouterr().err.count("left eager") == 1


def test_one_that_needs_too_many_graphs_is_left_eager_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "_GRAPHS_A_VARIANT", 1)

    class Counts(Block):
        number = 0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.number

    eager, model = build(Counts, 2), build(Counts, 2)
    with torch._dynamo.config.patch(recompile_limit=2):  # as if a user had lowered it
        found, counter = compile_blocks(model)
        for number in range(1, 6):
            for m in (eager, model):
                m.blocks[0].number = m.blocks[1].number = number
            x = torch.randn(2, 8, D)
            assert equal(step(eager, x), step(model, x))
    assert set(found.left) == {"blocks.0", "blocks.1"}
    assert counter.frame_count == 2


def test_a_frame_that_the_compiler_skips_is_left_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so after the call, with an error that is not of its own kind."""

    def skipped(*args: Any) -> Any:
        raise RuntimeError("torch.compile with fullgraph=True found no compiled frames.")

    monkeypatch.setattr(run.Structure, "compiled", lambda self, kind: skipped)
    torch.manual_seed(0)
    model = Model()
    eager = copy.deepcopy(model)
    found, _ = compile_blocks(model)
    x = torch.randn(2, 8, D)
    assert torch.equal(model(x), eager(x))
    assert len(found.left) == 3


def test_undo_copies_and_calling_it_again() -> None:
    model = build()
    x = torch.randn(2, 8, D)
    found, counter = compile_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, x, optimizer)
    twin = copy.deepcopy(model)
    step(twin, x)
    assert counter.frame_count == 0  # nothing of it is compiled
    _, second = compile_blocks(model)
    step(model, x, optimizer)
    assert (counter.frame_count, second.frame_count) == (0, 1)
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    fp8patch.compile_blocks(model, backend="aot_eager").undo()
    assert all(block._compiled_call_impl is None for block in model.blocks)
    hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    assert hooks == (1, 1)  # those of the conversion
    step(model, x)
    assert second.frame_count == 1
    found.undo()
    assert repr(found) == "CompiledBlocks(no blocks)"
    assert not found.names


def test_hooks_of_a_block_run_around_it() -> None:
    eager, model = build(), build()
    seen: list[Any] = []
    for m in (eager, model):
        m.blocks[1].register_forward_hook(lambda m, a, o: seen.append(type(m)) or o * 2)
        m.blocks[1].register_full_backward_hook(lambda m, i, o: seen.append(o[0].shape))
    _, counter = compile_blocks(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, model)]
    for _ in range(2):
        x = torch.randn(2, 8, D)
        a, b = (step(m, x, o) for m, o in zip((eager, model), optimizers, strict=True))
        assert equal(a, b)
    assert counter.frame_count == 1
    assert len(seen) == 8


def test_another_thread_runs_eagerly_and_ends_no_call() -> None:
    """Its calls lie less deep than ours, as those that an interrupt has left behind do."""
    model = build()
    compile_blocks(model)
    x = torch.randn(2, 8, D)
    found: list[Any] = []

    def beside(module: nn.Module, args: Any) -> None:
        if not found:
            found.append(None)
            thread = threading.Thread(target=lambda: found.append(model(x)))
            thread.start()
            thread.join()
            found.append([call.module for call in blocks_calls._state.calls])

    model.blocks[1].register_forward_pre_hook(beside)
    ours = model(x)
    assert found[2] == [model]
    assert torch.equal(found[1], ours)
    assert blocks_calls._state.calls == []


FROM_USER_CODE = """
  Hint: Do something else.

  Developer debug context: hidden

 For more details about this graph break, please visit: https://example.org

from user code:
   File "/home/x/model.py", line 7, in forward
    return self.inner(x)
   File "/home/x/model.py", line 24, in <lambda>
    act = lambda x: x
   File "{torch}/functional.py", line 3, in norm

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "Call marked as skipped\n  Explanation: It is the builtin `getpid`." + FROM_USER_CODE,
            "Call marked as skipped: It is the builtin `getpid`, at <lambda> in model.py, line 24",
        ),
        (
            "backend='functools.partial(<function inductor at 0x7f>)' raised:\nValueError: no\n"
            '  File "/x/model.py", line 12, in forward\n\nSet TORCHDYNAMO_VERBOSE=1',
            "ValueError: no",
        ),
        (
            "Observed exception\n  Explanation: No handler.\n  Hint: Catch it.\n\n"
            "  Developer debug context: raised exception ValueError('no')\n",
            "Observed exception: No handler: raised exception ValueError('no')",
        ),
        (
            "Branching\n  Explanation: It depends on data.\n\n  The condition:\n"
            '    # File "/x/model.py", line 5, in forward\n',
            "Branching: It depends on data: The condition",
        ),
        ("plain", "plain"),
        ("", "RuntimeError"),
    ],
)
def test_reasons(text: str, said: str) -> None:
    text = text.replace("{torch}", str(Path(torch.__file__).parent))
    assert compiling.reason(RuntimeError(text)) == said
