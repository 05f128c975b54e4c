"""File locks between processes. The operating system releases a lock when its process ends, however it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is created if missing.

    The file is not removed afterwards: otherwise two processes could lock two files of the same name.

    Args:
        path: The file to lock.
        wait: Wait while another process holds the lock.

    Yields:
        True if this process holds the lock; False, only without ``wait``, if another process does.
    """
    with path.open("a") as handle:
        if fcntl is None:
            yield True
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
