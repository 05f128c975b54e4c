"""A lock is held by one process, and released when that process dies."""

import subprocess
import sys
from pathlib import Path

from psm.utils.locking import locked

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
