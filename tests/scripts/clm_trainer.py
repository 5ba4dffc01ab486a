"""Causal language modelling with the Trainer: all of its arguments on the command line."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class Data:
    text: str | None = None


parser = HfArgumentParser((TrainingArguments, Data))
arguments, data = parser.parse_args_into_dataclasses(sys.argv[1:])
torch.manual_seed(arguments.seed)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
)
start = {name: p.detach().clone() for name, p in model.named_parameters()}
ids = torch.randint(5, 128, (64, 16), generator=torch.Generator().manual_seed(1))
if data.text:
    text = torch.tensor(list(Path(data.text).read_bytes()))
    ids = text[: len(text) // 32 * 32].view(-1, 32)
examples = [{"input_ids": x, "labels": x} for x in ids]
trainer = Trainer(model, arguments, train_dataset=examples, eval_dataset=examples[:12])
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
evaluation = trainer.evaluate()
trainer.save_model()
trainer.save_state()
torch.save(start, f"{arguments.output_dir}/start.pt")
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[-1]:.4f}, evaluation {evaluation['eval_loss']:.4f}")
