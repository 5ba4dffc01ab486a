"""`enable` on a GPU with FP8: what runs, what it costs to be injected."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from injected import armed
from torch import Tensor, nn

pytestmark = pytest.mark.gpu


class MLP(nn.Module):
    def __init__(self, depth: int = 4, width: int = 4096) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def steps(model: Any, count: int, by_hand: bool = False) -> list[float]:
    """Seconds of each step, the GPU waited for."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, times = torch.randn(4096, 4096, device="cuda"), []
    for _ in range(count):
        start = time.perf_counter()
        if by_hand:
            with torch.autocast("cuda", torch.bfloat16):
                output = model(x)
            output = output.float()
        else:
            output = model(x)
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def test_fp8_runs_and_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = MLP().cuda()
    with armed(backend="fp8", log_every=2) as run:
        steps(model, 6)
        run.finish()
        assert run.execution == "fp8"
        assert run.record.coverage.totals()["fp8_calls"] == 4
        assert len(run.record.durations) == 6
        assert run.record.peak_memory()[0] > 2**30
    said = capsys.readouterr().err
    assert "reserved on the GPU" in said
    assert "4 of 4 GEMM calls" in said


def test_small_layers_are_left_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    model = MLP(2, 64).cuda()
    with armed(backend="auto", tokens=512) as run:
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        assert not run.models
    assert "2 slower" in capsys.readouterr().err


def test_injected_bf16_costs_nothing() -> None:
    model = MLP().cuda()
    by_hand = statistics.median(steps(model, 30, by_hand=True)[10:])
    with armed(backend="bf16"):
        injected = statistics.median(steps(model, 30)[10:])
    # The aim is 1 %; two runs of the same code differ by about that.
    assert injected < 1.02 * by_hand
