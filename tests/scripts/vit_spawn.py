"""A vision script: processes by `mp.spawn`, DDP, the loss inside the script's own autocast."""

import argparse
import hashlib
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--processes", type=int, default=2)
parser.add_argument("--seeds", type=int, nargs="+", default=[0])
parser.add_argument("--save")
parser.add_argument("--device", default="cpu", help="cpu, or cuda: a GPU each if there are enough")
parser.add_argument("--timm", action="store_true", help="timm's ViT instead of the one below")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1)).unbind(-2)
        x = x + self.proj(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def build(timm: bool) -> nn.Module:
    if not timm:
        return ViT()
    from timm.models import VisionTransformer

    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return VisionTransformer(**shape, num_classes=10, global_pool="avg", class_token=False)


def digest(model: nn.Module) -> str:
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]


def train(rank: int, args: argparse.Namespace, seed: int) -> None:
    torch.manual_seed(seed)
    # What a class looks like, the same for all seeds; each image is mostly noise, and a new one.
    classes = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(99))
    device, count = torch.device(args.device), 0
    if device.type == "cuda":
        device, count = torch.device("cuda", rank % torch.cuda.device_count()), 1
    model = DistributedDataParallel(
        build(args.timm).to(device), device_ids=[device] * count or None
    )
    start = {name: value.clone() for name, value in model.module.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    losses = []
    for _ in range(args.steps):
        labels = torch.randint(0, 10, (8,), generator=generator)
        noise = torch.randn(8, 3, 16, 16, generator=generator)
        images = 0.2 * classes[labels] + noise * (1 + rank)
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if rank == 0:  # the others go on
        model.module.eval()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            model.module(torch.randn(2, 3, 16, 16, device=device))
        if args.save:
            saved = {"start": start, "model": model.module.state_dict(), "losses": losses}
            torch.save(saved, f"{args.save}/{seed}.pt")
    print(f"rank {rank}: {digest(model)}", flush=True)


def work(rank: int, args: argparse.Namespace, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # NCCL takes no GPU twice.
    enough = args.device == "cuda" and torch.cuda.device_count() >= args.processes
    backend = "nccl" if enough else "gloo"
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=args.processes)
    for seed in args.seeds:
        train(rank, args, seed)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, (args, port), nprocs=args.processes)
