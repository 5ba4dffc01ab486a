"""Copies of biases: whatever changes a bias, the next forward adds the new one.

On the CPU: its `torch._scaled_mm` adds a bias as the GPU's does. What is compared is a run with
copies and one that casts each bias where it is used, bit for bit.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8patch
from fp8patch import amp
from fp8patch.modules import base, bias_copies

WIDTH = 32
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
Route = Callable[[Any, torch.optim.Optimizer], None]


@pytest.fixture(autouse=True)
def fp8_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a region be "fp8", and not "emulate", without a GPU."""
    find = base.find_obstacle

    def anywhere(*args: Any) -> str | None:
        found = find(*args)
        return None if found == "device" else found

    monkeypatch.setattr(amp, "resolve_backend", lambda *_: "fp8")
    monkeypatch.setattr(base, "find_obstacle", anywhere)


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    for layer in layers:
        layer.bias.data = layer.bias.data.to(dtype)
    return fp8patch.convert_model(nn.Sequential(*layers))


def forward(model: Any, x: Tensor = X) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="fp8"):
        output: Tensor = model(x)
    return output


def step(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    output = forward(model)
    output.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return output.detach()


def trained(dtype: torch.dtype = torch.float32, steps: int = 4) -> tuple[Any, Any]:
    model = model_of(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def in_use(model: Any) -> list[bool]:
    """Whether each layer would add its copy, were it called now."""
    return [bias_copies.current(layer, layer.bias) is not None for layer in model]


def in_place(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model[1].bias.add_(3)


def by_data(model: Any, optimizer: Any) -> None:
    model[1].bias.data.add_(3)


def new_data(model: Any, optimizer: Any) -> None:
    model[1].bias.data = model[1].bias.data + 3


def replaced(model: Any, optimizer: Any) -> None:
    model[1].bias = nn.Parameter(model[1].bias.detach() + 3)


def frozen_by_data(model: Any, optimizer: Any) -> None:
    model[1].bias.requires_grad_(False)
    by_data(model, optimizer)


def loaded(model: Any, optimizer: Any) -> None:
    state = {name: value + 3 for name, value in model.state_dict().items() if "bias" in name}
    model.load_state_dict(state, strict=False)


def assigned(model: Any, optimizer: Any) -> None:
    state = {name: value + 3 for name, value in model.state_dict().items() if "bias" in name}
    model.load_state_dict(state, strict=False, assign=True)


def tied(model: Any, optimizer: Any) -> None:
    model[2].bias = model[1].bias
    by_data(model, optimizer)


def other_dtype(model: Any, optimizer: Any) -> None:
    model[1].bias = nn.Parameter((model[1].bias.detach() + 3).half())


def none(model: Any, optimizer: Any) -> None:
    model[1].bias = None


def stepped(model: Any, optimizer: Any) -> None:
    for layer in model:
        layer.bias.grad = torch.ones_like(layer.bias)
    optimizer.step()
    optimizer.zero_grad()


ROUTES = (
    in_place, by_data, new_data, replaced, frozen_by_data, loaded, assigned, tied, other_dtype,
    none, stepped,
)  # fmt: skip
# Seen even in the middle of a forward, after the copies were made: there is a trace of them.
# (Loading outdates the weight, and such a call takes the long way.)
TRACED = (in_place, new_data, replaced, other_dtype)


def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias_copies, "current", lambda *_: None)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_a_bias_that_changed_between_forwards(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    before = step(model, optimizer)
    route(model, optimizer)
    outputs = [step(model, optimizer) for _ in range(3)]
    assert not torch.equal(before, outputs[0])
    without_copies(monkeypatch)
    model, optimizer = trained()
    assert torch.equal(step(model, optimizer), before)
    route(model, optimizer)
    for output in outputs:
        assert torch.equal(step(model, optimizer), output)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_the_same_with_copies_that_are_never_renewed(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: what the test above would see."""
    expected = []
    for faulty in (False, True):
        model, optimizer = trained()
        step(model, optimizer)
        if faulty:
            monkeypatch.setattr(bias_copies, "refresh", lambda _: None)
            monkeypatch.setattr(bias_copies, "current", lambda module, _: module._fp8_bias.copy)
        route(model, optimizer)
        expected.append(step(model, optimizer))
    assert not torch.equal(*expected)


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("route", TRACED, ids=lambda route: route.__name__)
def test_a_bias_that_changes_in_the_middle_of_a_forward(
    route: Route, faulty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    if faulty:
        monkeypatch.setattr(bias_copies, "current", lambda module, _: module._fp8_bias.copy)
    handle = model[0].register_forward_pre_hook(lambda *_: route(model, optimizer))
    changed = step(model, optimizer)
    handle.remove()
    without_copies(monkeypatch)
    model, optimizer = trained()
    model[0].register_forward_pre_hook(lambda *_: route(model, optimizer))
    assert torch.equal(changed, step(model, optimizer)) is not faulty


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_copies_are_used_where_a_bias_would_be_cast(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[bool]] = []
    model, optimizer = trained(dtype)
    model[2].register_forward_hook(lambda *_: seen.append(in_use(model)))
    outputs = [step(model, optimizer) for _ in range(2)]
    assert seen == [[dtype != torch.bfloat16] * 3] * 2
    assert model[1]._fp8_bias is None or model[1]._fp8_bias.copy.dtype == torch.bfloat16
    without_copies(monkeypatch)
    model, optimizer = trained(dtype)
    for output in outputs:
        assert torch.equal(step(model, optimizer), output)


def test_all_copies_are_one_launch_of_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    launches: list[int] = []
    copy_all = torch._foreach_copy_

    def counted(copies: list[Tensor], biases: list[Tensor]) -> Any:
        launches.append(len(copies))
        return copy_all(copies, biases)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    step(model, optimizer)
    step(model, optimizer)
    assert launches == [3, 3]


class Skips(nn.Module):
    """Two layers, of which the second is not always called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if self.skips else self.second(x)


def test_what_no_call_asks_for_is_not_copied() -> None:
    torch.manual_seed(0)
    model: Any = fp8patch.convert_model(Skips())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def in_step(skips: bool) -> bool:
        model.skips = skips
        step(model, optimizer)
        now = model._fp8_bank.entry
        assert model.first._fp8_bias.entry == now
        return bool(model.second._fp8_bias.entry == now)

    for _ in range(4):
        step(model, optimizer)
    # (The copy of an entry is made before anybody can know whether it will be asked for.)
    plan = [False, True, True, True, False, False]
    assert [in_step(skips) for skips in plan] == [True, True, False, False, False, True]


def test_an_evaluation_casts_where_a_bias_is_used() -> None:
    """Several may run between two entries, and biases may be loaded in between."""
    model, optimizer = trained()
    with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="fp8"):
        with torch.no_grad():
            before = model(X)
            by_data(model, optimizer)
            assert not torch.equal(before, model(X))


def test_the_gradient_goes_to_the_parameter() -> None:
    model, _ = trained()
    forward(model).float().sum().backward()
    for layer in model:
        assert layer.bias.grad is not None
        assert layer.bias.grad.dtype == torch.float32
    assert torch.equal(model[2].bias.grad, torch.full((WIDTH,), float(len(X))))


def test_copies_stay_behind() -> None:
    model, _ = trained()
    twin = copy.deepcopy(model)
    assert twin[0]._fp8_bias is None
    assert not any("bias" in key and key.startswith("_fp8") for key in model.state_dict())
    fp8patch.revert_model(model)
    assert not any(key.startswith("_fp8") for key in vars(model[0]))


def test_an_output_dtype_that_no_kernel_adds_a_bias_to() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        with fp8patch.autocast(backend="fp8"):
            model(X).square().mean().backward()
        optimizer.step()
    assert all(layer._fp8_ready is not None and layer._fp8_bias is None for layer in model)
