"""What the trap tests share: small models, one training step, and the swap that falls into traps.

`naive_swap` is what a first attempt looks like, and what others ship: a recursive walk by
`isinstance` that puts a new module with copied weights in the place of the old one, keeps its state
in buffers and moves its scale at every call. A trap's test passes with `convert_model`, and fails
with `naive_swap` where it says so: that is how the test is known to be able to fail.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fp8patch
from fp8patch import numerics

WIDTH = 32
VOCAB = 96


# -- the straw man -----------------------------------------------------------------------------


class _NaiveGemm(torch.autograd.Function):
    """Quantise, multiply; on whatever shape comes in, and unaware of autocast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, scale: Tensor) -> Tensor:
        x_fp8 = numerics.quantize(x, scale, numerics.E4M3)
        x = numerics.dequantize(x_fp8, scale.reciprocal()).to(w.dtype)
        ctx.save_for_backward(x, w)
        ctx.has_bias = b is not None
        output = nn.functional.linear(x.reshape(-1, x.shape[-1]), w, b)
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1]).to(w.dtype)
        grad_w = rows.t() @ x.reshape(-1, x.shape[-1])
        return grad.to(w.dtype) @ w, grad_w, rows.sum(0) if ctx.has_bias else None, None


class NaiveLinear(nn.Linear):
    """A new Linear with a scale from the last calls' amax, rolled at every call."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__(old.in_features, old.out_features, old.bias is not None)
        self.to(old.weight.dtype)
        with torch.no_grad():
            self.weight.copy_(old.weight)
            if old.bias is not None:
                self.bias.copy_(old.bias)
        self.register_buffer("history", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        history = torch.roll(self.history, 1)
        history[0] = numerics.amax(x.detach()).to(history.dtype)
        self.history = history
        scale = numerics.scale_from_amax(history[1:].amax().float(), 448.0)
        if not bool(history[1:].any()):
            scale = torch.ones(())
        output: Tensor = _NaiveGemm.apply(x, self.weight, self.bias, scale)
        return output


class NaiveLayerNorm(nn.LayerNorm):
    """A new LayerNorm with copied weights."""

    def __init__(self, old: nn.LayerNorm) -> None:
        super().__init__(old.normalized_shape, old.eps)
        with torch.no_grad():
            self.weight.copy_(old.weight)
            self.bias.copy_(old.bias)


def naive_swap(model: nn.Module) -> Any:
    """Replace every Linear and LayerNorm below `model`, as one would at first."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, NaiveLinear(child))
        elif isinstance(child, nn.LayerNorm):
            setattr(model, name, NaiveLayerNorm(child))
        else:
            naive_swap(child)
    return model


# -- models ------------------------------------------------------------------------------------


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """`make()` with the same random weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class Block(nn.Module):
    """Pre-LN MLP with a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class Blocks(nn.Module):
    """`depth` blocks, or one block called `depth` times where `shared`."""

    def __init__(self, depth: int = 2, shared: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(1 if shared else depth))
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.depth):
            x = self.layers[i % len(self.layers)](x)
        return x


def blocks(**kwargs: Any) -> Any:
    return seeded(lambda: Blocks(**kwargs))


def llama(**special: Any) -> Any:
    """An HF Llama of two layers with an untied head."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    config = transformers.LlamaConfig(**{**sizes, **special})
    return seeded(lambda: transformers.LlamaForCausalLM(config)).float().train()


def bert(**special: Any) -> Any:
    """An HF BERT of two layers, its head tied to the embedding."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    config = transformers.BertConfig(**{**sizes, **special})
    return seeded(lambda: transformers.BertForMaskedLM(config)).float().train()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(batch: int = 2, length: int = 13, seed: int = 1) -> Tensor:
    return torch.randint(5, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


# -- running -----------------------------------------------------------------------------------


@contextmanager
def fp8(enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Emulated FP8 for the converted modules; the rest in FP32, which shows more differences."""
    with fp8patch.autocast(enabled, backend="emulate", **kwargs):
        yield


@contextmanager
def mixed() -> Iterator[None]:
    """BF16 autocast and emulated FP8."""
    with torch.autocast("cpu", torch.bfloat16), fp8():
        yield


def loss_of(model: Any, x: Tensor) -> Tensor:
    """The language model's own loss on tokens, else the distance to random targets."""
    if not x.is_floating_point():
        loss: Tensor = model(input_ids=x, labels=x).loss
        return loss
    output: Tensor = model(x)
    return (output.float() - noise(*output.shape, seed=9)).square().mean()


def backward(model: Any, x: Tensor, region: Any = fp8) -> float:
    """One forward inside the region and one backward outside; returns the loss."""
    with region():
        loss = loss_of(model, x)
    loss.backward()
    return loss.item()


def step(model: Any, x: Tensor, optimizer: Any, region: Any = fp8) -> float:
    """One optimizer step."""
    optimizer.zero_grad()
    loss = backward(model, x, region)
    optimizer.step()
    return loss


def sgd(model: nn.Module, lr: float = 0.05, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **kwargs)


# -- looking -----------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def moved(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal names, and equal to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def converted(model: nn.Module) -> dict[str, Any]:
    """The modules that run FP8 GEMMs, by path."""
    gemms = (fp8patch.Float8Linear, fp8patch.Float8Conv1D)
    mixin = fp8patch.Float8Linear.__mro__[1]
    return {p: m for p, m in model.named_modules() if isinstance(m, (mixin, *gemms))}


def scales(model: nn.Module) -> dict[str, list[float]]:
    """The scales (input, weight, gradient) of every converted GEMM that has run."""
    found = {}
    for path, module in converted(model).items():
        slots = module._fp8_input_slot, module._fp8_weight_slot, module._fp8_grad_slot
        if None not in slots:
            found[path] = [float(slot.scale) for slot in slots]
    return found


def ran_in_fp8(model: Any, x: Tensor) -> bool:
    """Whether FP8 changes the output of a forward without gradients, as its rounding must."""
    with torch.no_grad():
        plain = model(x)
        with fp8():
            rounded = model(x)
    first = [getattr(output, "logits", output) for output in (plain, rounded)]
    return not torch.equal(*first)


def assert_fresh(model: Any, x: Tensor) -> None:
    """FP8 computes with the weights as they are: its output is near that of the stock forward.

    Tests move weights far, so that an old copy of them is nowhere near.
    """
    with torch.no_grad():
        plain = model(x)
        with fp8():
            rounded = model(x)
    plain, rounded = (getattr(output, "logits", output) for output in (plain, rounded))
    assert not torch.equal(plain, rounded), "nothing ran in FP8"
    decibels = numerics.sqnr(plain, rounded)
    assert decibels > 18, f"FP8 ran on old weights: {decibels:.1f} dB to the stock forward"


@contextmanager
def falls() -> Iterator[None]:
    """The block is the same check on the naive swap, and must not pass there."""
    try:
        yield
    except Exception:
        return
    pytest.fail("the naive swap passes this check, so the check can't fail")
