"""The command line itself, and `fp8patch plan`."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from rich.console import Console
from typer.testing import CliRunner, Result

import fp8patch
from fp8patch import cli
from fp8patch.checkpoint.skeleton import model_from_config
from fp8patch.cli import output
from fp8patch.cli.plan import show
from fp8patch.plan.model import Plan, plan_model
from fp8patch.plan.step import step_gains

LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return tmp_path


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=False
    )


# -- the command line -------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["--help"], ["-h"], [], ["--version"]])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys\nfrom fp8patch.cli import app\n"
        "try:\n    app(prog_name='fp8patch')\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'rich', 'numpy', 'yaml'} & set(sys.modules)))"
    )
    done = python(code, *args)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_lists_every_command_with_a_line() -> None:
    text = run("--help").output
    for name, line in cli.COMMANDS.items():
        assert f"  {name}" in text
        assert line.split(";")[0].split(",")[0] in text


def test_version() -> None:
    assert run("--version").output == f"fp8patch {fp8patch.__version__}\n"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["plam"], "No such command 'plam'. Did you mean 'plan'?"),
        (["xyzzy"], "No such command 'xyzzy'. Commands: demo, "),
        (["plan"], "Missing argument"),
        (["plan", "x", "--tokens", "0"], "'--tokens': '0': "),
        (["plan", "x", "--tokens=abc"], "'--tokens': 'abc': "),
        (["plan", "x", "--min-gain", "-1"], "--min-gain"),
        (["plan", "x", "--min-gain", "inf"], "--min-gain"),
        (["plan", "x", "--min-gain", "nan"], "--min-gain"),
        (["convert", "x", "-o", "y", "--min-gain", "nan"], "--min-gain"),
        (["plan", "x", "--frob"], "--frob"),
    ],
)
def test_wrong_usage_exits_2(args: list[str], text: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stdout == ""


@pytest.fixture
def fake_command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command `fake` whose body a test puts in."""
    module = ModuleType("fp8patch.cli.fake")
    monkeypatch.setitem(sys.modules, "fp8patch.cli.fake", module)
    monkeypatch.setitem(cli.COMMANDS, "fake", "A command.")
    return module


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (fp8patch.PlanError("one\n  two"), 1, "fp8patch: error: one two\n"),
        (KeyboardInterrupt(), 130, "fp8patch: interrupted\n"),
    ],
)
def test_errors_are_one_line(
    fake_command: ModuleType, error: BaseException, code: int, text: str
) -> None:
    def fake() -> None:
        raise error

    fake_command.fake = fake
    result = run("fake")
    assert (result.exit_code, result.stderr, result.stdout) == (code, text, "")


@pytest.mark.parametrize(
    "ours",
    [
        AssertionError("ours"),
        FileNotFoundError(errno.ENOENT, "No such file", "a"),
        PermissionError(errno.EPERM, "of no file"),
    ],
)
def test_our_own_faults_keep_their_traceback(fake_command: ModuleType, ours: Exception) -> None:
    def fake() -> None:
        raise ours

    fake_command.fake = fake
    assert run("fake").exception is ours


@pytest.mark.parametrize("command", ["inspect", "report", "plan", "doctor", "export", "convert"])
def test_a_name_that_no_file_can_have(command: str, tmp_path: Path) -> None:
    out = ["-o", tmp_path / "out"] if command in ("report", "export", "convert") else []
    result = run(command, "n" * 300, *out)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert f"{'n' * 300}: cannot be used: File name too long." in line


def test_a_folder_that_may_not_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, *args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", denied)  # as root, who runs tests too, may search them all
    result = run("inspect", tmp_path / "run.json")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"fp8patch: error: {tmp_path / 'run.json'}: cannot be used: Permission")


# -- fp8patch plan ----------------------------------------------------------------------------


def test_piped_table_is_whole_and_plain(llama: Path) -> None:
    result = run("plan", llama, "--gpu", "h200")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "LlamaForCausalLM  1.1B parameters, recipe delayed"
    assert lines[1] == "Gain predicted for NVIDIA H200 SXM, M=4096 tokens"
    row = next(line for line in lines if line.startswith("model.layers.*.mlp.up_proj"))
    assert row.split()[:5] == ["model.layers.*.mlp.up_proj", "x16", "8192", "x", "2048"]
    assert "\x1b" not in result.output
    assert "…" not in result.output
    assert "head (1): output head: its logits need more digits than FP8 has" in lines
    assert "In FP8: " in result.stdout
    assert "of the GEMM FLOPs" in result.stdout
    assert "attention are not counted" in result.stdout
    values = json.loads(run("plan", llama, "--gpu", "h200", "--json").stdout)["summary"]
    eager, compiled = (f"{values['step_gain'][mode]:.2f}x" for mode in ("eager", "compiled"))
    assert f"A whole step with AdamW: {eager} in eager, as `train` runs by" in result.stdout
    assert f" {compiled} with --compile or --cuda-graphs; each over BF16" in result.stdout
    # 113 Linears and 33 norms read as a dozen.
    assert sum("%" in line and "x16" in line for line in lines) == 9


@pytest.mark.parametrize(("width", "gone"), [(60, "N x K, params"), (40, "FLOPs, gain")])
def test_a_narrow_terminal_keeps_names_and_decisions(llama: Path, width: int, gone: str) -> None:
    screen = io.StringIO()
    plan = plan_model(model_from_config(llama), meta=True)
    show(plan, Console(file=screen, width=width, force_terminal=True, color_system=None), gpu="X")
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in screen.getvalue()
    assert any(re.fullmatch(r"  mlp\.gate_proj +x16 .*FP8 *", line) for line in lines)
    said = " ".join(screen.getvalue().split())
    assert re.search(rf"Left out for want of room: [^.]*{gone}", said)


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_a_terminal(llama: Path, width: int) -> None:
    plan = plan_model(model_from_config(llama), meta=True)
    screen = io.StringIO()
    show(plan, Console(file=screen, width=width, force_terminal=True, color_system=None), gpu="X")
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in screen.getvalue()
    # No path is broken inside a name, and none is lost.
    text = " ".join(screen.getvalue().split())
    assert "mlp.gate_proj x16 8192 x 2048" in text
    assert ("model.layers.* self_attn.q_proj" in text) is (width == 80)


def test_gain_decides_by_default_and_min_gain_or_recipe_overrules(llama: Path) -> None:
    def codes(*args: object) -> dict[str, int]:
        result = run("plan", llama, "--json", "--gpu", "h100", *args)
        assert result.exit_code == 0, result.output
        found: dict[str, int] = json.loads(result.stdout)["summary"]["codes"]
        return found

    assert codes()["slower"] == 32  # k_proj and v_proj
    assert "slower" not in codes("--min-gain", "0")
    recipe = llama / "mine.yaml"
    recipe.write_text("base: delayed\nmin_gain: 0.0\n")
    assert "slower" not in codes("--recipe", recipe)
    assert codes("--recipe", recipe, "--min-gain", "9")["slower"] == 112
    assert codes("--tokens", "32")["slower"] > 32


def test_json_is_the_plan_and_its_header(llama: Path) -> None:
    result = run("plan", llama, "--json", "--gpu", "b200", "--skip", "*.q_proj", "--tokens", "64")
    values: dict[str, Any] = json.loads(result.stdout)
    plan = Plan.from_dict(values)
    assert (plan.model, plan.gpu, plan.tokens) == ("LlamaForCausalLM", "b200", 64)
    assert values["source"] == str(llama)
    assert values["gpu_label"] == "NVIDIA B200"
    assert values["summary"] == {**plan.summary(), "step_gain": step_gains(plan)}
    assert plan["model.layers.3.self_attn.q_proj"].code == "pattern"


def test_all_gives_a_row_a_module(llama: Path) -> None:
    lines = run("plan", llama, "--all").stdout.splitlines()
    assert sum(line.startswith("model.layers.") for line in lines) == 16 * 9
    assert any(line.startswith("model.layers.15.mlp.down_proj ") for line in lines)


def test_patterns_reach_the_plan(llama: Path) -> None:
    result = run(
        "plan", llama, "--only", "*.mlp", "--only", "lm_head", "--include", "lm_head", "--min-gain",
        "0", "--skip", "*.up_proj",
    )  # fmt: skip
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if "%" in line}
    assert lines["lm_head"].split()[-1] == "FP8"
    assert lines["model.layers.*.mlp.down_proj"].split()[-1] == "FP8"
    assert lines["model.layers.*.mlp.up_proj"].split()[-1] == "pattern"
    assert lines["model.layers.*.self_attn.q_proj"].split()[-1] == "not_selected"


def test_a_pattern_is_shown_as_it_was_given(llama: Path) -> None:
    """Not as markup, in which [u] is the beginning of an underlined text."""
    result = run("plan", llama, "--skip", "*.[u]p_proj")
    assert 'skipped by the pattern "*.[u]p_proj"' in result.stdout


def test_a_recipe_is_shown_by_its_name(llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine[bold].yaml"
    recipe.write_text("base: delayed\n")
    assert "recipe mine[bold]\n" in run("plan", llama, "--recipe", recipe).stdout


def test_a_norm_is_not_said_to_run_in_fp8(tmp_path: Path) -> None:
    values = transformers.GPT2Config(n_layer=2, architectures=["GPT2LMHeadModel"]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values))
    lines = {
        line.split()[0]: line.split()[-1]
        for line in run("plan", tmp_path, "--min-gain", "0").stdout.splitlines()
        if "%" in line
    }
    assert lines["transformer.h.*.ln_1"] == lines["transformer.ln_f"] == "norm"
    assert lines["transformer.h.*.mlp.c_fc"] == "FP8"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--only", "*.q_porj"], 'only pattern "*.q_porj" matches none'),
        (["--gpu", "h20"], "Did you mean 'h200'?"),
        (["--recipe", "delayd"], "Did you mean 'delayed'?"),
        (["--recipe", "none.yaml"], "no such recipe file"),
    ],
)
def test_user_errors_are_one_line(llama: Path, args: list[str], text: str) -> None:
    result = run("plan", llama, *args)
    assert (result.exit_code, result.stdout) == (1, "")
    assert text in result.stderr
    assert result.stderr.startswith("fp8patch: error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("change", [{"architectures": -1}, {"hidden_size": 2**40}])
def test_values_that_no_config_has(llama: Path, change: dict[str, int]) -> None:
    """One line, or a plan; not an allocation of all memory there is."""
    values = json.loads((llama / "config.json").read_text()) | change
    (llama / "config.json").write_text(json.dumps(values))
    result = run("plan", llama)
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.exit_code in (0, 1)


def test_no_such_model_is_one_line() -> None:
    result = run("plan", "/no/such/model")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("fp8patch: error: /no/such/model: no such directory.")


def test_nothing_to_gain_is_said(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=96)
    config.architectures = ["GPT2LMHeadModel"]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    result = run("plan", tmp_path)
    lines = result.stdout.splitlines()
    assert lines[-2] == "No GEMM would run in FP8."
    assert lines[-1].startswith("`fp8patch convert` and the Python API convert what is predicted")
    (slower,) = (line for line in lines if line.startswith("slower"))
    assert slower == "slower (8): predicted below --min-gain 1; --min-gain 0 converts them"
    assert "x2" in run("plan", tmp_path, "--min-gain", "0").stdout
    # Its own min_gain is that of convert too.
    (tmp_path / "mine.yaml").write_text("min_gain: 1\n")
    assert "Python API" not in run("plan", tmp_path, "-r", tmp_path / "mine.yaml").stdout


def test_the_foot_says_nothing_that_is_in_the_table(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**LLAMA, "intermediate_size": 8200, "vocab_size": 96})
    config.architectures = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    lines = run("plan", tmp_path).stdout.splitlines()
    (line,) = (line for line in lines if line.startswith("misaligned"))
    assert line.startswith("misaligned (48): ")
    assert "8200" not in line
    assert "misaligned: pad" in line


def test_a_config_that_builds_nothing(tmp_path: Path) -> None:
    values = {**LLAMA, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_hidden_layers": -1}))
    result = run("plan", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "num_hidden_layers is -1. A model has 0 or more." in result.stderr
    config = transformers.SiglipVisionConfig(num_hidden_layers=2).to_dict()
    config |= {"architectures": ["ResNetModel"], "model_type": "resnet", "depths": [1, 1, 1, 1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("plan", tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "nothing to plan: the ResNetModel that this config builds has" in result.stderr


def test_70b_in_15_seconds_and_one_and_a_half_gigabytes(tmp_path: Path) -> None:
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA_70B}
    (tmp_path / "config.json").write_text(json.dumps(values))
    # CPU time of a fresh process with one thread: what a quiet machine takes, whatever else this
    # one is doing.
    code = (
        "import resource, sys\nfrom fp8patch.cli import app\n"
        "try:\n    app(prog_name='fp8patch')\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "status = open('/proc/self/status').read().splitlines()\n"
        # Not ru_maxrss, which begins with what the process that started this one has.
        "peak = next(int(line.split()[1]) for line in status if line.startswith('VmHWM'))\n"
        "print(used.ru_utime + used.ru_stime, peak, file=sys.stderr)"
    )
    done = python(code, "plan", tmp_path, "--gpu", "h100")
    assert done.returncode == 0, done.stderr
    seconds, kilobytes = map(float, done.stderr.splitlines()[-1].split())
    assert "70.6B parameters" in done.stdout
    assert "In FP8: 560 of 561 GEMM modules, 97.0% of the parameters" in done.stdout
    assert seconds < 15
    assert kilobytes < 1.5e6


def test_no_color_is_no_bold_either(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, styled in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", value)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        for make in (output.console, output.progress_console):
            screen = make()
            screen.file = io.StringIO()
            screen.print("[bold]b[/] [dim]d[/] [green]g[/]")
            assert ("\x1b" in screen.file.getvalue()) is styled


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    inf, nan = float("inf"), float("nan")
    output.print_json({"a": inf, "b": [nan, (1.5, -inf)], "c": {"d": nan, "e": True}})
    text = capsys.readouterr().out
    assert json.loads(text) == {"a": None, "b": [None, [1.5, None]], "c": {"d": None, "e": True}}
    assert "Infinity" not in text


def test_numbers_for_people() -> None:
    assert [output.count(n) for n in (7, 1500, 2_300_000, 70_553_706_496, 10**12)] == [
        "7", "1.5k", "2.3M", "70.6B", "1.0T",
    ]  # fmt: skip
    assert [output.percent(s) for s in (0, 1e-5, 0.0005, 0.5, 1)] == [
        "0.0%", "<0.1%", "0.1%", "50.0%", "100.0%",
    ]  # fmt: skip
