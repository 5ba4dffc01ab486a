"""A norm makes the cast that its reader would make: the same bits, and one launch less.

There is no GPU here, so the norms are told to take the kernel's path, with its CPU form.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8patch
from fp8patch.modules import gemms, norm_cast, norm_function
from fp8patch.modules import norm as norms

D = 32
BF16 = torch.bfloat16


class Block(nn.Module):
    """q, k and v of one norm; a gate and a residual stream of another, as in post-LN."""

    edited = False
    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(D), nn.RMSNorm(D, 1e-5)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.up, self.down = nn.Linear(D, 64), nn.Linear(64, D)

    def attend(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return x + torch.relu(self.q(h)) * self.k(h) + self.v(h)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x)
        h = self.second(x)
        if self.edited:
            h.mul_(2.0)
        return h + self.down(torch.relu(self.up(h)))


def build(recipe: Any = None, **flags: bool) -> Any:
    torch.manual_seed(0)
    block = Block()
    block.__dict__.update(flags)
    return fp8patch.convert_model(block, recipe, include=("*",))


def steps(model: Any, count: int, first: int = 0) -> list[Tensor]:
    """Train; everything that the last step has left."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(first, first + count):
        g = torch.Generator().manual_seed(number)
        x = (torch.randn(2, 5, D, generator=g) * (number + 1)).requires_grad_()
        optimizer.zero_grad()
        with torch.autocast("cpu", BF16), fp8patch.autocast(backend="emulate"):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()
    slots = [t for _, state in model._fp8_bank.state() for t in state]
    gradients = [p.grad for p in model.parameters()]
    return [y.detach(), x.grad, *gradients, *model.state_dict().values(), *slots]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many casts of inputs were made by a norm, and how many by a GEMM module."""
    count = {"norm": 0, "gemm": 0}
    by_norm, by_gemm = norm_function.norm_quantize, gemms.cast_input

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            count[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(norms, "_has_kernel", lambda input: True)
    monkeypatch.setattr(norm_function, "norm_quantize", counted("norm", by_norm))
    monkeypatch.setattr(gemms, "cast_input", counted("gemm", by_gemm))
    return count


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a function with norms that make no casts."""

    def run(function: Any, *args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(norms, "cast_for_reader", lambda *args: None)
            return function(*args)

    return run


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_same_bits_with_fewer_casts(
    made: dict[str, int], apart: Any, checkpointed: bool
) -> None:
    expected = apart(steps, build(checkpointed=checkpointed), 4)
    assert made["norm"] == 0
    made["gemm"] = 0
    model = build(checkpointed=checkpointed)
    assert same(steps(model, 4), expected)
    assert model._fp8_bank.norm_readers == {"first": "q", "second": "up"}
    # The step that looks; then `down` alone casts (and, recomputed, what it is told to).
    again = 1 + checkpointed
    assert made["norm"] == 3 * (again + 1)
    assert made["gemm"] == (3 * again + 2) + 3
    assert model.first._fp8_ready is not None


def test_an_edited_output_is_cast_as_it_is(made: dict[str, int], apart: Any) -> None:
    expected = apart(steps, build(edited=True), 3)
    model = build(edited=True)
    assert same(steps(model, 3), expected)
    assert model._fp8_bank.norm_readers == {"first": "q"}
    # Edited from now on only: the cast is there, and is not taken.
    late, other = build(), build()
    steps(late, 2)
    apart(steps, other, 2)
    late.edited = other.edited = True
    assert torch.equal(steps(late, 1, 2)[0], apart(steps, other, 1, 2)[0])


def test_evaluation_in_between(made: dict[str, int], apart: Any) -> None:
    def run(model: Any) -> list[Tensor]:
        steps(model, 2)
        with torch.no_grad(), torch.autocast("cpu", BF16), fp8patch.autocast(backend="emulate"):
            y = model(torch.ones(3, 4, D))
        return [y, *steps(model, 2, 2)]

    expected = apart(run, build())
    assert same(run(build()), expected)
    assert made["norm"] == 2 * 4


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_a_scale_that_takes_a_second_look_is_the_readers_own(
    made: dict[str, int], apart: Any, recipe: str
) -> None:
    expected = apart(steps, build(recipe), 3)
    assert same(steps(build(recipe), 3), expected)
    assert made["norm"] == 0


def test_a_gemm_in_high_precision_needs_no_cast(made: dict[str, int]) -> None:
    steps(build(fp8patch.Recipe(fprop="bf16", wgrad="bf16")), 3)
    assert made["norm"] == 0
    model = build(fp8patch.Recipe(wgrad="bf16"))
    steps(model, 3)
    assert made["norm"] == 2 * 2
    assert model.first._fp8_ready.spec[1].transpose is False


def test_a_frozen_reader_needs_no_transpose(made: dict[str, int]) -> None:
    model = build()
    for linear in (model.q, model.k, model.v):
        linear.requires_grad_(False)
    steps(model, 2)
    assert model.first._fp8_ready.spec[1].transpose is False
    assert model.second._fp8_ready.spec[1].transpose is True


def test_copies_and_resumed_runs_cast_from_their_first_step(
    made: dict[str, int], tmp_path: Path
) -> None:
    model = build()
    steps(model, 3)
    fp8patch.save(model, tmp_path)
    clone, resumed = copy.deepcopy(model), fp8patch.load(tmp_path, model=Block())
    expected = steps(model, 2, 3)
    for other in (clone, resumed):
        made.update(norm=0, gemm=0)
        found = steps(other, 2, 3)
        assert made == {"norm": 4, "gemm": 2}
        assert same(found, expected)


def test_the_terms_are_those_of_the_reader(made: dict[str, int]) -> None:
    """A planted fault: a cast under other terms is not taken."""
    model = build()
    steps(model, 2)
    cast = model.first._fp8_ready.spec[1]
    assert cast.slot.amax is model.q._fp8_input_slot.amax
    other = norm_cast.input_key(cast.slot, model.q._fp8_ready.spec, not cast.transpose)
    spec, _, dtypes = model.first._fp8_ready.spec
    wrong = spec, cast._replace(key=other), dtypes
    model.first._fp8_ready = model.first._fp8_ready._replace(spec=wrong)
    made.update(norm=0, gemm=0)
    steps(model, 1, 2)
    assert made == {"norm": 2, "gemm": 2}


@pytest.mark.parametrize("absent", ["meta", "flat"])
def test_a_reader_whose_weight_is_not_there_yet(absent: str, made: dict[str, int]) -> None:
    """accelerate's offloading, and FSDP1 with the norm in another unit."""
    model = build()
    steps(model, 2)
    x, whole = torch.randn(2, 5, D), model.q.weight
    away = whole.detach().flatten()[:8] if absent == "flat" else whole.detach().to("meta")

    def gather(module: nn.Module, args: Any) -> None:
        module._parameters["weight"] = whole

    def release(module: nn.Module, args: Any, output: Any) -> None:
        module._parameters["weight"] = nn.Parameter(away)

    outputs = []
    for hooked in (False, True):
        if hooked:
            model.q.register_forward_pre_hook(gather)
            model.q.register_forward_hook(release)
            release(model.q, None, None)
        with torch.no_grad(), torch.autocast("cpu", BF16), fp8patch.autocast(backend="emulate"):
            outputs.append(model(x))
    assert torch.equal(*outputs)
    assert model.q._fp8_device == torch.device("cpu")
