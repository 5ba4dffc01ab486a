"""Masked language modelling with accelerate and no Trainer, as the examples do it."""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--output_dir", required=True)
parser.add_argument("--max_train_steps", type=int, default=4)
parser.add_argument("--checkpointing_steps", type=int)
parser.add_argument("--resume_from_checkpoint")
parser.add_argument("--mixed_precision")
parser.add_argument("--text")
parser.add_argument("--learning_rate", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

accelerator = Accelerator(mixed_precision=args.mixed_precision)
torch.manual_seed(args.seed)
if args.model:
    model = BertForMaskedLM.from_pretrained(args.model)
else:
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            # Skipping batches on resume would skip random numbers too.
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
model.resize_token_embeddings(144)
start = {name: p.detach().clone() for name, p in model.named_parameters()}

generator = torch.Generator().manual_seed(1 + args.seed)
if args.text:
    text = torch.tensor(list(Path(args.text).read_bytes()))
    ids = text[: len(text) // 32 * 32].view(-1, 32)
    ids = ids[torch.randperm(len(ids), generator=generator)]
    hidden = torch.rand(ids.shape, generator=generator) < 0.15
    # Any id that text does not have will do for [MASK].
    pairs = zip(ids.masked_fill(hidden, 1), ids.masked_fill(~hidden, -100), strict=True)
    examples = [{"input_ids": x, "labels": y} for x, y in pairs]
else:
    ids = torch.randint(5, 128, (64, 16), generator=generator)
    examples = [{"input_ids": x, "labels": torch.where(x % 7 == 0, x, -100)} for x in ids]
train = DataLoader(examples, batch_size=8)
evaluate = DataLoader(examples[:20], batch_size=8)

no_decay = ["bias", "LayerNorm.weight"]
groups = [
    {
        "params": [p for n, p in model.named_parameters() if not any(x in n for x in no_decay)],
        "weight_decay": 0.01,
    },
    {
        "params": [p for n, p in model.named_parameters() if any(x in n for x in no_decay)],
        "weight_decay": 0.0,
    },
]
optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
scheduler = get_scheduler(
    "linear", optimizer, num_warmup_steps=0, num_training_steps=max(100, args.max_train_steps)
)
model, optimizer, train, evaluate, scheduler = accelerator.prepare(
    model, optimizer, train, evaluate, scheduler
)
done = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    done = int(args.resume_from_checkpoint.rsplit("_", 1)[1])

losses = []
model.train()
for step, batch in enumerate(train):
    if step >= args.max_train_steps:
        break
    if step < done:
        continue
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(loss.item())
    if args.checkpointing_steps and (step + 1) % args.checkpointing_steps == 0:
        accelerator.save_state(os.path.join(args.output_dir, f"step_{step + 1}"))

model.eval()
evaluations = []
for batch in evaluate:
    with torch.no_grad():
        evaluations.append(accelerator.gather(model(**batch).loss).mean().item())
accelerator.wait_for_everyone()
accelerator.unwrap_model(model).save_pretrained(args.output_dir)
torch.save(losses + evaluations, os.path.join(args.output_dir, "losses.pt"))
torch.save(start, os.path.join(args.output_dir, "start.pt"))
print(f"loss {losses[-1]:.4f}, evaluation {sum(evaluations) / len(evaluations):.4f}")
