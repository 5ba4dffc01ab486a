"""Runs made to fail in FP8, each in one layer of its own, that train well in BF16."""

import json
from pathlib import Path
from typing import Any

import torch
from injected import armed
from torch import Tensor, nn

WIDTH, DEPTH, STEPS = 32, 4, 40
CALM, AT = 10, 2


class ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


class Block(nn.Module):
    """Pre-LN MLP with a residual; `trouble` is what it does to one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH)
        self.trouble = ""

    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.norm(x)
        if self.trouble == "outlier":
            h = torch.cat([1e4 * h[:, :1], 0.1 * h[:, 1:]], 1)
        large = 1e5 if self.trouble == "spike" and step % 4 == 3 else 1.0
        h = torch.tanh(self.up(h * large) / large)
        if self.trouble == "gradients" and step >= CALM:
            # Of `down` alone: what goes on below it is as large as ever.
            return x + ScaleGrad.apply(self.down(ScaleGrad.apply(h, 1e6)), 1e-6)
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self, trouble: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        troubled: Any = self.blocks[AT]
        troubled.trouble = trouble
        if trouble == "outlier":
            with torch.no_grad():
                troubled.up.weight[:, 0] *= 1e-4
                troubled.up.weight[:, 1:] *= 10
            # One step of AdamW would be a thousand times its size.
            fixed = torch.tensor([0.0] + [1.0] * (WIDTH - 1))
            troubled.up.weight.register_hook(lambda grad: grad * fixed)

    def forward(self, x: Tensor, step: int, target: Tensor) -> Tensor:
        """The loss."""
        for block in self.blocks:
            x = block(x, step)
        return (x.float() - target).square().mean()


def train(trouble: str, recipe: Path | str | None, report: Path | None = None) -> dict[str, Any]:
    """40 steps towards a fixed function; `recipe=None` is BF16. Losses, and block 2's weights."""
    torch.manual_seed(0)
    teacher = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    model = Net(trouble)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-30, weight_decay=0.0)
    losses = []
    run: Any = armed(
        backend="bf16" if recipe is None else "emulate",
        report=report,
        **({} if recipe is None else {"recipe": str(recipe)}),
    )
    with run as armed_run:
        for step in range(STEPS):
            x = torch.randn(64, WIDTH)
            loss = model(x, step, x + torch.tanh(x @ teacher))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        armed_run.finish()
    weights = torch.cat([p.detach().reshape(-1) for p in model.blocks[AT].parameters()])
    values = json.loads(report.read_text()) if report is not None else {}
    return {"losses": losses, "weights": weights, "report": values}
