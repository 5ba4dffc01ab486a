"""Library lines: to stderr, one line each, and never the end of a run."""

import io
import subprocess
import sys

import pytest

from fp8patch import errors, messages


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_seen", set())


def test_lines_go_to_stderr_with_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    messages.note("scales are\n  fresh")
    messages.warn("no module ran in FP8")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "fp8patch: scales are fresh\nfp8patch: warning: no module ran in FP8\n"


def test_once_is_by_key(capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(3):
        messages.once("cold", f"slot is cold at step {step}")
    messages.once("other", "another")
    assert capsys.readouterr().err == "fp8patch: slot is cold at step 0\nfp8patch: another\n"


@pytest.mark.parametrize("closed", [True, False])
def test_a_lost_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    messages.note("nobody reads this")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_beside_a_progress_bar(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """On a terminal the bar makes room; in a file nothing is drawn twice."""
    tqdm = pytest.importorskip("tqdm")
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    bar = tqdm.tqdm(total=3, file=screen, mininterval=0)
    bar.update()
    drawn = screen.getvalue().count("1/3")
    messages.note("a model")
    rows = [row.rpartition("\r")[2] for row in screen.getvalue().split("\n")]
    assert ("fp8patch: a model" in rows) is terminal
    assert screen.getvalue().count("1/3") == drawn + terminal
    bar.close()


def test_all_errors_are_ours() -> None:
    named = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(error, errors.Fp8PatchError) for error in named)
    # The drawing at the top of the file is complete.
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in errors.__all__)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("size mismatch:\n  a.weight.\n", "size mismatch: a.weight"),
        ("", "ValueError"),
        ("x" * 301, "x" * 300 + "…"),
    ],
)
def test_what_another_library_says_is_one_line(said: str, line: str) -> None:
    assert messages.one_line(ValueError(said)) == line


def test_the_module_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fp8patch", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
