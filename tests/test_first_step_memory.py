"""What the first, watched step keeps for backward (modules/again.py)."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8patch
from fp8patch import numerics
from fp8patch.modules.again import find_again
from fp8patch.slots import Slot

D = 32


class Gelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.up(x)))
        return y


class GeluTanh(Gelu):
    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class Silu(Gelu):
    def activation(self, x: Tensor) -> Tensor:
        return F.silu(x)


class Relu(Gelu):
    """Whose argument nobody keeps."""

    def activation(self, x: Tensor) -> Tensor:
        return F.relu(x)


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 64), nn.Linear(D, 64), nn.Linear(64, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Of one head, whose output is joined by views alone on a CPU as well."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block, copy.deepcopy(block)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "gelu": Gelu,
    "gelu tanh": GeluTanh,
    "silu": Silu,
    "swiglu": SwiGlu,
    "attention": Attention,
}


def first_forward(
    block: Callable[[], nn.Module],
    recipe: str | fp8patch.Recipe = "delayed",
    compiled: bool = True,
) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model: Any = fp8patch.convert_model(Model(block()), recipe, include=("*",))
    if compiled:
        fp8patch.compile_blocks(model, backend="eager")
    x = torch.randn(2, 16, D)
    with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
        return model, model(x)


def gemm_nodes(y: Tensor) -> Iterator[Any]:
    pending, seen = [y.grad_fn], set[Any]()
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
        if node.name() == "Float8GemmsBackward":
            yield node


def transposes(y: Tensor) -> int:
    """How many transposes of inputs are kept."""
    return sum(bool(node.saved_tensors[2].numel()) for node in gemm_nodes(y))


def grads(model: nn.Module, y: Tensor) -> list[Tensor]:
    y.square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_gradients_are_the_same_to_the_last_bit(name: str, recipe: str) -> None:
    model, y = first_forward(BLOCKS[name], recipe)
    gemms = len(list(gemm_nodes(y)))
    assert transposes(y) == gemms - 2
    less = grads(model, y)
    model, y = first_forward(BLOCKS[name], recipe, compiled=False)
    assert transposes(y) == gemms
    kept = grads(model, y)
    assert len(less) == len(kept) == 2 * gemms
    assert all(map(torch.equal, less, kept))


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_read_is_kept_anyway(name: str) -> None:
    model, y = first_forward(BLOCKS[name])
    read = [tensor for node in gemm_nodes(y) for tensor in node.saved_tensors[6:]]
    others = set()
    pending, seen = [y.grad_fn], set[Any]()
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
        if node.name() != "Float8GemmsBackward":
            for attribute in ("_saved_self", "_saved_other", "_saved_output"):
                tensor = getattr(node, attribute, None)
                if isinstance(tensor, Tensor):
                    others.add(tensor.untyped_storage().data_ptr())
    assert read
    assert {tensor.untyped_storage().data_ptr() for tensor in read} <= others


def test_where_nothing_keeps_the_argument_the_transpose_is_kept() -> None:
    _, y = first_forward(Relu)
    assert transposes(y) == 4


def test_the_second_step_keeps_transposes() -> None:
    model, y = first_forward(Gelu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    y.sum().backward()
    optimizer.step()
    with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
        y = model(torch.randn(2, 16, D))
    assert transposes(y) == 4


@pytest.mark.parametrize("change", [{"scaling": "rowwise"}, {"fprop": "bf16"}])
def test_recipes_that_keep_them(change: dict[str, str]) -> None:
    _, y = first_forward(Gelu, fp8patch.Recipe(**change))  # type: ignore[arg-type]
    assert transposes(y) == 4


class Checkpointed(Gelu):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_checkpointing_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []
    plain = fp8patch.modules.again._kept
    monkeypatch.setattr(
        fp8patch.modules.again, "_kept", lambda input: asked.append(input) or plain(input)
    )
    model, y = first_forward(Checkpointed)
    assert not asked
    assert len(grads(model, y)) == 8


class Edited(Gelu):
    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        outer = F.gelu(inner)
        with torch.no_grad():
            inner.add_(1)
        return self.down(outer)


def test_what_was_written_to_since_is_not_read() -> None:
    _, y = first_forward(Edited)
    assert transposes(y) == 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Clamped(Gelu):
    """What the activation returns is edited where autograd does not see it."""

    def forward(self, x: Tensor) -> Tensor:
        outer = F.gelu(self.up(x))
        with torch.no_grad():
            outer.clamp_(-0.1, 0.1)
        return self.down(outer)


class Zeroed(SwiGlu):
    """The same through a view."""

    def forward(self, x: Tensor) -> Tensor:
        outer = F.silu(self.gate(x)) * self.up(x)
        outer.detach()[..., :8].zero_()
        return self.down(outer)


class Scaled(Gelu):
    """A factor has no gradient, and the other one is not kept."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * torch.full((2 * D,), 0.5))


class PartCheckpointed(Gelu):
    def forward(self, x: Tensor) -> Tensor:
        outer = checkpoint(lambda: F.gelu(self.up(x)), use_reentrant=False)
        return self.down(outer)


class AttentionCheckpointed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        def attended() -> Tensor:
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
            return F.scaled_dot_product_attention(q, k, v)

        out = checkpoint(attended, use_reentrant=False)
        return self.proj(out.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize(
    "block", [Clamped, Zeroed, Scaled, PartCheckpointed, AttentionCheckpointed]
)
def test_what_can_not_be_made_again_is_kept(block: Callable[[], nn.Module]) -> None:
    calls: list[nn.Module] = []
    for compiled in (True, False):
        calls.clear()
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_: calls.append(module) if isinstance(module, nn.Linear) else None
        )
        model, y = first_forward(block, compiled=compiled)
        handle.remove()
        # Nothing was computed for the question.
        assert len(calls) == len([m for m in model.modules() if isinstance(m, nn.Linear)])
        found = grads(model, y)
        if compiled:
            less = found
    assert all(map(torch.equal, less, found))


def test_the_scale_is_that_of_the_forward() -> None:
    slot = Slot(torch.tensor(3.0), torch.zeros(()), torch.zeros(4, dtype=torch.int64))
    x = torch.randn(16, D, requires_grad=True)
    again = find_again(F.gelu(x), slot, 448.0, live=False)
    assert again is not None
    wanted = numerics.quantize(F.gelu(x.detach()), slot.scale.clone(), numerics.E4M3)
    slot.scale.fill_(5.0)
    assert torch.equal(again.make(*again.read).float(), wanted.t().float())


class EditedLater(Gelu):
    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        outer = self.down(F.gelu(inner))
        with torch.no_grad():
            inner.add_(1)
        return outer


def test_what_is_written_to_later_raises_as_in_stock_pytorch() -> None:
    _, y = first_forward(EditedLater)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
