"""Two ranks under DDP, each patched by `enable`; run as a program by test_inject_ddp.py.

    python ddp_cases.py cpu|gpu DIRECTORY

On GPUs, a rank has one to itself and NCCL where there are two, and shares the only one (gloo) else.
Writes one JSON file a rank: what each case saw.
"""

import json
import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from counted import Counted
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8patch
from fp8patch.inject import patch
from fp8patch.slots import Slots


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Rank:
    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.data = torch.Generator().manual_seed(rank)
        self.reductions = 0
        self.found: dict[str, Any] = {}

    def start(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(MLP().to(self.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.reductions = 0

    def backward(self, loss_scale: float = 1.0) -> None:
        x = torch.randn(8, 32, generator=self.data) * (1 + 3 * self.rank)
        x = x.to(self.device)
        (loss_scale * self.model(x).square().mean()).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def scales(self) -> list[float]:
        modules = [m for m in self.model.modules() if getattr(m, "_fp8_input_slot", None)]
        slots = [(m._fp8_input_slot, m._fp8_weight_slot, m._fp8_grad_slot) for m in modules]
        return [float(slot.scale) for three in slots for slot in three]

    def parameters(self) -> list[float]:
        return [float(p.double().sum()) for p in self.model.parameters()]

    def note(self, case: str, **more: Any) -> None:
        state = {"scales": self.scales(), "parameters": self.parameters()}
        self.found[case] = state | {"reductions": self.reductions} | more

    # -- cases ----------------------------------------------------------------------------------

    def plain(self) -> None:
        self.start()
        for _ in range(4):
            self.backward()
            self.step()
        self.note("plain")

    def no_sync(self) -> None:
        self.start()
        for _ in range(3):
            with self.model.no_sync():
                self.backward()
                self.backward()
            self.backward()
            self.step()
        self.note("no_sync")

    def one_rank_alone(self) -> None:
        self.start()
        inner = self.model.module
        for _ in range(4):
            self.backward()
            self.step()
            if self.rank == 0:  # between a step and the next forward, when an update is due
                x = torch.randn(4, 32, device=self.device)
                with torch.no_grad():
                    inner(x)
                inner(x)
                inner(x).sum()
        self.backward()
        self.note("one_rank_alone")

    def join(self) -> None:
        self.start()
        with self.model.join():
            for _ in range(2 + 2 * self.rank):
                self.backward()
                self.step()
        for _ in range(2):
            self.backward()
            self.step()
        self.note("join")

    def counts(self) -> None:
        """Points every second step, micro-batches, and what this rank counted by itself."""
        self.start()
        counted = None
        for step in range(5):
            grows = 3.0**step  # faster than scales follow: gradients clip
            with self.model.no_sync():
                self.backward(grows)
            # What the first call has converted.
            counted = counted or Counted(self.model.module)
            self.backward(grows)
            self.optimizer.zero_grad()
            self.step()
            counted.step()
        history = patch._run.models[-1].history
        history.finish()
        steps = [{f"{p} {r}": v for (p, r), v in step[0].items()} for step in counted.steps]
        self.note("counts", history=history.to_dict(), counted=steps)


def work(rank: int, port: int, where: str, directory: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    gpu, several = where == "gpu", torch.cuda.device_count() > 1
    device = torch.device("cuda", rank if several else 0) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    recipe = os.path.join(directory, "recipe.yaml")
    fp8patch.enable(backend="fp8" if gpu else "emulate", recipe=recipe, log_every=2)
    dist.init_process_group("nccl" if gpu and several else "gloo", rank=rank, world_size=2)
    this = Rank(rank, device)
    reduce = Slots.reduce

    def counted(*args: Any) -> None:
        this.reductions += 1
        reduce(*args)

    Slots.reduce = counted  # type: ignore[method-assign]
    for case in (this.plain, this.no_sync, this.one_rank_alone, this.join, this.counts):
        case()
    with open(os.path.join(directory, f"{rank}.json"), "w") as file:
        json.dump(this.found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where, directory = sys.argv[1:]
    # Every layer, also where that is predicted to be slower.
    with open(os.path.join(directory, "recipe.yaml"), "w") as file:
        file.write("base: delayed\nmin_gain: 0\n")
    mp.spawn(work, (port, where, directory), nprocs=2)
