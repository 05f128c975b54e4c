"""A lock is held by one process, and released when that process dies."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from psm.utils import locking
from psm.utils.files import lock_file
from psm.utils.locking import holder, is_held, locked

HOLD = """
import sys, time
from pathlib import Path
from psm.utils.locking import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_only_one_holds_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path) as first:
        assert first
        with locked(path, wait=False) as second:
            assert not second
        with locked(path, wait=False) as third:
            assert not third, "giving up must not release the lock of another"
    with locked(path, wait=False) as again:
        assert again
    assert path.exists()


def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with locked(path, wait=False) as held:
            assert not held
        process.kill()
        process.wait()
    with locked(path, wait=False) as held:
        assert held


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no locks, such as Lustre mounted without them."""

    def refuse(handle: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locking.fcntl, "flock", refuse)


def test_a_file_is_the_lock_where_there_are_none(tmp_path: Path, without_locks: None) -> None:
    path = tmp_path / "lock"
    with locked(path, wait=False) as first:
        assert first
        with locked(path, wait=False) as second:
            assert not second
        assert f"process {os.getpid()} on " in holder(path)
    assert not lock_file(path).exists()
    assert holder(path) == ""


def test_a_lock_left_behind_on_this_host_is_taken_over_and_one_of_another_host_is_not(
    tmp_path: Path, without_locks: None
) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    lock_file(path).write_text(f"{locking.socket.gethostname()} {ended.pid}\n")
    with locked(path, wait=False) as held:
        assert held
    lock_file(path).write_text("elsewhere 1\n")
    with locked(path, wait=False) as held:
        assert not held
    assert f"remove {lock_file(path)}" in holder(path)


def test_whether_a_lock_is_held_is_seen_without_taking_it(tmp_path: Path) -> None:
    path, other = tmp_path / "lock", tmp_path / "other"
    other.touch()
    assert not is_held(path)
    with locked(path):
        assert is_held(path)
        assert not is_held(other)
    assert path.exists()
    assert not is_held(path)


@pytest.mark.skipif(not locking.LOCK_TABLE.exists(), reason="needs Linux's table of locks")
def test_the_lock_of_a_file_with_the_same_inode_on_another_file_system_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, table = tmp_path / "lock", tmp_path / "table"
    monkeypatch.setattr(locking, "LOCK_TABLE", table)
    path.touch()
    device, inode = path.stat().st_dev, path.stat().st_ino
    line = "1: FLOCK  ADVISORY  WRITE 15400 {:02x}:{:02x}:{} 0 EOF\n"
    with path.open() as handle:
        own = locking._name_in_table(handle.fileno())
    table.write_text(line.format(os.major(device), os.minor(device) + 1, inode))
    assert not is_held(path)
    table.write_text(line.replace("{:02x}:{:02x}:{}", own))
    assert is_held(path)
    table.write_text(line.replace("{:02x}:{:02x}:{}", f"{own}7"))
    assert not is_held(path)
