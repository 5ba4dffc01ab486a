"""Train a BERT, old or new (masked words), or a Llama (next word) on Python's docs and sources.

A plain PyTorch loop over a transformers model, with nothing of fp8patch in it: what
`scripts/train_curves.py` runs under `fp8patch train`, and what anybody can run bare.

    python scripts/curves_script.py --family llama --seed 0 --steps 500
"""

import argparse
import contextlib
import json
import pydoc_data.topics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

PAD, MASK, END = range(3)
# family: (batch, length, learning rate); with --tiny after it
SHAPES = {"bert": (32, 128, 1e-4), "modernbert": (32, 128, 6e-4), "llama": (8, 512, 6e-4)}
TINY_SHAPES = {"bert": (8, 32, 1e-3), "modernbert": (8, 32, 1e-3), "llama": (4, 64, 1e-3)}
# 65,536 tokens: kernels take a multiple of the time that their launches do.
LARGE_SHAPES = {
    family: (65_536 // length, length, 1e-4) for family, (_, length, _) in SHAPES.items()
}
# Losses whose mean tells that a model has learned as much as `--until` asks for.
LOOKED_AT = 25
VOCAB, TINY_VOCAB = 8192, 512
# Tests differ from machine to machine (some leave them out); the rest are tables, not text.
NO_TEXT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
NO_TEXT |= {"encodings", "pydoc_data"}


def texts(tiny: bool) -> list[str]:
    """Python's reference, then the sources and docstrings of its standard library."""
    found = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    if tiny:
        return found
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if NO_TEXT.isdisjoint(path.relative_to(library).parts):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found.append(path.read_text(encoding="utf-8"))
    return found


def tokenise(tiny: bool) -> Tensor:
    """All texts as one row of token ids (int64 [T]), by a byte-level BPE that is trained here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB if tiny else VOCAB,
        special_tokens=["[PAD]", "[MASK]", "[END]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = texts(tiny)
    tokenizer.train_from_iterator(documents, trainer)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(documents):
        ids += [*encoding.ids, END]
    return torch.tensor(ids)


def load_tokens(cache: Path | None, tiny: bool) -> Tensor:
    """`tokenise`, from the file `cache` where that is there; written there where it is not."""
    if cache is not None and cache.exists():
        return torch.load(cache)
    tokens = tokenise(tiny)
    if cache is not None:
        torch.save(tokens, cache)
    return tokens


def build(family: str, tiny: bool) -> nn.Module:
    """BERT of the base size, ModernBERT or Llama of about the same; the vocabulary is ours.

    BERT is post-norm with learned positions, and from scratch stays for many hundred steps at what
    the words' frequencies alone predict. ModernBERT (pre-norm, rotary positions) does not.
    """
    import transformers as t

    size: dict[str, Any] = {"vocab_size": TINY_VOCAB if tiny else VOCAB, "pad_token_id": PAD}
    if tiny:
        size |= {"hidden_size": 64, "intermediate_size": 128}
        size |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    if family == "bert":
        return t.BertForMaskedLM(t.BertConfig(**size))
    if not tiny:
        size |= {"hidden_size": 768, "intermediate_size": 2048}
        size |= {"num_hidden_layers": 12, "num_attention_heads": 12}
    size |= {"max_position_embeddings": 512, "bos_token_id": END, "eos_token_id": END}
    if family == "modernbert":
        ends = {"cls_token_id": END, "sep_token_id": END}
        return t.ModernBertForMaskedLM(t.ModernBertConfig(**size, **ends))
    return t.LlamaForCausalLM(t.LlamaConfig(**size, use_cache=False))


def masked(examples: list[Tensor]) -> dict[str, Tensor]:
    """BERT's task: 15 % of the tokens; of these 80 % hidden, 10 % replaced, 10 % left."""
    ids = torch.stack(examples)
    labels = torch.where(torch.rand(ids.shape) < 0.15, ids, -100)
    kind = torch.rand(ids.shape)
    hidden, replaced = kind < 0.8, kind >= 0.9
    chosen = labels != -100
    ids = torch.where(chosen & hidden, MASK, ids)
    ids = torch.where(chosen & replaced, torch.randint_like(ids, END + 1, int(ids.max()) + 1), ids)
    return {"input_ids": ids, "labels": labels}


def following(examples: list[Tensor]) -> dict[str, Tensor]:
    """Llama's task; the model shifts the labels."""
    ids = torch.stack(examples)
    return {"input_ids": ids, "labels": ids}


def batches(tokens: Tensor, family: str, batch: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Shuffled windows of the text, without end; one pass comes before any repetition."""
    windows = list(tokens[: len(tokens) // length * length].reshape(-1, length))
    collate: Callable[..., Any] = following if family == "llama" else masked
    loader = DataLoader(windows, batch, shuffle=True, drop_last=True, collate_fn=collate)  # type: ignore[arg-type]
    while True:
        yield from loader


def warm_up(steps: int) -> Callable[[int], float]:
    """A tenth of the steps up, the rest linearly down to a tenth of the learning rate."""
    rising = max(1, steps // 10)
    return lambda step: min((step + 1) / rising, 1 - 0.9 * max(0, step - rising) / steps)


def by_hand(model: nn.Module, batch: dict[str, Tensor], device: str) -> Tensor:
    """The loss under BF16 autocast, as a script that has been adapted writes it."""
    with torch.autocast(device, torch.bfloat16):
        output = model(**batch)
    floats = {k: v.float() if v.is_floating_point() else v for k, v in output.items()}
    return floats["loss"]


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Clock:
    """The time of each step, without waiting for the GPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if not self.cuda:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in pairs]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=sorted(SHAPES), default="bert")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tiny", action="store_true", help="a model and a text for the CPU")
    parser.add_argument("--large", action="store_true", help="batches that keep a GPU busy")
    parser.add_argument("--autocast-by-hand", action="store_true")
    parser.add_argument(
        "--turns",
        action="store_true",
        help="train STEPS steps for each line on stdin, and print how long they took",
    )
    parser.add_argument("--tokens", type=Path, help="file that keeps the tokenised text")
    parser.add_argument("--prepare", action="store_true", help="write --tokens and end")
    parser.add_argument("--rate", type=float, help="another learning rate")
    parser.add_argument("--start", type=Path, help="begin with the weights in this file")
    parser.add_argument("--save", type=Path, help="write the weights there")
    parser.add_argument("--until", type=float, help="end when the loss is below this")
    parser.add_argument("--log", type=Path, help="write losses and step times there, as JSON")
    return parser.parse_args()


args = arguments()
tokens = load_tokens(args.tokens, args.tiny)
if args.prepare:
    print(f"The text has {len(tokens)} tokens.")
    raise SystemExit

torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
shapes = TINY_SHAPES if args.tiny else LARGE_SHAPES if args.large else SHAPES
batch_size, length, rate = shapes[args.family]
model = build(args.family, args.tiny)
if args.start:
    model.load_state_dict(torch.load(args.start))
model.to(device)
optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=args.rate or rate,
    betas=(0.9, 0.98),
    weight_decay=0.01,
    fused=device == "cuda",
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up(args.steps))
source = batches(tokens, args.family, batch_size, length)
seen: list[Tensor] = []


def next_batch() -> dict[str, Tensor]:
    return {key: value.to(device) for key, value in next(source).items()}


def train(batch: dict[str, Tensor]) -> None:
    loss = by_hand(model, batch, device) if args.autocast_by_hand else model(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    seen.append(loss.detach())


def take_turns() -> None:
    """One JSON object for each line on stdin: what the steps took, and what their launches did."""
    for _ in sys.stdin:
        ready = [next_batch() for _ in range(args.steps)]
        wait(device)
        started = time.perf_counter()
        for batch in ready:
            train(batch)
        launched = time.perf_counter()
        wait(device)
        ended = time.perf_counter()
        found = {"seconds": ended - started, "launched": launched - started}
        print(json.dumps(found | {"loss": seen[-1].item()}), flush=True)


def train_all() -> list[float]:
    clock = Clock(device)
    clock.mark()
    for _ in range(args.steps):
        train(next_batch())
        clock.mark()
        if args.until is not None and len(seen) % LOOKED_AT == 0:
            if torch.stack(seen[-LOOKED_AT:]).mean().item() < args.until:
                break
    values: list[float] = torch.stack(seen).tolist()
    print(f"{len(values)} steps, loss {values[0]:.4f} -> {values[-1]:.4f}")
    if args.save:
        torch.save(model.state_dict(), args.save)
    if args.log:
        args.log.write_text(json.dumps({"losses": values, "step_seconds": clock.seconds()}))
    return values


model.train()
if args.turns:
    take_turns()
else:
    losses = train_all()
