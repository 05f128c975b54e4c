"""File locks between processes. The operating system releases a lock when its process ends, however it ends.

Some file systems (Lustre without its flock option, some NFS) have no locks. There a file made for the purpose is the
lock: it names its holder, and one that a process of this host left behind is taken over.
"""

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from psm.utils.files import lock_file

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None


LOCK_TABLE = Path("/proc/locks")  # Linux: all locks that are held on this machine

# How a file system says that it has no locks.
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


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
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            with _locked_by_file(lock_file(path), wait) as held:
                yield held
            return
        yield True


def holder(path: Path) -> str:
    """Who holds a lock, as far as that is known: host and process where the file system has no locks."""
    try:
        host, process = lock_file(path).read_text().split()
    except (OSError, ValueError):
        return ""
    return f" (process {process} on {host}; if it no longer runs, remove {lock_file(path)})"


@contextmanager
def _locked_by_file(path: Path, wait: bool) -> Iterator[bool]:
    while not _made(path):
        if _left_behind(path):
            path.unlink(missing_ok=True)
        elif wait:
            time.sleep(0.1)
        else:
            yield False
            return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)


def _made(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w") as file:
        file.write(f"{socket.gethostname()} {os.getpid()}\n")
    return True


def _left_behind(path: Path) -> bool:
    """True for the lock of a process of this host that no longer runs."""
    try:
        host, process = path.read_text().split()
        if host != socket.gethostname():
            return False
        os.kill(int(process), 0)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError):
        return False
    return False


def is_held(path: Path) -> bool:
    """True if a process holds the lock on a file. Linux: found without touching the lock, which may be wanted."""
    if lock_file(path).exists() and not _left_behind(lock_file(path)):
        return True
    if fcntl is None or not path.exists():
        return False
    with path.open() as handle:
        if LOCK_TABLE.exists():
            name = _name_in_table(handle.fileno())
            return any(f" {name} " in line and " FLOCK " in line for line in LOCK_TABLE.read_text().splitlines())
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _name_in_table(descriptor: int) -> str:
    """How the table of locks names an open file: device of its file system and inode, fe:00:1234.

    Inodes are unique within a file system alone. The device is that of the mount: the one that `stat` gives is another
    one on btrfs.
    """
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    mount = facts["mnt_id"].strip()
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    device = next(row[2] for row in mounts if row[0] == mount)
    major, minor = (int(number) for number in device.split(":"))
    return f"{major:02x}:{minor:02x}:{os.fstat(descriptor).st_ino}"
