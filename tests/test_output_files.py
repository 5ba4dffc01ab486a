"""Files that commands write: whole or not at all, under any name that a file can have."""

import json
import os
from pathlib import Path

import pytest

from fp8patch.bench.report import check_targets, write_rows
from fp8patch.checkpoint.files import staging
from fp8patch.errors import Fp8PatchError
from fp8patch.inject.record import write_json
from fp8patch.output_files import partial_name, publish

# 255 bytes, the most that Linux takes, whatever number this process has.
LONGEST = [
    "n" * 250 + ".json",
    "ü" * 125 + ".json",
    "." * 255,
    "\U0001f40d" * 63 + "abc",
]


@pytest.mark.parametrize("name", LONGEST)
def test_the_longest_name(name: str, tmp_path: Path) -> None:
    assert len(os.fsencode(name)) == 255
    path = tmp_path / name
    publish(path, lambda partial: partial.write_text("first"))
    publish(path, lambda partial: partial.write_text("second"))
    assert path.read_text() == "second"
    assert write_json(str(path), {"a": 1}) == ""
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("pid", [7, 4194304])
def test_a_partial_name_fits_whatever_the_process(
    pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: pid)
    for name in LONGEST:
        partial = partial_name(tmp_path / name)
        assert len(os.fsencode(partial.name)) <= 255
        assert partial.name.endswith(name[-5:])
        assert partial.parent == tmp_path


@pytest.mark.parametrize("name", LONGEST)
def test_a_directory_of_the_longest_name(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    for text in ("first", "second"):
        with staging(out, force=True) as work:
            (work / "config.json").write_text(text)
        assert (out / "config.json").read_text() == text
    assert list(tmp_path.iterdir()) == [out]


def test_long_names_that_begin_alike_leave_each_other_alone(tmp_path: Path) -> None:
    """What one leaves behind when it is killed is not swept, or put back, as another's."""
    one, other = tmp_path / ("n" * 254 + "1"), tmp_path / ("n" * 254 + "2")
    with staging(one, force=False) as work:
        (work / "config.json").write_text("one")
        kept = work
        with staging(other, force=False) as theirs:
            assert kept.is_dir()
            assert work.name.split("new-")[0] != theirs.name.split("new-")[0]
    assert (one / "config.json").read_text() == "one"


def test_a_link_stays(tmp_path: Path) -> None:
    target, link, dangling = (tmp_path / name for name in ("target", "link", "dangling"))
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "new")
    target.write_text("old")
    for path in (link, dangling):
        publish(path, lambda partial: partial.write_text("written"))
        assert path.is_symlink()
        assert path.read_text() == "written"
    assert target.read_text() == (tmp_path / "new").read_text() == "written"


@pytest.mark.parametrize("keep", [True, False])
def test_a_pipe_or_a_device_stays(keep: bool, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(Fp8PatchError, match="pipe: is a device or a pipe"):
        publish(pipe, lambda partial: partial.write_text("new"), keep=keep)
    assert pipe.is_fifo()
    with pytest.raises(Fp8PatchError, match="/dev/null: is a device or a pipe"):
        publish(Path("/dev/null"), lambda partial: partial.write_text("new"), keep=False)
    assert "is a device or a pipe" in write_json(str(pipe), {})


def test_what_cannot_be_written_to_the_end_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "Is a directory" in write_json(str(tmp_path / "folder"), {"a": 1})
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_bench_replaces_rows_alone(tmp_path: Path) -> None:
    rows, notes = tmp_path / "rows.json", tmp_path / "notes"
    check_targets(rows, None)
    write_rows([{"workload": "tiny", "step_ms": 1.0}], rows)
    check_targets(rows, None)
    notes.write_text("my own notes")
    with pytest.raises(Fp8PatchError, match="notes: exists, and holds no rows of ours"):
        check_targets(notes, None)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("n" * 256, "File name too long"),
        ("none/rows.json", "No such file or directory"),
        ("file/rows.json", "Not a directory"),
        (".", "Is a directory"),
    ],
)
def test_a_name_that_cannot_be_written(name: str, why: str, keep: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    path = tmp_path / name
    with pytest.raises(Fp8PatchError, match=f"cannot be written: {why}\\. Check the path"):
        publish(path, lambda partial: partial.write_text("new"), keep=keep)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_trying_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    publish(path, Path.touch, keep=False)
    assert not list(tmp_path.iterdir())
    path.write_text("mine")
    publish(path, Path.touch, keep=False)
    assert path.read_text() == "mine"
