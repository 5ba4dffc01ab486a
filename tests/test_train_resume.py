"""What a script saves under `fp8patch train`: plain for others, and where a run goes on.

A run that was killed in the middle of a checkpoint goes on from the one before, bit for bit.
"""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from injected import BOOTSTRAP, SCRIPTS, python, train
from safetensors.torch import load_file

import fp8patch
from fp8patch import CheckpointError
from fp8patch.checkpoint import ranks
from fp8patch.checkpoint.sidecar import read_sidecar
from fp8patch.slots import ROLES

# A user's own sitecustomize, which ours loads in turn: SIGKILL at the first (second, …) time that
# something happens to a file.
KILLER = """
import os, signal, sys

event, _, rest = os.environ.get("KILL_AT", "").partition(" ")
path, _, times = rest.partition(" ")
left = [int(times or 1)]

def hook(what, args):
    if what == event and str(args[what == "os.rename"]).endswith(path):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

if event:
    sys.addaudithook(hook)
"""


def killed(*words: object, at: str, cwd: Path) -> None:
    site = cwd / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(KILLER)
    path = f"{site}:{BOOTSTRAP.parent.parent}"
    env = {"PYTHONPATH": path, "KILL_AT": at}
    train("--emulate", *words, cwd=cwd, env=env, code=-signal.SIGKILL)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if p.is_file()}


def is_plain(directory: Path, kind: Any) -> None:
    """Loads in transformers as any other model, every key used and none missing."""
    model, info = kind.from_pretrained(directory, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not any("Float8" in type(module).__name__ for module in model.modules())
    stored = load_file(directory / "model.safetensors")
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in stored.items() if key in state)


# -- accelerate -------------------------------------------------------------------------------

MLM = SCRIPTS / "mlm_no_trainer.py"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with `save_state` after 3 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    words = ("--output_dir", folder, "--max_train_steps", 8, "--checkpointing_steps", 3)
    train("--emulate", MLM, *words, cwd=folder)
    return folder


def goes_on(whole: Path, folder: Path, step: int) -> Any:
    """Resume in `folder` after `step` steps; ends as the whole run did, bit for bit."""
    words = ("--output_dir", folder / "rest", "--max_train_steps", 8)
    resume = ("--resume_from_checkpoint", folder / f"step_{step}")
    done = train("--emulate", MLM, *words, *resume, cwd=folder)
    # Losses, and after them three evaluations.
    assert torch.load(folder / "rest" / "losses.pt") == torch.load(whole / "losses.pt")[step:]
    ends = [load_file(f / "model.safetensors") for f in (folder / "rest", whole)]
    assert equal(*ends)
    state = "fp8patch_state.safetensors"
    assert equal(load_file(folder / "rest" / state), load_file(whole / state))
    return done


@pytest.mark.parametrize(
    "at",
    [
        "os.mkdir step_6",
        "os.rename step_6/fp8patch_state.safetensors",  # the weights are there
        "os.rename step_6/fp8patch.json",
    ],
    ids=["before", "weights", "state"],
)
def test_killed_in_the_middle_of_save_state(whole: Path, tmp_path: Path, at: str) -> None:
    words = ("--output_dir", tmp_path, "--max_train_steps", 8, "--checkpointing_steps", 3)
    killed(MLM, *words, at=at, cwd=tmp_path)
    assert files(tmp_path / "step_3").keys() == files(whole / "step_3").keys()
    half = tmp_path / "step_6"
    assert not (half / "fp8patch.json").exists()
    assert (half / "model.safetensors").exists() == ("mkdir" not in at)
    if "state" not in at:
        return
    assert equal(*(load_file(f / "step_3" / "model.safetensors") for f in (tmp_path, whole)))
    goes_on(whole, tmp_path, 3)
    # The half one has its weights, and no scales: said, and it goes on too.
    rest = ("--output_dir", tmp_path / "half", "--max_train_steps", 8)
    done = train("--emulate", MLM, *rest, "--resume_from_checkpoint", half, cwd=tmp_path)
    assert torch.load(tmp_path / "half" / "losses.pt") == pytest.approx(
        torch.load(whole / "losses.pt")[6:], rel=0.05
    )
    assert done.returncode == 0


def test_save_state_in_a_later_run_of_the_command(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "step_6", tmp_path / "step_6")
    goes_on(whole, tmp_path, 6)
    # Without fp8patch the same checkpoint is a plain one.
    words = ("--output_dir", tmp_path / "bare", "--max_train_steps", 8, "--mixed_precision", "bf16")
    resume = ("--resume_from_checkpoint", tmp_path / "step_6")
    done = python(MLM, *words, *resume, cwd=tmp_path)
    assert "fp8patch: " not in done.stderr
    assert torch.load(tmp_path / "bare" / "losses.pt") == pytest.approx(
        torch.load(whole / "losses.pt")[6:], rel=0.05
    )


def test_save_pretrained_is_plain_and_starts_the_next_run(whole: Path, tmp_path: Path) -> None:
    is_plain(whole, transformers.BertForMaskedLM)
    report = tmp_path / "r.json"
    words = ("--output_dir", tmp_path, "--model", whole, "--max_train_steps", 2)
    train("--emulate", "--report", report, MLM, *words, cwd=tmp_path)
    # An evaluation says what the weights are worth; the scales were there from the first call on.
    assert json.loads(report.read_text())["coverage"]["fp8_calls"] == 13
    assert (tmp_path / "fp8patch.json").exists()


OVERWRITES = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
if len(sys.argv) > 1:
    model = LlamaForCausalLM.from_pretrained(sys.argv[1])
else:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(3):
    ids = torch.randint(0, 64, (4, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.save_pretrained("out")
"""


@pytest.mark.parametrize("file", ["fp8patch_state.safetensors", "fp8patch.json"])
def test_killed_while_it_overwrites(tmp_path: Path, file: str) -> None:
    """New weights, and no state that would be taken for theirs."""
    (tmp_path / "s.py").write_text(OVERWRITES)
    killed("s.py", at=f"os.rename out/{file} 2", cwd=tmp_path)
    assert not (tmp_path / "out" / "fp8patch.json").exists()
    hidden = list((tmp_path / "out").glob(".fp8patch*"))
    assert len(hidden) == 1
    is_plain(tmp_path / "out", transformers.LlamaForCausalLM)
    done = train("--emulate", "s.py", "out", cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if line.startswith("fp8patch: ")]
    assert any("summary: 3 optimizer steps" in line for line in said), said
    assert (tmp_path / "out" / "fp8patch.json").exists()
    # What the killed one left is gone.
    assert not hidden[0].exists()
    train("--emulate", "s.py", "out", cwd=tmp_path)


# -- Trainer ----------------------------------------------------------------------------------

TRAINER = (
    SCRIPTS / "clm_trainer.py",
    *("--max_steps", 6, "--logging_steps", 1, "--per_device_train_batch_size", 4, "--use_cpu"),
    *("--report_to", "none", "--save_strategy", "steps", "--save_steps", 2, "--bf16"),
    *("--disable_tqdm", "True", "--gradient_accumulation_steps", 2),
)


def test_a_trainer_that_was_killed_resumes_bit_for_bit(tmp_path: Path) -> None:
    train("--emulate", *TRAINER, "--output_dir", tmp_path / "whole", cwd=tmp_path)
    there = ("--output_dir", tmp_path / "part")
    killed(*TRAINER, *there, at="os.rename checkpoint-4/fp8patch.json", cwd=tmp_path)
    previous = tmp_path / "part" / "checkpoint-2"
    is_plain(previous, transformers.LlamaForCausalLM)
    train("--emulate", *TRAINER, *there, "--resume_from_checkpoint", previous, cwd=tmp_path)
    for folder in ("", "checkpoint-4", "checkpoint-6"):
        for name in ("model.safetensors", "fp8patch_state.safetensors"):
            at = Path(folder) / name
            assert equal(*(load_file(tmp_path / run / at) for run in ("whole", "part"))), at
    logs = [
        json.loads((tmp_path / run / "trainer_state.json").read_text())["log_history"]
        for run in ("whole", "part")
    ]
    losses = [[entry["loss"] for entry in log if "loss" in entry] for log in logs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


# -- torch.save -------------------------------------------------------------------------------


def test_a_state_dict_is_the_stock_models(tmp_path: Path) -> None:
    """Plain PyTorch resumes from it, and so does fp8patch, with fresh scales."""
    plain = SCRIPTS / "plain_gpt.py"
    train("--emulate", plain, "--steps", 6, "--save", "a.pt", cwd=tmp_path)
    python(plain, "--steps", 1, "--save", "bare.pt", cwd=tmp_path)
    python(plain, "--steps", 4, "--resume", "a.pt", "--save", "b.pt", cwd=tmp_path)
    train("--emulate", plain, "--steps", 4, "--resume", "a.pt", "--save", "c.pt", cwd=tmp_path)
    saved = {name: torch.load(tmp_path / f"{name}.pt") for name in ("a", "bare", "b", "c")}
    keys = list(saved["bare"]["model"])
    assert all(list(saved[name]["model"]) == keys for name in saved)
    assert saved["c"]["losses"] != saved["b"]["losses"]
    assert saved["c"]["losses"] == pytest.approx(saved["b"]["losses"], rel=0.05)
    assert saved["b"]["losses"][0] < saved["bare"]["losses"][0]


# -- several ranks ----------------------------------------------------------------------------


CPU = {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "0"}
RANKS = (MLM, "--max_train_steps", 4, "--checkpointing_steps", 2, "--output_dir")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps of two ranks, with `save_state` after the second and the last."""
    folder = tmp_path_factory.mktemp("two_ranks")
    report = ("--report", "r.json")
    done = train("--emulate", "--nproc", 2, *report, *RANKS, folder, cwd=folder, env=CPU)
    assert done.stderr.count("summary: 4 optimizer steps") == 1
    assert json.loads((folder / "r.json").read_text())["world_size"] == 2
    return folder


def state_files(folder: Path) -> dict[str, Any]:
    """By name: rank 0's first."""
    files = sorted(folder.glob("fp8patch_state*"), key=lambda path: "rank" in path.name)
    return {path.name: load_file(path) for path in files}


@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit(two_ranks: Path, tmp_path: Path) -> None:
    """Started by `--nproc`, resumed by torchrun."""
    first = two_ranks / "step_2"
    one, other = state_files(first).values()
    pending = [key for key in one if key.endswith(".amax")]
    assert any(not torch.equal(one[key], other[key]) for key in pending), "nothing to be wrong"
    launcher = ("torchrun", "--standalone", "--nproc-per-node", 2)
    words = (*launcher, *RANKS, tmp_path, "--resume_from_checkpoint", first)
    done = train("--emulate", "--", *words, cwd=tmp_path, env=CPU)
    assert "what rank 0 had seen" not in done.stderr
    for place in ("", "step_4"):
        files = ["model.safetensors", "fp8patch_state.safetensors"]
        files += ["fp8patch_state.rank1.safetensors"] * bool(place)
        for name in files:
            at = Path(place) / name
            assert equal(*(load_file(run / at) for run in (two_ranks, tmp_path))), at


@pytest.mark.parametrize(
    ("rank", "size", "stale", "said"),
    [
        (0, 2, False, ""),
        (1, 2, False, ""),
        (0, 1, False, "saved by 2 ranks, and this run has 1: it goes on from the largest amax"),
        (3, 4, False, ""),  # rank 0 says it
        (0, 2, True, "of 2 ranks, 1 saved FP8 state in this save"),
        (1, 2, True, ""),
        (0, 4, True, "saved by 2 ranks, and this run has 4: it goes on from what rank 0 had seen"),
    ],
)
@pytest.mark.slow
def test_what_a_rank_goes_on_from(
    two_ranks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    size: int,
    stale: bool,
    said: str,
) -> None:
    """Its own where it can; else the largest of all; else rank 0's, where files are not of it."""
    shutil.copytree(two_ranks / "step_2", tmp_path / "now")
    one, other = state_files(tmp_path / "now").values()
    if stale:
        name = "fp8patch_state.rank1.safetensors"
        shutil.copy(two_ranks / "step_4" / name, tmp_path / "now" / name)
    monkeypatch.setattr(ranks, "place", lambda: (rank, size))
    state = ranks.for_this_rank(read_sidecar(tmp_path / "now")).state
    own = {True: one, False: other if rank == 1 else one}[stale]
    for (path, role), slot in state.items():
        name = f"{path}.{ROLES[role]}"
        expected = own[f"{name}.amax"]
        if size != 2 and not stale:
            expected = torch.maximum(one[f"{name}.amax"], other[f"{name}.amax"])
        assert slot.amax == expected
        assert torch.equal(slot.history, one[f"{name}.history"])
        assert slot.scale == one[f"{name}.scale"]
    err = capsys.readouterr().err
    assert said in err
    assert bool(err) is bool(said)


@pytest.mark.slow
def test_a_damaged_file_of_a_rank(two_ranks: Path, tmp_path: Path) -> None:
    shutil.copytree(two_ranks / "step_2", tmp_path / "now")
    file = tmp_path / "now" / "fp8patch_state.rank1.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(CheckpointError, match=r"rank1\.safetensors: corrupt: .* delete it"):
        ranks.for_this_rank(read_sidecar(tmp_path / "now"))


@pytest.mark.slow
def test_a_save_of_fewer_ranks_takes_the_others_files_away(two_ranks: Path, tmp_path: Path) -> None:
    shutil.copytree(two_ranks / "step_2", tmp_path / "now")
    model = fp8patch.load(two_ranks)
    model.save_pretrained(tmp_path / "now")
    assert list(state_files(tmp_path / "now")) == ["fp8patch_state.safetensors"]
    assert read_sidecar(tmp_path / "now").world_size == 1
