"""Scripts that do odd things, and die of them, through the real `fp8patch train`."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from injected import python, train

import fp8patch

MODEL = """
import copy, os, sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 16)

    def forward(self, x):
        return self.head(x + self.body(x))

def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

def converted(model):
    return [n for n, m in model.named_modules() if "Float8" in type(m).__name__]

torch.manual_seed(0)
"""


def write(folder: Path, body: str, name: str = "s.py") -> str:
    (folder / name).write_text(MODEL + body)
    return name


def ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("fp8patch: ")]


def others(text: str) -> str:
    kept = [line for line in text.splitlines() if not line.startswith("fp8patch: ")]
    return "\n".join(kept)


def own_frames(text: str) -> list[str]:
    """A traceback but for the frames of `nn.Module.__call__`, which has one more with hooks."""
    head, *frames = others(text).split("\n  File ")
    assert head == "Traceback (most recent call last):"
    kept = [frame for frame in frames if "torch/nn/modules/module.py" not in frame]
    assert len(kept) > 3
    assert str(Path(fp8patch.__file__).parent) not in "".join(frames)
    return kept


def run(folder: Path, body: str, *flags: str, code: int = 0) -> tuple[Any, dict[str, Any]]:
    """The finished process under --emulate, and its report (empty where there is none)."""
    script = write(folder, body)
    done = train("--emulate", "--report", "r.json", *flags, script, cwd=folder, code=code)
    report = folder / "r.json"
    return done, json.loads(report.read_text()) if report.exists() else {}


RAISES = """
class Bad(Net):
    def forward(self, x):
        if self.calls == 2:
            raise ValueError("mine")
        self.calls += 1
        return super().forward(x)

def main():
    model = Bad()
    model.calls = 0
    train(model)

main()
"""


def test_a_script_that_raises_in_the_middle(tmp_path: Path) -> None:
    """In a converted model, in the third step: its traceback is the bare one, line for line."""
    done, report = run(tmp_path, RAISES, code=1)
    bare = python("s.py", cwd=tmp_path, code=1)
    assert "ValueError: mine" in bare.stderr
    assert own_frames(done.stderr) == own_frames(bare.stderr)
    assert (report["state"], report["steps"]) == ("failed", 2)
    assert any("summary: 2 optimizer steps" in line for line in ours(done.stderr))


def test_a_first_forward_that_raises_is_followed_by_nothing(tmp_path: Path) -> None:
    """Below the script's own error, "nothing ran in FP8" would only be in the way."""
    done, report = run(tmp_path, RAISES.replace("== 2", "== 0"), code=1)
    assert done.stderr.rstrip().endswith("ValueError: mine")
    assert (report["state"], report["steps"]) == ("failed", 0)


def test_exit_codes_are_the_scripts(tmp_path: Path) -> None:
    done, report = run(tmp_path, "train(Net())\nprint('out')\nsys.exit(3)", code=3)
    assert (done.stdout, report["state"], report["steps"]) == ("out\n", "finished", 3)
    done, _ = run(tmp_path, "train(Net())\nos._exit(5)", code=5)
    done, _ = run(tmp_path, "print('x'\n", code=1)
    assert others(done.stderr) == others(python("s.py", cwd=tmp_path, code=1).stderr)


def test_a_script_that_never_calls_a_model(tmp_path: Path) -> None:
    script = write(tmp_path, "model = Net()\nprint(len(converted(model)))")
    for flags, code in ((("--emulate",), 1), (("--no-fp8",), 0), ((), 0)):
        done = train(*flags, script, cwd=tmp_path, code=code)
        assert done.stdout == "0\n"
        assert ("nothing ran in FP8: of 1 armed process" in done.stderr) == (flags != ("--no-fp8",))
    done = train("--fp8", script, cwd=tmp_path, code=1)
    if not torch.cuda.is_available():
        assert done.stdout == ""  # refused before the script does anything
        assert "Traceback" not in done.stderr
        assert "error: " in done.stderr


def test_called_once_without_gradients_first(tmp_path: Path) -> None:
    done, report = run(
        tmp_path,
        """
model, teacher = Net(), Net()
with torch.no_grad():
    model(torch.randn(4, 32)), teacher(torch.randn(4, 32))
print(converted(model))
train(model)
with torch.no_grad():
    model(torch.randn(4, 32)), teacher(torch.randn(4, 32))
print(converted(model), converted(teacher))
""",
    )
    # No optimizer knew either of them at their first calls: none was converted then.
    assert done.stdout == "[]\n['body.0', 'body.2', 'head'] []\n"
    assert (report["steps"], report["coverage"]["fp8_calls"]) == (3, 3)
    assert len(report["models"]) == 1


def test_two_models_in_turns(tmp_path: Path) -> None:
    done, report = run(
        tmp_path,
        """
one, two = Net(), Net()
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
for _ in range(4):
    for model, optimizer in zip((one, two), optimizers):
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(len(converted(one)), len(converted(two)))
""",
    )
    assert done.stdout == "3 3\n"
    assert [model["converted"] for model in report["models"]] == [{"linear": 3}] * 2
    assert (report["steps"], report["coverage"]["fp8_calls"]) == (4, 6)
    assert report["coverage"]["never_ran"] == []
    assert sum("summary:" in line for line in ours(done.stderr)) == 1


def test_a_head_and_a_layer_replaced_mid_run(tmp_path: Path) -> None:
    done, report = run(
        tmp_path,
        """
model = Net()
train(model)
model.head = nn.Linear(32, 48)
before = model.head.weight.detach().clone()
train(model)
print(not torch.equal(model.head.weight, before), converted(model))
model.body[2] = nn.Linear(64, 32)
train(model)
print(tuple(model(torch.randn(2, 32)).shape), converted(model))
""",
    )
    assert done.stdout == "True ['body.0', 'body.2']\n(2, 48) ['body.0']\n"
    # Three optimizers one after the other: the one that stepped most often counts.
    assert report["steps"] == 3
    assert report["late"] == ["body.2", "head"]
    assert "2 Linears came into Net after its conversion and are not in FP8: " in done.stderr


def test_a_deep_copy_mid_run(tmp_path: Path) -> None:
    """An EMA or a best model: computes with its own weights, in FP8, and stays where it was."""
    done, _ = run(
        tmp_path,
        """
model = Net()
train(model)
best = copy.deepcopy(model)
x = torch.randn(8, 32)
with torch.no_grad():
    then, now = best(x), model(x)
same = torch.equal(then, now)
train(model)
with torch.no_grad():
    print(same, torch.equal(best(x), then), torch.equal(model(x), then), converted(best))
train(best)
with torch.no_grad():
    print(torch.equal(best(x), then))
stock = Net()
stock.load_state_dict(best.state_dict(), strict=True)
torch.save(best.state_dict(), "best.pt")
""",
    )
    assert done.stdout == "True True False ['body.0', 'body.2', 'head']\nFalse\n"
    plain = python("-c", "import torch; print(*torch.load('best.pt'))", cwd=tmp_path)
    assert plain.stdout.split()[0] == "body.0.weight"
    assert len(plain.stdout.split()) == 6


FORKS = """
import multiprocessing
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        import multiprocessing, sys
        assert multiprocessing.parent_process() is not None
        # The same range in each batch, or else the second would be clipped, and that be said.
        return torch.full((32,), float(index % 8)), "fp8patch.convert" in sys.modules

if __name__ == "__main__":
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    seen = set()
    for how in ("fork", "spawn"):
        for x, loaded in DataLoader(
            Numbers(), batch_size=8, num_workers=2, multiprocessing_context=how
        ):
            seen.add((how, bool(loaded.any())))
            model(x).square().mean().backward()
            optimizer.step()
    pool = multiprocessing.get_context("fork").Pool(2)
    print(sorted(seen - {("fork", True)}), pool.map(abs, [-1, -2]))
    pool.close()
    pool.join()
"""


def test_workers_are_no_ranks(tmp_path: Path) -> None:
    """Forked ones have what their parent has; spawned ones load nothing of it."""
    done, report = run(tmp_path, FORKS)
    assert done.stdout == "[('fork', False), ('spawn', False)] [1, 2]\n"
    assert (report["steps"], report["world_size"]) == (8, 1)
    assert sum("summary:" in line for line in ours(done.stderr)) == 1
    assert not [line for line in ours(done.stderr) if "warning" in line]


def test_a_python_that_ignores_the_environment(tmp_path: Path) -> None:
    script = write(tmp_path, "train(Net())\nprint('ran')")
    done = train("--emulate", "--", sys.executable, "-I", script, cwd=tmp_path, code=1)
    assert done.stdout == "ran\n"
    assert "nothing was patched" in done.stderr
    assert "python -I" in done.stderr


def test_killed_in_the_middle_of_a_step(tmp_path: Path) -> None:
    body = "train(Net())\nprint('x', flush=True)\nos.kill(os.getpid(), 9)"
    done, report = run(tmp_path, body, code=-signal.SIGKILL)
    assert done.stdout == "x\n"
    # What was there at the last refresh; nobody could write more.
    assert (report["state"], report["steps"]) == ("running", 1)


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch built without CUDA")
def test_a_refusal_while_torch_is_imported_is_one_line(tmp_path: Path) -> None:
    done = train("--fp8", write(tmp_path, "train(Net())"), cwd=tmp_path, code=1)
    (line,) = done.stderr.splitlines()
    assert line.startswith("fp8patch: error: FP8 was asked for, but it cannot run here")


@pytest.mark.parametrize("flag", ["--off", "--no-fp8"])
def test_what_changes_nothing(tmp_path: Path, flag: str) -> None:
    """--off is the bare script; --no-fp8 is BF16 autocast around the model and FP32 outputs."""
    end = "\ntorch.save(model.state_dict(), sys.argv[1])"
    write(tmp_path, "model = Net()\ntrain(model)" + end)
    by_hand = """
class Hand(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        return y.float()

model = Hand()
train(model)"""
    write(tmp_path, by_hand + end, "hand.py")
    python("s.py" if flag == "--off" else "hand.py", "a.pt", cwd=tmp_path)
    done = train(flag, "s.py", "b.pt", cwd=tmp_path)
    a, b = (torch.load(tmp_path / name) for name in ("a.pt", "b.pt"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert bool(ours(done.stderr)) == (flag == "--no-fp8")
