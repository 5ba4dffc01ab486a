"""A stack of pre-LN transformer layers in plain PyTorch, as a user writes one down."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GptLayers"]

_DROPOUT = 0.1


class _Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        dropout = _DROPOUT if self.training else 0.0
        attended = self._attention(self.norm1(hidden), dropout)
        hidden = hidden + F.dropout(self.proj(attended), dropout)
        inner = F.gelu(self.up(self.norm2(hidden)), approximate="tanh")
        return hidden + F.dropout(self.down(inner), dropout)

    def _attention(self, hidden: Tensor, dropout: float) -> Tensor:
        batch, seq, width = hidden.shape
        split = self.qkv(hidden).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        return attended.transpose(1, 2).reshape(batch, seq, width)


class GptLayers(nn.Module):
    """Causal pre-LN layers without embeddings: [batch, seq, width] in and out.

    Attributes:
        sequence_first: The layers were replaced by ones that take [seq, batch, width].
    """

    def __init__(self, layers: int, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.width, self.inner, self.heads = width, inner, heads
        self.sequence_first = False
        self.layers: Any = nn.ModuleList(_Layer(width, inner, heads) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden
