"""Seven architectures as their users call them, compiled block by block: how many graphs, and the
same numbers as in eager.

Three lengths (numbers of images), a smaller last batch, evaluation in between. Blocks are compiled
with `fullgraph=True`, so that a graph break would show as a block that is left eager.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from quiet import DYNAMO, FRESH
from torch import Tensor, nn

import fp8patch
from fp8patch.blocks.find import _scalars, find_blocks, structure

# Dynamo's own: it looks at .grad of whatever it is given, and makes a Function to trace one.
pytestmark = [*DYNAMO, FRESH]

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **STILL))


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 12, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    still = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **still, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=12,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def modernbert() -> Any:
    ids = {"cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**TEXT, **IDS, **ids, local_attention=8)
    return transformers.ModernBertForMaskedLM(config)


def vit() -> Any:
    sizes = {key: value for key, value in TEXT.items() if key != "vocab_size"}
    config = transformers.ViTConfig(**sizes, **STILL, image_size=16, patch_size=4)
    return transformers.ViTForImageClassification(config)


def swin() -> Any:
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 10],
        num_heads=[1, 2],
        window_size=4,
        drop_path_rate=0.0,
        **STILL,
    )
    return transformers.SwinForImageClassification(config)


@dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        images: Side of its images, for a model that takes some.
        cheap: Its graphs for any shape are traced, and not taken apart by AOTAutograd, which takes
            its time.
        rounds: What AOTAutograd makes of the stock model rounds otherwise in backward (attention
            with a bias that trains): its graphs are made, and those that were traced are run.
    """

    build: Callable[[], Any]
    blocks: int = 12
    images: int = 0
    cheap: bool = True
    rounds: bool = False


CASES = {
    "llama": Case(llama, cheap=False),
    "bert": Case(bert),
    "gpt2": Case(gpt2),
    "t5": Case(t5, blocks=24, rounds=True),
    "modernbert": Case(modernbert),
    "vit": Case(vit, images=16),
    "swin": Case(swin, images=32, rounds=True),
}
# The first step is watched; then the same shape, two others, a smaller last batch, the first again.
TEXTS = [(4, 16), (4, 16), (4, 24), (4, 12), (3, 12), (4, 16)]
IMAGES = [(4, 0), (4, 0), (6, 0), (5, 0), (3, 0), (4, 0)]


class Backend:
    """`aot_eager`, and a count of the graphs by whether a size in them may move."""

    def __init__(self, case: Case) -> None:
        self.static = self.dynamic = 0
        self._case = case

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        moving = any(isinstance(value, torch.SymInt) for value in inputs)
        self.dynamic += moving
        self.static += not moving
        if moving and self._case.cheap:
            return graph
        made = aot_eager(graph, inputs)
        return graph if self._case.rounds else made


def batch(case: Case, rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    if case.images:
        images = torch.randn(rows, 3, case.images, case.images, generator=generator)
        return {"pixel_values": images, "labels": torch.arange(rows) % 2}
    ids = torch.randint(3, 64, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
        loss: Tensor = model(**inputs).loss
    return loss


def kinds(model: nn.Module) -> int:
    """Distinct structures of blocks, by classes, shapes and flags, but for their numbers in a row;
    and by which norms write BF16."""
    found = set()
    for block in find_blocks(model):
        scalars = _scalars(block.module)
        flags = {k: repr(v) for k, v in scalars.items() if not k.endswith(("layer_idx", "index"))}
        narrow = [vars(m).get("_fp8_narrow") for m in block.module.modules()]
        found.add((structure(block.module), tuple(sorted(flags.items())), tuple(narrow)))
    return len(found)


@pytest.mark.parametrize("name", CASES)
def test_compiled_as_it_is_called(name: str) -> None:
    case = CASES[name]
    eager, compiled = (built(case) for _ in "ab")
    backend = Backend(case)
    found = fp8patch.compile_blocks(compiled, backend=backend)
    assert len(found.names) == case.blocks
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (eager, compiled)]
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for number, shape in enumerate(IMAGES if case.images else TEXTS):
        inputs = batch(case, *shape, generator)
        losses = [loss_of(model, inputs) for model in (eager, compiled)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        assert differing(eager, compiled) == []
        graphs.append((backend.static, backend.dynamic))
        for model, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            if number in (0, 3):
                with torch.no_grad():
                    loss_of(model, inputs)
        assert (backend.static, backend.dynamic) == graphs[-1]
    assert found.left == {}
    # Static ones in the second step, those for any shape in the third, and no more.
    distinct = kinds(compiled)
    static, dynamic = graphs[-1]
    assert 0 < static <= distinct
    assert 0 < dynamic <= distinct
    assert graphs == [(0, 0), (static, 0), *[(static, dynamic)] * (len(graphs) - 2)]


def built(case: Case) -> Any:
    torch.manual_seed(0)
    return fp8patch.convert_model(case.build().train())


def differing(a: nn.Module, b: nn.Module) -> list[str]:
    """Parameters whose gradients are not the same, bit for bit."""
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    gradients = [(name, p.grad, q.grad) for (name, p), (_, q) in pairs]
    return [
        name
        for name, p, q in gradients
        if (p is None) != (q is None) or (p is not None and q is not None and not torch.equal(p, q))
    ]
