"""What a norm's output in BF16 costs in dB where it is the residual stream too (post-LN: BERT).

    python scripts/check_norm_output.py            # BERT-large, 4 x 512 tokens; a GPU
    python scripts/check_norm_output.py --tiny     # CPU, FP8 emulated

Logits and gradients in BF16 autocast, and in FP8 with the norms' outputs in FP32 (as `auto` has
them in BERT) and in BF16 (`norm_output: bf16`), against FP32 arithmetic. How fast both are, says
`scripts/bench_train.py bert-large --contenders fp8-graphs,ours-norm-bf16-graphs`.
"""

import argparse
import functools
import statistics
import sys
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor

import fp8patch
from fp8patch.numerics import sqnr
from fp8patch.recipe import Recipe

# Scales are those of a step before; from the second on they move no more.
STEPS = 3


def build(tiny: bool, device: str) -> Any:
    width, layers = (64, 2) if tiny else (1024, 24)
    config = transformers.BertConfig(
        vocab_size=256 if tiny else 28996,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // 64),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model: Any = transformers.BertForMaskedLM(config)
    return model.to(device).train()


def result(model: Any, ids: Tensor, labels: Tensor, narrow: bool, region: Any) -> dict[str, Tensor]:
    """Logits and gradients of the last of a few equal steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=narrow), region():
            output = model(input_ids=ids, labels=labels)
        output.loss.backward()
        optimizer.step()
    gradients = {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach().float().cpu(), **gradients}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a model for the CPU")
    args = parser.parse_args(words)
    device = "cpu" if args.tiny else "cuda"
    vocabulary = 256 if args.tiny else 28996
    generator = torch.Generator().manual_seed(1)
    shape = (2, 16) if args.tiny else (4, 512)
    ids = torch.randint(0, vocabulary, shape, generator=generator)
    labels = ids.where(torch.rand(shape, generator=generator) < 0.15, -100)
    ids, labels = ids.to(device), labels.to(device)
    fp8 = functools.partial(fp8patch.autocast, backend="emulate" if args.tiny else "fp8")
    exact = result(build(args.tiny, device), ids, labels, False, nullcontext)
    print("| | logits, dB | gradients, median dB | worst tenth, dB |\n|---|---:|---:|---:|")
    for name, output in (("BF16", None), ("FP8, norms FP32", "fp32"), ("FP8, norms BF16", "bf16")):
        model = build(args.tiny, device)
        if output is not None:
            fp8patch.convert_model(model, Recipe(norm_output=output))  # type: ignore[arg-type]
        found = result(model, ids, labels, True, fp8 if output else nullcontext)
        # The gradient of a key's bias is zero but for rounding.
        names = [n for n in exact if n != "logits" and not n.endswith("key.bias")]
        db = sorted(sqnr(exact[n], found[n]) for n in names)
        logits = sqnr(exact["logits"], found["logits"])
        tenth = db[len(db) // 10]
        print(f"| {name} | {logits:.2f} | {statistics.median(db):.2f} | {tenth:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
