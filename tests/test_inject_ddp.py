"""DDP over two processes, on the CPU and on GPUs (NCCL, where there are two): one reduction a step,
equal scales, counts of all ranks, and nobody left waiting."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks saw, and what they said."""
    directory = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, HERE / "ddp_cases.py", request.param, directory],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)},
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    return *found, done.stderr


@pytest.mark.parametrize(
    ("case", "reductions"), [("plain", 3), ("no_sync", 2), ("one_rank_alone", 4)]
)
def test_scales_and_parameters_are_equal_over_ranks(ranks: Any, case: str, reductions: int) -> None:
    first, second, _ = ranks
    assert first[case]["parameters"] == second[case]["parameters"]
    assert first[case]["scales"] == second[case]["scales"]
    assert all(scale > 0 for scale in first[case]["scales"])
    # One between any two steps: also with micro-batches, and with calls that one rank makes alone.
    assert first[case]["reductions"] == second[case]["reductions"] == reductions


def test_under_join_scales_are_local_and_nobody_hangs(ranks: Any) -> None:
    first, second, said = ranks
    assert first["join"]["reductions"] == second["join"]["reductions"] == 0
    assert first["join"]["parameters"] == second["join"]["parameters"]
    assert first["join"]["scales"] != second["join"]["scales"]
    assert "under DDP's join()" in said


def test_counts_are_summed_over_ranks(ranks: Any) -> None:
    """Those of every point but the last, which is taken when no rank may wait for another."""
    first, second, _ = ranks
    history = first["counts"]["history"]
    assert history["steps"] == [2, 4, 5]
    assert history["ranks"] == [2, 2, 1]
    columns = ("saturated", "flushed", "non_finite", "seen")
    different = 0
    for slot in history["slots"]:
        if slot["role"] == "weight":
            continue
        own, other = (
            np.array([step[f"{slot['path']} {slot['role']}"] for step in rank["counts"]["counted"]])
            for rank in (first, second)
        )
        found = np.array([slot[name] for name in columns]).T
        # The first micro-batch came before the hooks that count; it is the observation, and clips
        # and flushes nothing.
        unseen = 2 * np.array([0, 0, 0, own[0, 3]])
        assert (found[0] - own[1] - other[1]).tolist() == unseen.tolist()
        assert (found[1] - (own + other)[3] + (own + other)[1]).tolist() == [0] * 4
        assert (found[2] - own[4] + own[3]).tolist() == [0] * 4
        different += bool((own[:, 0] != other[:, 0]).any())
    assert different
    assert [s["amax"][0] for s in history["slots"]] == [
        s["amax"][0] for s in second["counts"]["history"]["slots"]
    ]


def test_rank_0_speaks_for_all(ranks: Any) -> None:
    said = ranks[2]
    assert said.count("2 of 2 Linears in FP8") == 5  # five models, one rank
    assert said.count("summary:") == 1
