"""A plain PyTorch loop, no Hugging Face: own LayerNorm, tied head, loss outside the model.

`--autocast` writes by hand what `fp8patch train --no-fp8` injects.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--save")
parser.add_argument("--resume")
parser.add_argument("--text")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--compile")
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

VOCAB, WIDTH, LENGTH = 96, 32, 16


class LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = LayerNorm(), LayerNorm()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.c_out = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.c_attn(self.ln_1(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = LayerNorm()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def call(ids: Tensor) -> Tensor:
    if not args.autocast:
        return model(ids)
    with torch.autocast(args.device, torch.bfloat16):
        logits = model(ids)
    return logits.float()


def loss_of(ids: Tensor) -> Tensor:
    return F.cross_entropy(call(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


torch.manual_seed(args.seed)
model = GPT()
if args.resume:
    model.load_state_dict(torch.load(args.resume)["model"], strict=True)
start = {name: p.detach().clone() for name, p in model.named_parameters()}
model.to(args.device)
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
generator = torch.Generator().manual_seed(1 + args.seed)
data = torch.randint(0, VOCAB, (64, LENGTH), generator=generator)
if args.text:  # printable ASCII, and everything else as a space
    text = torch.tensor(list(Path(args.text).read_bytes()))
    text = torch.where((text < 32) | (text > 127), 0, text - 32)
    data = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    data = data[torch.randperm(len(data), generator=generator)]
data = data.to(args.device)
if args.resume:
    optimizer.load_state_dict(torch.load(args.resume)["optimizer"])
raw_model = model
if args.compile:
    model = torch.compile(model, backend=args.compile)

losses, evaluations = [], []
for step in range(args.steps):
    if step % 2 == 0:
        model.eval()
        with torch.no_grad():
            evaluations.append(loss_of(data[:8]).item())
        model.train()
    for micro in range(args.accumulate):
        at = 8 * ((step * args.accumulate + micro) % (len(data) // 8))
        loss = loss_of(data[at : at + 8])
        (loss / args.accumulate).backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if args.save:
    checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(checkpoint | {"losses": losses, "start": start}, args.save)
print(f"loss {losses[-1]:.4f}")
