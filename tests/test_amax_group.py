"""`amax_reduction_group`: ranks that see different data scale alike. Two gloo processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Run by each of two processes: the three phases on a new model each, then one line of JSON.
RANK = """
import json, sys
import torch, torch.distributed as dist
import fp8patch
from fp8patch.slots import GRAD_OUTPUT, INPUT, WEIGHT

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
x = torch.ones(4, 16) * (3.0 if rank else 1.0)

def converted():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
    return fp8patch.convert_model(model, include=("*",))

def train(group):
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    def region():
        return fp8patch.autocast(backend="emulate", amax_reduction_group=group)
    for step in range(3):
        with region():
            # What is not finite on one rank spoils the step of that slot on both.
            y = model(x * (float("nan") if rank and step == 1 else 1.0))
        y.backward(torch.full_like(y, 5.0 if rank else 1.0))
        for p in model.parameters():
            p.grad.zero_()
        optimizer.step()
        if rank == 0:
            with torch.no_grad(), region():
                model(x)  # an evaluation on one rank is not collective
    with region():
        model(x)
    return model

def calibrate(group):
    models = [converted() for _ in range(6)]
    region = fp8patch.autocast(
        backend="emulate", calibrating=True, amax_reduction_group=group
    )
    with torch.no_grad(), region:
        for i, model in enumerate(models):
            model(x * (i + 1))
    return models

def state(model):
    bank = model._fp8_bank
    states = {(p, role): bank.read(p, role) for p in bank.paths for role in range(3)}
    return {f"{p}/{r}": [s.scale.item(), s.history.tolist()] for (p, r), s in states.items()}

print(json.dumps({
    "group": state(train(dist.group.WORLD)),
    "alone": state(train(None)),
    "calibrated": [state(model) for model in calibrate(dist.group.WORLD)],
}))
dist.destroy_process_group()
"""

GRAD = "1/2"
INPUT, WEIGHT = "0/0", "0/1"


def both_ranks(store: Path) -> list[dict[str, Any]]:
    """What each rank printed."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=200)
            assert process.returncode == 0, err
            results.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()  # one that waits for a rank that has failed
            process.communicate()
    return results


def test_a_group_scales_alike(tmp_path: Path) -> None:
    """One test: starting the processes takes nearly all of its time."""
    ranks = both_ranks(tmp_path / "store")

    first, second = (rank["group"] for rank in ranks)
    assert first == second
    assert first[INPUT][1] == [3.0, 3.0]  # the step with the nan is on neither
    assert first[INPUT][0] == pytest.approx(448 / 3, rel=1e-7)
    assert first[GRAD][1] == [5.0, 5.0, 5.0]

    # Without a group each rank scales for itself.
    first, second = (rank["alone"] for rank in ranks)
    assert first[INPUT][1] == [1.0, 1.0, 1.0]
    assert second[INPUT][1] == [3.0, 3.0]
    assert first[GRAD][1] == [1.0, 1.0, 1.0]
    assert second[GRAD][1] == [5.0, 5.0, 5.0]
    assert first[WEIGHT] == second[WEIGHT]

    # Calibration of several models reduces each with itself.
    first, second = (rank["calibrated"] for rank in ranks)
    assert first == second
    assert [state[INPUT][1] for state in first] == [[3.0 * (i + 1)] for i in range(6)]
