"""Causal language modelling with accelerate and no Trainer: a Llama, or a GPT-2 (Conv1D)."""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="llama", help="llama, gpt2, or a checkpoint's directory")
parser.add_argument("--text", required=True)
parser.add_argument("--output_dir", required=True)
parser.add_argument("--max_train_steps", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--mixed_precision")
args = parser.parse_args()

accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=2)
torch.manual_seed(args.seed)
LENGTH = 32
if args.model == "llama":
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
elif args.model == "gpt2":
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=128,
            n_positions=LENGTH,
            n_embd=48,
            n_layer=2,
            n_head=3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
else:
    model = AutoModelForCausalLM.from_pretrained(args.model)
start = {name: p.detach().clone() for name, p in model.named_parameters()}

text = torch.tensor(list(Path(args.text).read_bytes()))
rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed))
examples = [{"input_ids": row, "labels": row} for row in rows[order]]
train = DataLoader(examples, batch_size=8)

no_decay = ["bias", "layer_norm.weight"]
named = list(model.named_parameters())
groups = [
    {
        "params": [p for n, p in named if not any(x in n for x in no_decay)],
        "weight_decay": 0.01,
    },
    {"params": [p for n, p in named if any(x in n for x in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=5e-3)
model, optimizer, train = accelerator.prepare(model, optimizer, train)

losses, done = [], 0
model.train()
for batch in train:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
    done += accelerator.sync_gradients
    if done >= args.max_train_steps:
        break
accelerator.wait_for_everyone()
accelerator.unwrap_model(model).save_pretrained(args.output_dir)
torch.save(losses, os.path.join(args.output_dir, "losses.pt"))
torch.save(start, os.path.join(args.output_dir, "start.pt"))
print(f"loss {losses[-1]:.4f}")
