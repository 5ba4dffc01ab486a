"""What the tests of save and load share: models to save, and what to compare of them."""

from pathlib import Path
from typing import Any

import resume_cases as cases
from torch import Tensor, nn


def trained(architecture: str = "llama", recipe: str = "delayed", steps: int = 2) -> Any:
    model, optimizer = cases.start(f"{architecture}-{recipe}")
    cases.train(model, optimizer, 0, steps * cases.ACCUMULATION)
    return model


def state(model: Any) -> dict[str, Any]:
    return cases.outcome(model, [])  # type: ignore[no-any-return]


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


class Plain(nn.Module):
    """Not of transformers; two of its weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(tokens)))  # type: ignore[no-any-return]
