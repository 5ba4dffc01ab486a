"""Which rows Inductor is told to read once (blocks/wide_rows.py)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.utils
from functorch.compile import make_boxed_func
from quiet import FRESH, INDUCTOR
from torch import nn
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V
from torch.nn import functional as F

import fp8patch
from fp8patch import messages
from fp8patch.blocks import compiling, wide_rows

pytestmark = [*INDUCTOR, FRESH]


def features(width: int, hint: ReductionHint) -> Any:
    return SimpleNamespace(reduction_numel=width, numel=1 << 20, get_reduction_hint=lambda: hint)


def once(width: int, hint: ReductionHint = ReductionHint.INNER, cooperative: bool = False) -> bool:
    sizes = SimpleNamespace(
        statically_known_leq=lambda a, b: a <= b, optimization_hint=lambda *_: 32
    )
    with V.set_graph_handler(SimpleNamespace(sizevars=sizes)):
        choices: Any = wide_rows._choices()
        return bool(choices.should_use_persistent_reduction(features(width, hint), cooperative))


@pytest.mark.parametrize("width", [768, 1280, 8192])
def test_rows_of_models_are_read_once(width: int) -> None:
    assert once(width)


def test_what_does_not_fit_is_left_to_inductor() -> None:
    assert not once(8193)
    assert not once(4096, ReductionHint.OUTER_TINY)
    # (One program of several that share a row: Inductor's own limit.)
    assert not once(4096, cooperative=True)


@pytest.mark.parametrize("setting", [{"persistent_reductions": False}, {"multi_kernel": 1}])
def test_settings_of_inductor_stand(setting: dict[str, Any]) -> None:
    with torch._inductor.config.patch({f"triton.{name}": v for name, v in setting.items()}):
        assert once(8192) is ("multi_kernel" in setting)
        assert not once(16385)


def inner(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Have the classes of Inductor's choices collected instead of compiling anything."""
    seen: list[type] = []

    def record(graph: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(V.choices))
        return make_boxed_func(graph)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", record)
    return seen


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_blocks_are_compiled_so_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = inner(monkeypatch)
    model: Any = fp8patch.convert_model(Stack(), include=("*",))
    fp8patch.compile_blocks(model)
    for _ in range(2):
        with fp8patch.autocast(backend="emulate"):
            y = model(torch.randn(16, 32, requires_grad=True))
        y.sum().backward()
    assert [each.__name__ for each in seen] == ["WideRows", "WideRows"]
    assert type(V.choices) is InductorChoices


def test_choices_of_somebody_else_stay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_seen", set())
    seen = inner(monkeypatch)

    class Theirs(InductorChoices):
        pass

    with V.set_choices_handler(Theirs()):
        wide_rows.compile_inner(lambda: None)
    assert seen == [Theirs]
    assert "choices of somebody else's already" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "ours"])
def test_inductors_own_code(ours: bool) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (1280,))

    def stock(graph: Any, inputs: Any) -> Any:
        return torch._inductor.compile_fx.compile_fx(graph, inputs)

    def compiled(graph: Any, inputs: Any) -> Any:
        return compiling.inductor(graph, inputs, keep_less=False)

    torch._dynamo.reset()
    x = torch.randn(64, 1280, device="cuda")
    with torch._inductor.config.patch(fx_graph_cache=False):
        run = torch.compile(norm, backend=compiled if ours else stock)
        result, (code, *_) = torch._inductor.utils.run_and_get_code(run, x)
    assert ("triton_per_" in code) is ours
    assert torch.allclose(result, norm(x), atol=1e-5)
