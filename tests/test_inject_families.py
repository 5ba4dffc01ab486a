"""Scripts of every kind, unmodified: bare, BF16 by hand, BF16 injected, FP8 emulated."""

from pathlib import Path
from typing import Any

import pytest
import torch
from injected import armed, child, moved, parameters, plain, script

import fp8patch
from fp8patch.modules.gemms import Float8Gemms


@pytest.fixture
def patch() -> Any:
    with pytest.MonkeyPatch.context() as context:
        yield context


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    left, right = parameters(a), parameters(b)
    return (
        a["losses"] == b["losses"]
        and a.get("evaluations") == b.get("evaluations")
        and left.keys() == right.keys()
        and all(torch.equal(left[name], right[name]) for name in left)
    )


def test_off_is_the_bare_script(patch: pytest.MonkeyPatch) -> None:
    bare = script("plain_gpt", patch=patch)
    with armed(backend="off"):
        off = script("plain_gpt", patch=patch)
    with armed(backend="auto"):  # no FP8 on a CPU
        auto = script("plain_gpt", patch=patch)
    assert same(bare, off)
    assert same(bare, auto)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_fp8_is_bf16_by_hand(patch: pytest.MonkeyPatch, accumulate: int) -> None:
    """The loss is computed outside the model, in FP32; evaluations come first and in between."""
    by_hand = script("plain_gpt", "--autocast", "--accumulate", accumulate, patch=patch)
    with armed(backend="bf16"):
        injected = script("plain_gpt", "--accumulate", accumulate, patch=patch)
    assert same(by_hand, injected)
    bare = script("plain_gpt", "--accumulate", accumulate, patch=patch)
    assert not same(bare, injected)


def test_no_fp8_leaves_a_script_that_autocasts_as_it_is(patch: pytest.MonkeyPatch) -> None:
    bare = script("plain_gpt", "--autocast", patch=patch)
    with armed(backend="bf16"):
        assert same(bare, script("plain_gpt", "--autocast", patch=patch))


def test_plain_loop(
    patch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = script("plain_gpt", "--steps", 8, patch=patch)
    calls = []
    original = Float8Gemms.forward

    def counted(ctx: Any, *args: Any) -> Any:
        calls.append(args[0][..., 0].numel() * args[1].numel())
        return original(ctx, *args)

    patch.setattr(Float8Gemms, "forward", staticmethod(counted))
    with armed(backend="emulate", report=tmp_path / "report.json", log_every=2) as run:
        fp8 = script("plain_gpt", "--steps", 8, "--save", tmp_path / "m.pt", patch=patch)
        run.finish()
        totals = run.record.coverage.totals()
    # Eight Linears; the first evaluation is in the counts, the head is not in FP8.
    assert calls, "nothing ran in FP8"
    assert totals["fp8_calls"] == 16
    assert totals["calls"] == 18
    assert run.record.steps == 8
    fprop = 2 * sum(calls[:16])
    # Evaluation: fprop alone. Training: dgrad and wgrad too.
    assert totals["fp8_flops"] == fprop / 2 + 3 * fprop / 2
    assert moved(fp8) == moved(bare)
    assert fp8["losses"] != bare["losses"]
    assert torch.tensor(fp8["losses"]) == pytest.approx(torch.tensor(bare["losses"]), rel=0.1)
    # What was saved is the stock model's.
    stock = type(bare["model"])()
    stock.load_state_dict(torch.load(tmp_path / "m.pt")["model"], strict=True)
    said = capsys.readouterr().err
    assert "GPT: 8 of 9 Linears in FP8" in said
    assert "lm_head (tied_head" in said
    assert "summary: 8 optimizer steps" in said
    assert "16 of 18 GEMM calls" in said


def test_accelerate_without_trainer(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare = script("mlm_no_trainer", "--output_dir", tmp_path / "bare", patch=patch)
    with armed(backend="emulate") as run:
        fp8 = script("mlm_no_trainer", "--output_dir", tmp_path / "fp8", patch=patch)
    assert run.record.coverage.totals()["fp8_calls"] == 13
    assert run.record.steps == 4
    assert moved(fp8) == moved(bare)
    assert torch.tensor(fp8["losses"]) == pytest.approx(torch.tensor(bare["losses"]), rel=0.05)
    assert (tmp_path / "fp8" / "fp8patch.json").is_file()


def test_a_resumed_run_continues_bit_for_bit(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    common = ("mlm_no_trainer", "--output_dir", tmp_path, "--max_train_steps", 6)
    with armed(backend="emulate"):
        whole = script(*common, "--checkpointing_steps", 3, patch=patch)
    with armed(backend="emulate"):
        rest = script(*common, "--resume_from_checkpoint", tmp_path / "step_3", patch=patch)
    assert rest["losses"] == whole["losses"][3:]
    assert rest["evaluations"] == whole["evaluations"]
    with armed(backend="emulate") as run:
        script("mlm_no_trainer", "--output_dir", tmp_path, "--model", tmp_path, patch=patch)
        assert run.banks()[0].observed, "the sidecar beside the weights was not found"


# transformers renames --gradient_checkpointing in some 5.x; older ones know no other name.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trainer(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    common = (
        "clm_trainer",
        *("--output_dir", tmp_path, "--max_steps", 3, "--logging_steps", 1, "--use_cpu"),
        *("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2),
        *("--report_to", "none", "--gradient_checkpointing", "--save_strategy", "no"),
        *("--bf16", "--disable_tqdm", "True"),
    )
    bare = script(*common, patch=patch)
    with armed(backend="bf16"):
        bf16 = script(*common, patch=patch)
    with armed(backend="emulate") as run:
        fp8 = script(*common, patch=patch)
    assert same(bare, bf16)
    assert run.record.steps == 3
    # 14 Linears, two micro-batches; that backward runs them again is no call of the model's.
    assert run.record.coverage.totals()["fp8_calls"] == 14 * 2
    assert moved(fp8) == moved(bare)
    assert fp8["losses"] != bare["losses"]
    assert fp8["losses"] == pytest.approx(bare["losses"], rel=0.05)
    loaded = type(fp8["model"]).from_pretrained(tmp_path)
    assert all(torch.equal(p, parameters(fp8)[plain(n)]) for n, p in loaded.named_parameters())


def test_spawned_ranks(tmp_path: Path) -> None:
    done = child(Path(__file__).parent / "scripts" / "vit_spawn.py", tmp_path=tmp_path,
                 backend="emulate")  # fmt: skip
    assert done.code == 0, done.err
    digests = {line.split(": ")[1] for line in done.out.splitlines() if "rank " in line}
    assert len(digests) == 1, done.out
    ranks = {s["rank"]: s for s in done.status if s["models"]}
    assert sorted(ranks) == [0, 1]
    assert all(s["ran_fp8"] and s["steps"] == 3 for s in ranks.values())
    # One voice for all ranks.
    assert done.err.count("ViT: ") == 2
    assert done.err.count("summary: 3 optimizer steps") == 1


def test_no_name_of_ours_is_left_behind() -> None:
    assert fp8patch.enable is not None
    assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl
