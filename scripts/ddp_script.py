"""Train a Llama on bytes of Python's own reference under DistributedDataParallel.

A plain PyTorch script that knows nothing of fp8patch: what `scripts/check_ddp.py` runs under
`fp8patch train --nproc N`, and what torchrun runs bare. Each rank saves its model in a folder of
its own, so that the ranks can be compared, and counts the reductions that no wrapper of PyTorch's
asked for (those go through C++), by what they compute.
"""

import argparse
import contextlib
import json
import os
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=30, help="with a batch each, timed")
parser.add_argument("--accumulated-steps", type=int, default=5, help="of three micro-batches each")
parser.add_argument("--evaluations", type=int, default=2, help="by rank 0 alone, among the latter")
parser.add_argument("--tiny", action="store_true", help="for a CPU")
args = parser.parse_args()

cuda = torch.cuda.is_available()
rank = int(os.environ["RANK"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")

reductions = {"max": 0, "sum": 0}
reduce = dist.all_reduce


def counted(tensor: Any, op: Any = dist.ReduceOp.SUM, *values: Any, **named: Any) -> Any:
    reductions["max" if op == dist.ReduceOp.MAX else "sum"] += 1
    return reduce(tensor, op, *values, **named)


dist.all_reduce = counted

batch, length = (4, 32) if args.tiny else (4, 2048)
width, layers = (32, 2) if args.tiny else (2048, 8)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=width,
    intermediate_size=3 * width,
    num_hidden_layers=layers,
    num_attention_heads=max(2, width // 128),
    max_position_embeddings=length,
    bos_token_id=None,
    eos_token_id=None,
    use_cache=False,
)
model = DistributedDataParallel(LlamaForCausalLM(config).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if args.tiny else 2e-4, fused=cuda)
reference = "\n".join(pydoc_data.topics.topics[k] for k in sorted(pydoc_data.topics.topics))
text = torch.tensor(list(reference.encode("ascii", "replace")))
text = text[: len(text) // length * length].view(-1, length)
# Every rank draws from the same text in an order of its own.
order = torch.Generator().manual_seed(rank)


def data() -> Tensor:
    return text[torch.randint(len(text), (batch,), generator=order)].to(device)


def clock() -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def step(micro: int = 1) -> float:
    for at in range(micro):
        with model.no_sync() if at < micro - 1 else contextlib.nullcontext():
            ids = data()
            loss = model(input_ids=ids, labels=ids).loss
            (loss / micro).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def evaluate() -> float:
    """Of the inner model, on this rank alone."""
    model.eval()
    with torch.no_grad():
        ids = text[:batch].to(device)
        loss = model.module(input_ids=ids, labels=ids).loss.item()
    model.train()
    return loss


losses, seconds, evaluations = [], [], []
for _ in range(args.steps):
    started = clock()
    losses.append(step())
    seconds.append(clock() - started)
for at in range(args.accumulated_steps):
    losses.append(step(micro=3))
    # Between an optimizer's step and the next forward, where scales are due to move.
    if rank == 0 and at < args.evaluations:
        evaluations.append(evaluate())
dist.barrier()
world_size = dist.get_world_size()
# With a process group, transformers saves on rank 0 alone.
dist.destroy_process_group()
place = args.out / f"rank{rank}"
model.module.save_pretrained(place)
found = {
    "rank": rank,
    "world_size": world_size,
    "reductions": reductions,
    "losses": losses,
    "evaluations": evaluations,
    "step_seconds": seconds,
    "tokens_a_step": batch * length * world_size,
}
(place / "found.json").write_text(json.dumps(found))
