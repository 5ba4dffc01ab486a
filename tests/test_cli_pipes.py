"""A reader that leaves (`| head`) ends every command with 141, as a shell says it of SIGPIPE."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from directories import write


def run_unread(*args: object, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command line in a process whose stdout nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    # Unbuffered, what is written fails where it is written, and never at the end.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "fp8patch"]
    try:
        return subprocess.run(
            [*start, *map(str, args)],
            stdout=writer,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)


FAKE = """
import sys, types
import typer
from fp8patch import cli
module = types.ModuleType("fp8patch.cli.fake")
def fake() -> None:
    {body}
module.fake = fake
sys.modules["fp8patch.cli.fake"] = module
cli.COMMANDS["fake"] = "x"
sys.argv[1:] = ["fake"]
cli.main()
"""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("[typer.echo('x' * 100) for _ in range(10000)]", 141),
        ("sys.stdout.write('x')", 141),  # still in the buffer when the command is done
        ("from fp8patch.cli.output import console; console().print('x' * 100)", 141),
        ("sys.stdout.write('x'); raise typer.Exit(1)", 1),
    ],
)
def test_a_reader_that_leaves(body: str, code: int) -> None:
    done = run_unread(code=FAKE.format(body=body))
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("write", ["print('x')", "print('x', flush=True)"])
def test_a_full_disk_under_the_output(write: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", FAKE.format(body=write)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    line = "fp8patch: error: the output cannot be written: the disk is full.\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_what_the_output_cannot_encode() -> None:
    """A name that is no text, and a bar where the terminal has ASCII alone."""
    done = subprocess.run(
        [sys.executable, "-c", FAKE.format(body=r"print('r\udcff.json \u2581')")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"r\\udcff.json \\u2581\n"), done.stderr


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["plan", "--help"]])
def test_help_that_nobody_reads(args: list[str]) -> None:
    done = run_unread(*args)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_commands_themselves(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    for args in (
        ["plan", model],
        ["plan", model, "--json"],
        ["convert", model, "-o", tmp_path / "out"],
        ["demo", "--steps", "1"],
    ):
        done = run_unread(*args)
        assert done.returncode == 141, done.stderr
        assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "fp8patch.json").is_file()
