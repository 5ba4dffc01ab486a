"""`fp8patch convert` writes a directory that is whole or not there: existing, killed, disk full."""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from directories import digests, edit_weights, left_behind, run, write

from fp8patch.checkpoint.sidecar import SIDECAR, STATE
from fp8patch.checkpoint.stream import convert_directory
from fp8patch.errors import CheckpointError


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


# -- whether it may be written ------------------------------------------------------------------


def test_an_existing_out_needs_force(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("convert", llama, "-o", out).exit_code == 0
    (out / "notes").write_text("mine")
    result = run("convert", llama, "-o", out)
    assert result.exit_code == 1
    assert "exists already" in result.stderr
    assert "--force" in result.stderr
    assert result.stderr.count("\n") == 1
    assert (out / "notes").exists()
    assert run("convert", llama, "-o", out, "--force").exit_code == 0
    assert not (out / "notes").exists()
    assert digests(out).keys() - digests(llama).keys() == {SIDECAR, STATE}
    assert left_behind(tmp_path) == []


def test_force_keeps_the_old_one_until_the_new_one_is_complete(llama: Path, tmp_path: Path) -> None:
    convert_directory(llama, tmp_path / "out")
    before = digests(tmp_path / "out")

    def fail(stage: str, done: int, total: int) -> None:
        if stage == "weights" and done == 5:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        convert_directory(llama, tmp_path / "out", force=True, progress=fail)
    assert digests(tmp_path / "out") == before
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("model", "the directory to read from"),
        ("link", "the directory to read from"),
        ("model/out", "lies inside"),
        (".", "lies inside it"),
        ("model/config.json", "lies inside"),
        ("file", "no directory"),
        ("photos", "not replaced even with force"),
        ("file/out", "cannot be written"),
    ],
)
def test_an_out_that_is_refused_even_with_force(
    llama: Path, tmp_path: Path, out: str, message: str
) -> None:
    (tmp_path / "link").symlink_to(llama)
    (tmp_path / "file").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    before = digests(tmp_path)
    result = run("convert", llama, "-o", tmp_path / out, "--force")
    assert result.exit_code == 1
    assert message in result.stderr
    assert digests(tmp_path) == before
    assert left_behind(tmp_path) == []


def test_parents_are_made_and_removed_again(llama: Path, tmp_path: Path) -> None:
    assert run("convert", llama, "-o", tmp_path / "a/b/out").exit_code == 0
    edit_weights(llama, lambda tensors: tensors.update(x=torch.zeros(1)))

    def fail(stage: str, done: int, total: int) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        convert_directory(llama, tmp_path / "c/d/out", progress=fail)
    assert not (tmp_path / "c").exists()


# -- killed, and out of space -------------------------------------------------------------------

# The command line with a pause in the middle: all files copied, no sidecar yet.
PAUSED = """
    import sys, time
    import fp8patch.checkpoint.stream as stream
    copy = stream.copy_tree
    def copy_and_wait(*args, **kwargs):
        copy(*args, **kwargs)
        print("copied", flush=True)
        time.sleep(60)
    stream.copy_tree = copy_and_wait
    sys.argv = ["fp8patch", "convert", *sys.argv[1:]]
    from fp8patch.cli import main
    main()
"""


def paused(*args: object) -> subprocess.Popen[str]:
    code = textwrap.dedent(PAUSED)
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "copied\n"
    return process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_a_convert_that_is_stopped_leaves_nothing(
    llama: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = paused(llama, "-o", tmp_path / "new" / "out")
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == code, error
    assert "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_killed_convert_leaves_no_out_and_the_next_one_cleans_up(
    llama: Path, tmp_path: Path
) -> None:
    convert_directory(llama, tmp_path / "out")
    process = paused(llama, "-o", tmp_path / "out", "--force")
    try:
        half = left_behind(tmp_path)
        assert len(half) == 1
        # It is alive, so another one leaves its work alone.
        assert run("convert", llama, "-o", tmp_path / "out", "--force").exit_code == 0
        assert left_behind(tmp_path) == half
        before = digests(tmp_path / "out")
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert left_behind(tmp_path) == half
    assert digests(tmp_path / "out") == before
    # One for another directory does not touch it, one for the same does.
    convert_directory(llama, tmp_path / "ou")
    assert left_behind(tmp_path) == half
    convert_directory(llama, tmp_path / "out", force=True)
    assert left_behind(tmp_path) == []


def test_a_kill_between_the_two_renames_is_undone(llama: Path, tmp_path: Path) -> None:
    convert_directory(llama, tmp_path / "out")
    before = digests(tmp_path / "out")
    os.rename(tmp_path / "out", tmp_path / ".out.fp8patch-old-0123abcd")
    with pytest.raises(CheckpointError, match="exists already"):
        convert_directory(llama, tmp_path / "out")
    assert digests(tmp_path / "out") == before
    assert left_behind(tmp_path) == []


def _full(*args: object) -> bool:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "where", ["checkpoint.files._reflink", "checkpoint.workspace._write_bytes"]
)
@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, force: bool
) -> None:
    """While weights are copied, and while the sidecar is written."""
    if force:
        convert_directory(llama, tmp_path / "out")
    before = digests(tmp_path)
    monkeypatch.setattr(f"fp8patch.{where}", _full)
    result = run("convert", llama, "-o", tmp_path / "out", *["--force"] * force)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the disk is full. Free some space" in result.stderr
    assert result.stderr.count("\n") == 1
    assert digests(tmp_path) == before
    assert (tmp_path / "out").exists() is force
    assert left_behind(tmp_path) == []


def test_a_disk_that_is_really_full(llama: Path, tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=200k tmpfs "$1" && "$2" -m fp8patch convert "$0" -o "$1/out"'
    script += '; code=$?; ls -A "$1"; exit $code'
    disk = tmp_path / "disk"
    disk.mkdir()
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*namespace, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no user namespaces here, so no small disk can be mounted")
    done = subprocess.run(
        [*namespace, "sh", "-c", script, llama, disk, sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "the disk is full" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_write_that_fails_is_one_line_and_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = subprocess.run(
        [sys.executable, "-m", "fp8patch", "convert", llama, "-o", tmp_path / "out"],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=False,
    )
    assert done.returncode == 1
    assert "model.safetensors: cannot be copied: File too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
