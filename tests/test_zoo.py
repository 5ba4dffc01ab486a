"""The zoo itself: every architecture builds, trains one step stock, and is what its tables say."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import nn


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def count_calls(model: nn.Module) -> Counter[str]:
    """Counts, from here on, how often each Linear or Conv1D is called."""
    calls: Counter[str] = Counter()

    def hook(path: str) -> Callable[..., None]:
        def count(module: nn.Module, args: Any, output: Any) -> None:
            calls[path] += 1

        return count

    for path, module in model.named_modules():
        if is_linear(module):
            module.register_forward_hook(hook(path))
    return calls


def tie_groups(model: nn.Module) -> set[frozenset[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def train_step(entry: zoo.Entry, model: nn.Module, bf16: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = zoo.loss(zoo.run(model, entry.inputs(model)))
    loss.backward()
    return loss.detach()


def test_the_zoo_is_large_enough() -> None:
    assert len(zoo.ENTRIES) >= 85
    for table in (zoo.BYPASSED, zoo.REPEATED, zoo.TIES, zoo.STOCK_FAILS):
        assert set(table) <= set(zoo.ENTRIES)


@pytest.mark.parametrize("name", zoo.ENTRIES)
def test_entry_trains_stock_under_bf16_autocast(name: str) -> None:
    entry = zoo.ENTRIES[name]
    model = entry.build()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert tie_groups(model) == zoo.tie_groups(name)
    if name in zoo.STOCK_FAILS:
        with pytest.raises(RuntimeError) as caught:
            train_step(entry, model, bf16=True)
        assert str(caught.value) in zoo.STOCK_FAILS[name]
    calls = count_calls(model)
    loss = train_step(entry, model, bf16=name not in zoo.STOCK_FAILS)
    assert torch.isfinite(loss)
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())

    linears = {path for path, module in model.named_modules() if is_linear(module)}
    assert linears, "nothing to convert"
    assert linears - set(calls) == {path for path in linears if zoo.bypassed(name, path)}
    assert {path for path in linears if calls[path] > 1} == {
        path for path in linears if zoo.repeated(name, path)
    }

    again = train_step(entry, entry.build(), bf16=name not in zoo.STOCK_FAILS)
    assert torch.equal(loss, again), "not deterministic: is a dropout or jitter left on?"
