"""README.md cannot go stale: its Python and its commands run, its flags and names exist."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from exported import write_llama
from injected import train
from typer.testing import CliRunner

import fp8patch
from fp8patch import cli, recipe
from fp8patch.plan.types import CODES

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
# README's script that knows nothing of FP8.
TRAIN = """
import torch, transformers

model = transformers.AutoModelForCausalLM.from_pretrained("my-model")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    ids = torch.randint(0, 512, (4, 64))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Commands that need a run first, which has a test of its own.
AFTER_A_RUN = ("train", "inspect", "report")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for name, body in BLOCK.findall(README.read_text("utf-8")) if name == language]


def shell_lines() -> list[str]:
    return [line for body in blocks("bash") for line in body.splitlines() if line.strip()]


@pytest.fixture
def my_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that holds README's `my-model`, a tiny GPT-2, and `my-llama`."""
    config = transformers.GPT2Config(
        vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=64,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "my-model")
    write_llama(tmp_path / "my-llama")
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_runs(my_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = blocks("python")
    assert len(found) >= 2
    names: dict[str, Any] = {}
    for number, code in enumerate(found):
        exec(compile(code, f"README.md, Python block {number + 1}", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert "transformer.h.0.mlp.c_proj: skipped by" in printed[0]
    assert float(printed[1]) > 0
    assert (my_model / "my-model-fp8" / "fp8patch.json").is_file()
    loaded = names["model"]
    assert any(isinstance(m, fp8patch.Float8Conv1D) for m in loaded.modules())


def test_the_recipe_is_one(tmp_path: Path) -> None:
    (body,) = [body for body in blocks("yaml") if "base: delayed" in body]
    (tmp_path / "mine.yaml").write_text(body)
    made = recipe.Recipe.load(tmp_path / "mine.yaml")
    assert made.for_layer(["*.down_proj"]).scaling == "rowwise"
    assert not made.for_layer(["model.layers.0"]).in_fp8


def test_the_commands_run(my_model: Path) -> None:
    """In README's order; what README prints of `convert` and `export` is what comes out."""
    printed = {}
    for line in shell_lines():
        if line.startswith("fp8patch ") and line.split()[1] not in AFTER_A_RUN:
            words = shlex.split(line)[1:]
            result = CliRunner().invoke(cli.app, words)
            assert result.exit_code == 0, f"{line}: {result.output}"
            printed[words[0]] = result.stdout
    assert set(printed) == {"plan", "convert", "revert", "export"}
    weights = [my_model / name / "model.safetensors" for name in ("my-model", "my-model-plain")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    shown = [body for body in blocks("text") if body.startswith("GPT2LMHeadModel")]
    assert shown == [printed["convert"]]
    (shown,) = [body for body in blocks("text") if "(compressed-tensors)" in body]
    assert shown.splitlines() == [line.rstrip() for line in printed["export"].splitlines()]


def test_the_plan_shown_is_that_of_the_command_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Llama-3-8B in the place of `my-model`; rows are left out, and none is made up."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    (line,) = (line for line in shell_lines() if line.startswith("fp8patch plan "))
    result = CliRunner().invoke(cli.app, shlex.split(line)[1:])
    printed = iter([row.rstrip() for row in result.stdout.splitlines()])
    (shown,) = (body for body in blocks("text") if "Gain predicted for" in body)
    for row in shown.splitlines():
        # Consumes `printed`: in the order in which they come out.
        assert row in printed, f"`{line}` does not print, or not there: {row}"


def test_a_script_trains_as_shown(my_model: Path) -> None:
    """Every line of the run, but for its times, its memory and its ratios."""
    (line,) = [line for line in shell_lines() if line.startswith("fp8patch train")]
    done = train(*shlex.split(line)[2:], cwd=my_model)
    (shown,) = [body for body in blocks("text") if "summary: 20" in body]

    def said(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if line.startswith("fp8patch: ")]
        measured = r"[\d.e%-]+(?= (ms|s|GiB|saturated|not finite)\b)|\([\d.]+% of a step\)"
        return [re.sub(measured, "#", line) for line in lines]

    assert said(done.stderr) == said(shown)
    assert len(said(shown)) == 6
    for command in AFTER_A_RUN[1:]:
        (line,) = [line for line in shell_lines() if line.startswith(f"fp8patch {command} ")]
        result = CliRunner().invoke(cli.app, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}: {result.output}"
    assert (my_model / "report.html").stat().st_size > 10_000


def test_the_set_up_commands_are_there() -> None:
    """`.ci/run` takes the second from here, word for word."""
    lines = shell_lines()
    assert "pip install . && fp8patch demo" in lines
    assert "pip install '.[dev]' && pytest" in lines


def test_there_is_code_within_the_first_lines() -> None:
    text = README.read_text("utf-8")
    assert text[: text.index("```python")].count("\n") < 25


def options(command: str) -> set[str]:
    group: Any = typer.main.get_command(cli.app)
    found: Any = group.get_command(None, command)
    all_of_it = [found, *getattr(found, "commands", {}).values()]
    return {name for one in all_of_it for p in one.params for name in p.opts} | {"--help"}


def test_every_flag_exists() -> None:
    """Each one somewhere, and those on a command's line with that command."""
    known = {name for command in cli.COMMANDS for name in options(command)}
    text = README.read_text("utf-8")
    ours = re.sub(r"pip install [^`\n]*", "", text)
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", ours))
    assert {"--calibrate", "--keep"} <= flags
    assert not flags - known, f"README names flags that no command has: {flags - known}"
    for command, rest in re.findall(r"fp8patch (\w+)([^`\n]*)", text):
        if command not in cli.COMMANDS:
            continue
        unknown = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest)) - options(command)
        assert not unknown, f"`fp8patch {command}` has no {unknown}"


def test_a_made_up_flag_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "README.md"
    stale.write_text(README.read_text("utf-8") + "\n`fp8patch plan M --frobnicate`\n", "utf-8")
    monkeypatch.setitem(globals(), "README", stale)
    with pytest.raises(AssertionError, match="--frobnicate"):
        test_every_flag_exists()


def test_names_in_tables_exist() -> None:
    text = README.read_text("utf-8")
    section = text[text.index("## What is not converted") : text.index("## On disk")]
    codes = {
        c
        for row in re.findall(r"^\| (`.*?) \|", section, re.M)
        for c in re.findall(r"`(\w+)`", row)
    }
    assert len(codes) > 8
    assert codes <= CODES.keys()
    section = text[text.index("## Recipes") : text.index("## Hardware")]
    assert set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == set(recipe.builtin_names())
    section = text[text.index("## Hardware") : text.index("## What is not")]
    backends = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert backends == ["auto", "fp8", "emulate", "bf16", "off"]
    for name in re.findall(r"fp8patch\.(\w+)\(", text):
        assert name in fp8patch.__all__


def test_links_lead_somewhere() -> None:
    text = README.read_text("utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", h).lower().replace(" ", "-")
        for h in re.findall(r"^#+ (.*)", text, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors
        elif not target.startswith("http"):
            assert (ROOT / target).exists(), target
    for path in re.findall(r"`(scripts/\w+\.py)`", text):
        assert os.access(ROOT / path, os.R_OK)
