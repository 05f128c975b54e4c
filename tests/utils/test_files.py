"""Files that survive a kill: atomic replacement and JSON lines."""

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from psm.utils.files import append_line, read_lines, remove_temporary_files, write_atomically, write_text_atomically


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text_atomically(path, "old")

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_has_the_permissions_of_a_normal_one(tmp_path: Path) -> None:
    normal = tmp_path / "normal"
    normal.touch()
    write_text_atomically(tmp_path / "new" / "a.txt", "é")
    assert (tmp_path / "new" / "a.txt").stat().st_mode == normal.stat().st_mode
    assert (tmp_path / "new" / "a.txt").read_bytes() == "é".encode()


def test_temporary_files_of_a_killed_write_are_removed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        write_atomically(tmp_path / "below" / "a", lambda file: os._exit(0))
    os.waitpid(pid, 0)
    (left,) = (tmp_path / "below").iterdir()
    (tmp_path / "mine").touch()
    remove_temporary_files(tmp_path)
    assert not left.exists()
    assert (tmp_path / "mine").exists()


def test_lines_are_appended_in_place_of_one_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "below" / "metrics.jsonl"
    assert read_lines(path) == []
    append_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2, "b"')
    assert read_lines(path) == [{"a": 1}]
    append_line(path, {"a": 3})
    assert len(path.read_text().splitlines()) == 2
    with path.open("a") as file:
        file.write('[1, 2]\n{"a": 4}')  # a whole record without its end of line, as an editor may leave it
    append_line(path, {"a": 5})
    assert read_lines(path) == [{"a": 1}, {"a": 3}, {"a": 4}, {"a": 5}]
