"""LayerNorm: narrow output where every reader is a GEMM, the stock one everywhere else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8patch
from fp8patch import numerics
from fp8patch.modules.norm import Float8LayerNorm

D = 32
BF16, FP32 = torch.bfloat16, torch.float32


class PreLN(nn.Module):
    """The norm feeds GEMMs; the residual stream passes it by."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.gate, self.down = nn.Linear(D, 64), nn.Linear(D, 64), nn.Linear(64, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        assert h.shape[-1] == D  # looking at the shape is not reading
        return x + self.down(self.up(h) * torch.sigmoid(self.gate(h)))


class PostLN(PreLN):
    """The norm's output is the residual stream."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return h + self.down(self.up(h))


class Returned(PreLN):
    """The norm's output goes out beside the result."""

    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        return {"result": x + self.down(self.up(h)), "hidden": (h,)}


class Last(PreLN):
    """The norm comes last, as in an encoder."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x)))


class Matmul(PreLN):
    """A tied head: the norm's output meets a matrix that is no module's."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.down(self.up(h)) @ self.down.weight + h @ self.down.weight


class Pooled(PreLN):
    """One token of the norm's output is taken out by index."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.down(self.up(h))[:, 0] + h[:, 0]


def build(kind: type[nn.Module], norm_output: Any = "auto") -> Any:
    torch.manual_seed(0)
    recipe = fp8patch.Recipe(norm_output=norm_output)
    model = fp8patch.convert_model(kind(), recipe, include=("*",))
    assert type(model.norm) is Float8LayerNorm
    return model


def watch(model: Any) -> list[Tensor]:
    """What the norm returns from now on, one a call; kept as it is, or this would be a reader."""
    seen: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    return seen


def step(model: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", BF16), fp8patch.autocast(backend="emulate"):
        out = model(x)
    result = out["result"] if isinstance(out, dict) else out
    result.float().sum().backward()
    return out


def tokens() -> Tensor:
    return torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("kind", "narrow"),
    [(PreLN, True), (Matmul, True), (PostLN, False), (Returned, False), (Last, False)]
    + [(Pooled, False)],
)
def test_the_output_is_narrow_where_only_gemms_read_it(kind: type[nn.Module], narrow: bool) -> None:
    model = build(kind)
    seen = watch(model)
    for _ in range(3):
        step(model, tokens())
    # The first step is the one that looks.
    assert [t.dtype for t in seen] == [FP32, *([BF16 if narrow else FP32] * 2)]
    assert torch.equal(seen[0].to(seen[1].dtype), seen[1])


@pytest.mark.parametrize("kind", [Returned, Last])
def test_what_the_user_gets_can_become_an_array(kind: type[nn.Module]) -> None:
    model = build(kind)
    for _ in range(3):
        out = step(model, tokens())
        hidden = out["hidden"][0] if isinstance(out, dict) else out
        assert hidden.detach().numpy().dtype == "float32"


def test_an_evaluation_in_the_first_step_tells_nothing() -> None:
    """Nobody watches there who else reads a norm."""
    model = build(PreLN)
    seen = watch(model)
    x = torch.randn(4, D)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", BF16), fp8patch.autocast(backend="emulate"):
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
        optimizer.step()
        model(x)
    assert [t.dtype for t in seen] == [FP32, FP32, BF16]


@pytest.mark.parametrize("kind", [PreLN, PostLN, Returned])
@pytest.mark.parametrize(("norm_output", "dtype"), [("bf16", BF16), ("fp32", FP32)])
def test_the_recipe_decides(kind: type[nn.Module], norm_output: str, dtype: torch.dtype) -> None:
    model = build(kind, norm_output)
    seen = watch(model)
    for _ in range(2):
        step(model, tokens())
    assert {t.dtype for t in seen} == {dtype}


def test_off_is_stock_bit_for_bit() -> None:
    model = build(PreLN)
    stock = nn.LayerNorm(D)
    x = tokens()
    for _ in range(2):
        step(model, x)
    for autocast in (None, BF16):
        with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
            got, expected = model.norm(x), stock(x)
            with fp8patch.autocast(backend="emulate"), fp8patch.autocast(enabled=False):
                inner = model.norm(x)
        for y in (got, inner):
            assert y.dtype == expected.dtype
            assert torch.equal(y, expected)


def test_without_torch_autocast_the_dtype_is_the_inputs() -> None:
    model = build(PreLN)
    seen = watch(model)
    for _ in range(2):
        with fp8patch.autocast(backend="emulate"):
            model(tokens()).sum().backward()
    assert [t.dtype for t in seen] == [FP32, FP32]


def test_statistics_are_fp32_and_gradients_follow_the_stock_norm() -> None:
    model, x = build(PreLN), tokens() + 100.0  # BF16 statistics would lose this mean
    for _ in range(2):
        model.zero_grad()
        step(model, x)
    ours = model.norm.weight.grad.clone()
    model.zero_grad()
    with torch.autocast("cpu", BF16):
        model(x).float().sum().backward()
    assert ours.dtype == FP32
    assert numerics.sqnr(model.norm.weight.grad, ours) > 15


def test_a_norm_called_outside_its_root_stays_wide() -> None:
    """Nobody can see who reads it."""
    model = build(PreLN)
    for _ in range(2):
        with torch.autocast("cpu", BF16), fp8patch.autocast(backend="emulate"):
            h = model.norm(tokens())
            y = model.down(model.up(h))
        y.float().sum().backward()
    assert h.dtype == FP32


def test_by_itself() -> None:
    norm = Float8LayerNorm(D, recipe=fp8patch.Recipe(norm_output="bf16"))
    x = tokens()
    with torch.autocast("cpu", BF16), fp8patch.autocast(backend="emulate"):
        assert norm(x).dtype == BF16
    assert torch.equal(norm(x), nn.LayerNorm(D)(x))
