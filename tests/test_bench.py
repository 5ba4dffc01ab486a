"""The benchmark: real worker processes on a tiny model, rows, groups, and what goes wrong."""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fp8patch import cli, hardware
from fp8patch.bench import contenders as bench_contenders
from fp8patch.bench.contenders import CONTENDERS, best_of, expand, prepare
from fp8patch.bench.groups import Need, groups
from fp8patch.bench.report import REQUIRED, kernels_text, plot, read_rows, table, write_rows
from fp8patch.bench.run import Settings, run
from fp8patch.bench.turns import Group
from fp8patch.bench.workloads import WORKLOADS, Workload, resolve
from fp8patch.errors import Fp8PatchError

TINY = WORKLOADS["tiny"]
QUICK = Settings(device="cpu", warmup=2, rounds=2, steps=2, settle=1, profile=True, commit="abc")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of a run in which Transformer Engine is not there, and what was said meanwhile."""
    said: list[str] = []
    rows = run(TINY, expand(["bf16", "fp8", "te"], TINY), QUICK, say=said.append)
    return rows, said


def test_every_contender_has_a_row(outcome: tuple[list[dict[str, Any]], list[str]]) -> None:
    rows, _ = outcome
    assert [row["contender"] for row in rows] == ["bf16", "fp8", "te-swap"]
    for row in rows:
        assert set(REQUIRED) <= set(row)
        assert row["workload"] == "tiny"
        assert row["commit"] == "abc"
        assert row["torch"] == torch.__version__
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_the_figures_are_of_the_steps(outcome: tuple[list[dict[str, Any]], list[str]]) -> None:
    bf16, fp8, _ = outcome[0]
    for row in (bf16, fp8):
        assert row["error"] is None
        assert len(row["rounds_ms"]) == 2
        assert row["min_ms"] <= row["step_ms"]
        # Two steps a round: the median of all lies between those of the rounds.
        assert min(row["rounds_ms"]) <= row["step_ms"] <= max(row["rounds_ms"])
        assert row["tokens_per_s"] == pytest.approx(1e3 * 2 * 16 / row["step_ms"])
        assert row["ratio_bf16"] == pytest.approx(bf16["step_ms"] / row["step_ms"])
        assert row["kernel_ms"] is row["cpu_ms"] is row["reserved_gib"] is None
    assert (bf16["converted"], fp8["converted"]) == (0, 8)
    # The same model on the same batch: what differs is rounding.
    assert fp8["loss"] == pytest.approx(bf16["loss"], abs=0.05)


def test_one_that_fails_is_a_row_and_stops_nobody(
    outcome: tuple[list[dict[str, Any]], list[str]],
) -> None:
    (_, _, failed), said = outcome
    assert "Transformer Engine is not installed" in failed["error"]
    assert "Traceback" in failed["traceback"]
    assert failed["step_ms"] is failed["ratio_bf16"] is None
    assert any("te-swap: Fp8PatchError" in line for line in said)


# A worker that answers at once; what is left of `worker` is done in `turn`.
STUB = """
import json, os, sys, time
name = json.loads(sys.argv[1])["contender"]
if name == "te-swap": sys.exit(3)
def say(**message): print(json.dumps(message), flush=True)
say(event="started", facts={"gpu": "stub", "torch": "0"})
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "warm":
        if name == "fp8-compile": time.sleep(60)
        say(event="ready", reserved_gib=1.0, held_gib=0.5, converted=0, predicted_gain=None,
            params=1)
    elif do == "turn":
        if name == "fp8": print("no more", file=sys.stderr); os.kill(os.getpid(), 9)
        if name == "bf16-graphs": time.sleep(60)
        ms = {"bf16": 6.0, "bf16-compile": 4.0}[name]
        say(event="turn", times=[ms, ms + 1, ms + 2], reserved_gib=2.0)
    else:
        say(event="finished", cpu_ms=1.0, kernel_ms=2.0, loss=0.0,
            top_kernels=[{"name": "k", "calls": 3, "ms": 2.0}])
"""


def _stub(names: list[str], **changes: Any) -> dict[str, dict[str, Any]]:
    settings = replace(QUICK, command=(sys.executable, "-c", STUB), **changes)
    return {row["contender"]: row for row in run(TINY, expand(names, TINY), settings)}


def test_a_process_that_dies_is_a_row() -> None:
    rows = _stub(["bf16", "bf16-compile", "fp8"])
    assert rows["fp8"]["error"] == "the process ended with SIGKILL"
    assert rows["fp8"]["traceback"] == "no more\n"
    compiled = rows["bf16-compile"]
    assert compiled["step_ms"] == median([4, 5, 6] * 2)
    assert compiled["spread_ms"] == 2.0
    assert compiled["ratio_bf16"] == pytest.approx(7 / 5)
    assert compiled["ratio_same_mode"] == 1.0
    assert (compiled["kernel_ms"], compiled["cpu_ms"]) == (2.0, 1.0)
    assert (compiled["reserved_gib"], compiled["reserved_steady_gib"]) == (1.0, 2.0)
    assert kernels_text(list(rows.values())).splitlines()[1].split() == ["2.000", "ms", "x3", "k"]


def test_one_that_ends_before_its_group_has_begun_is_a_row_too() -> None:
    settings = replace(QUICK, command=(sys.executable, "-c", STUB))
    need = {name: Need(0.0, 0.0) for name in CONTENDERS}
    members = [expand(["bf16"], TINY), expand(["te-swap"], TINY)]
    both = [Group(TINY, each, need, settings, lambda text: None) for each in members]
    for group in both:
        group.start()
    both[0].run(both[1:])
    assert both[1].results["te-swap"].error == "the process ended with code 3"
    both[1].run()
    for group in both:
        group.close()
        assert group.results["bf16"].finished is not None


def test_the_deadline_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8patch.bench.turns._TURN", 0.1)
    monkeypatch.setattr("fp8patch.bench.turns._RESERVE", 0.1)
    began = time.monotonic()
    rows = _stub(["bf16", "bf16-graphs", "fp8-compile"], deadline=began + 3)
    assert time.monotonic() - began < 10
    assert "not compiled in time" in rows["fp8-compile"]["error"]
    assert "deadline" in rows["bf16-graphs"]["error"]
    assert rows["bf16"]["step_ms"] == 7.0
    late = _stub(["bf16"], deadline=time.monotonic() - 1)
    assert "deadline" in late["bf16"]["error"]
    assert set(REQUIRED) <= set(late["bf16"])


def test_groups_fit_and_each_has_the_base() -> None:
    small, graphs = Need(5.0, 20.0), Need(20.0, 20.0)
    contenders = expand(["bf16-graphs", "fp8", "fp8-graphs", "fp8-compile"], TINY)
    need = {c.name: graphs if c.mode == "graphs" else small for c in contenders}
    made = [[c.name for c in group] for group in groups(contenders, need, 50.0)]
    assert made == [["bf16", "bf16-graphs", "fp8", "fp8-compile"], ["bf16", "fp8-graphs"]]
    for group in made:
        held = sum(need[name].held for name in group)
        assert held + max(need[name].peak - need[name].held for name in group) <= 50
    # What fits nowhere is tried all the same.
    assert len(groups(contenders, need, 1.0)) == 4


def test_names_and_groups_of_contenders() -> None:
    chosen = [c.name for c in expand(["torchao", "te"], WORKLOADS["vit-huge"])]
    assert chosen == ["bf16", "torchao-tensorwise", "torchao-rowwise", "te-swap", "te-layer"]
    assert "te-layer" not in [c.name for c in expand(["te"], TINY)]
    with pytest.raises(Fp8PatchError, match="'fp9'. Did you mean 'fp8'"):
        expand(["fp9"], TINY)
    times = {"torchao-tensorwise": 3.0, "torchao-rowwise": 2.0, "te-swap": None}
    best = best_of([{"contender": name, "step_ms": ms} for name, ms in times.items()])
    assert best == [{"contender": "torchao", "step_ms": 2.0, "best_of": "torchao-rowwise"}]


def test_everybody_converts_the_same_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, torchao and the paths that Transformer Engine is given."""
    taken: dict[str, set[str]] = {}
    model = TINY.model("cpu")
    prepared = prepare(CONTENDERS["fp8"], TINY, model, "cpu")
    taken["ours"] = {n for n, m in prepared.model.named_modules() if type(m) is not nn.Linear}
    ours = {n for n in taken["ours"] if hasattr(model.get_submodule(n), "in_features")}
    asked: list[set[str]] = []
    monkeypatch.setattr(bench_contenders, "_torchao", lambda _, paths, __: asked.append(paths) or 1)
    monkeypatch.setattr(bench_contenders, "_compile", lambda *_: None)
    prepare(CONTENDERS["torchao-rowwise"], TINY, TINY.model("cpu"), "cpu")
    monkeypatch.setattr("fp8patch.bench.te.swap", lambda _, paths: asked.append(paths) or 1)
    prepare(CONTENDERS["te-swap"], TINY, TINY.model("cpu"), "cpu")
    assert ours == asked[0] == asked[1]
    assert len(ours) == prepared.converted == 8


def test_a_head_left_out_is_another_contender_only_where_there_is_one() -> None:
    with pytest.raises(Fp8PatchError, match="no head"):
        prepare(CONTENDERS["ours-head-bf16"], TINY, TINY.model("cpu"), "cpu")


def test_the_innermost_layers_are_compiled() -> None:
    class Block(nn.Module):
        def __init__(self, inner: nn.Module | None = None) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4) if inner is None else inner

    outer = nn.ModuleList(Block(nn.Sequential(Block(), Block())) for _ in range(2))
    found = bench_contenders._blocks(nn.ModuleDict({"outer": outer, "flat": nn.ModuleList()}))
    assert len(found) == 4
    with pytest.raises(Fp8PatchError, match="no repeated layers"):
        bench_contenders._blocks(nn.Linear(4, 4))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    import transformers

    transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, architectures=["BertForMaskedLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


def test_a_users_model_trains_on_labelled_tokens(config: Path) -> None:
    workload = resolve(str(config), batch=4, seq=32)
    assert Workload.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload
    model = workload.model("cpu")
    training = workload.training(model, "cpu")
    result = training.forward()
    training.backward(result)
    # Only the labelled part of random tokens counts: about log(64), with gradients everywhere.
    assert float(result.detach()) == pytest.approx(4.16, abs=0.3)
    assert model.training
    assert all(p.grad is not None for n, p in model.named_parameters() if "word" in n)
    with pytest.raises(Fp8PatchError, match="--seq 33: .* 32 positions"):
        resolve(str(config), seq=33).training(model, "cpu")


def test_sizes_of_a_named_workload() -> None:
    assert resolve("bert-large").tokens == 12288
    assert resolve("bert-large", batch=2, seq=64).tokens == 128
    assert resolve("vit-huge", batch=2).per_step == 2
    with pytest.raises(Fp8PatchError, match="197 tokens an image"):
        resolve("vit-huge", seq=64)


def test_the_file_is_written_whole_and_read_back(
    tmp_path: Path, outcome: tuple[list[dict[str, Any]], list[str]]
) -> None:
    file = tmp_path / "rows.json"
    write_rows(outcome[0], file)
    assert read_rows(file) == outcome[0]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    with pytest.raises(Fp8PatchError, match="cannot be written"):
        write_rows([], tmp_path / "none" / "rows.json")
    wrong = {"step_ms": "x", "ratio_bf16": math.nan, "spread_ms": -1, "cpu_ms": 10**400}
    for key, value in {**wrong, "workload": None, "contender": 5}.items():
        file.write_text(json.dumps([{**outcome[0][0], key: value}]))
        with pytest.raises(Fp8PatchError, match=f"row 0: {key} is "):
            read_rows(file)
    for content, said in (("[", "not valid JSON"), ("{}", "no list"), ("[{}]", "no 'workload'")):
        file.write_text(content)
        with pytest.raises(Fp8PatchError, match=said):
            read_rows(file)


def test_the_table_says_all_of_it(outcome: tuple[list[dict[str, Any]], list[str]]) -> None:
    lines = table(outcome[0]).splitlines()
    assert {line.count("|") for line in lines[:5]} == {10}
    assert lines[2].startswith("| tiny | bf16 | ")
    assert lines[2].endswith(" 1.00x |")
    assert "- tiny, te-swap: Fp8PatchError: Transformer Engine is not installed" in lines[6]
    assert lines[-1].endswith("commit abc")


def test_the_chart(tmp_path: Path, outcome: tuple[list[dict[str, Any]], list[str]]) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(Fp8PatchError, match=r"pip install 'fp8patch\[plot\]'"):
            plot(outcome[0], tmp_path / "chart.png")
        return
    plot(outcome[0], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


NO_GPU = hardware.classify("cpu", "CPU", problem="no GPU is visible")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "a model, or a named workload"),
        (["tiny"], 1, "no GPU is visible. --emulate runs the command on the CPU"),
        (["--gemm"], 1, "no GPU is visible"),
        (["/no/such/model", "--emulate"], 1, "no such directory"),
        (["bert-larg", "--emulate"], 1, "Did you mean 'bert-large'? Workloads: "),
        (["tiny", "--emulate", "--contenders", "bf16,frob"], 1, "no contender named 'frob'"),
        (["tiny", "--emulate", "--contenders", "fp8-graphs"], 1, "no CUDA graphs"),
        (["--from-json", "/no/such/file"], 1, "cannot be read"),
        (["--gemm"], 1, "--gemm has no other way to run"),
        (["--gemm", "--emulate"], 2, "choose one"),
        # Before a GPU is looked for, let alone used.
        (["tiny", "--json", "/no/such/rows.json"], 1, "rows.json: cannot be written: No such"),
        (["tiny", "--json", "/"], 1, "/: cannot be written: Is a directory"),
        (["tiny", "--json", "n" * 300], 1, "cannot be written: File name too long"),
        (["tiny", "--plot", "/no/such/chart.png"], 1, "/no/such/chart.png"),
        (["tiny", "--plot", "chart"], 1, "chart"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "detect", lambda device=None: NO_GPU)
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == code
    assert said in " ".join(result.stderr.split())
    assert code == 2 or result.stderr.count("\n") == 1


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    quick = [
        "--contenders",
        "bf16",
        "--batch",
        "2",
        "--seq",
        "16",
        "--rounds",
        "1",
        "--steps",
        "1",
        "--warmup",
        "1",
    ]
    result = CliRunner().invoke(
        cli.app, ["bench", "tiny", "--emulate", *quick, "--json", str(file)]
    )
    assert result.exit_code == 0, result.stderr
    assert [row["contender"] for row in read_rows(file)] == ["bf16"]
    shown = CliRunner().invoke(cli.app, ["bench", "--from-json", str(file)])
    assert shown.stdout == result.stdout
