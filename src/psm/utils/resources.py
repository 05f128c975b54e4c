"""A full disk, memory that ran out and a folder that is lost, in whatever way they are reported, as one sentence."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from psm.utils.errors import Diverged, ResourceError, UserError

# The last one is a limit on the size of files (ulimit -f); to whoever writes a file it is the same.
_DISK_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG}
# A folder that was there when a command began and is gone, or may not be written any more.
_UNREACHABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EIO}
_UNREACHABLE |= {getattr(errno, "ESTALE", errno.EIO)}
# An error that a worker process sent has no errno.
_DISK_TEXTS = re.compile(r"\[Errno (28|122)\]|No space left on device|Disk quota exceeded")
_MEMORY_TEXTS = re.compile(
    r"DefaultCPUAllocator|not enough memory: you tried|out of memory|std::bad_alloc|_ALLOC_FAILED"
    r"|Cannot allocate memory|DataLoader worker .*(Killed|Bus error)|insufficient shared memory",
    re.DOTALL,
)
_ASKED_FOR = re.compile(r"allocate (\d[\d.]*) ?(bytes|[KMGTPE]iB)")
_UNITS = {"bytes": 1} | {f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGTPE", 1)}

# Of a control group, version 2 and 1.
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

MEMORY_ADVICE = (
    "give a smaller batch_size or images.size, or a smaller images.memory to keep images on disk, where the command "
    "has these keys, or end other programs"
)


def is_disk_full(error: BaseException) -> bool:
    """True for an error that says that the disk, a quota or a limit on file sizes is exhausted."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _DISK_FULL
    return isinstance(error, (OSError, RuntimeError)) and bool(_DISK_TEXTS.search(str(error)))


def is_out_of_memory(error: BaseException) -> bool:
    """True for Python's, numpy's and torch's errors (on any device) that say that memory ran out."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return "OutOfMemoryError" in names or (isinstance(error, RuntimeError) and bool(_MEMORY_TEXTS.search(str(error))))


def disk_full(path: object, error: OSError | None = None) -> ResourceError:
    """What to say when a file cannot be written because the disk is full."""
    reason = (error.strerror if error is not None else None) or "No space left on device"
    return ResourceError(
        f"{path} could not be written because the disk is full ({reason}): free some space and start again. What was "
        "there before is unchanged."
    )


def write_error(what: str, error: OSError, advice: str = "") -> UserError | ResourceError:
    """What to raise for something, ``out=runs/a`` for example, that cannot be written.

    Args:
        what: is written.
        error: says why it cannot be.
        advice: the end of the sentence, for example "; name another folder".
    """
    if is_disk_full(error):
        return ResourceError(f"{what} cannot be written, the disk is full ({error.strerror or error}){advice}.")
    return UserError(f"{what} cannot be written: {error.strerror or error}{advice}.")


def explain(error: BaseException, memory_advice: str = MEMORY_ADVICE) -> ResourceError | None:
    """The sentence for an error that a full disk, exhausted memory or a lost folder caused; None for any other."""
    for cause in _causes(error):
        if isinstance(cause, ResourceError):
            return cause
        if is_disk_full(cause):
            path = getattr(cause, "filename", None) or "A file"
            return disk_full(path, cause if isinstance(cause, OSError) else None)
        if is_out_of_memory(cause):
            return ResourceError(f"Memory ran out{_asked_for(cause)}: {memory_advice}.")
    if isinstance(error, OSError) and error.errno in _UNREACHABLE and error.filename is not None:
        return ResourceError(
            f"{error.filename} can no longer be written or read ({error.strerror}): its folder was moved, removed or "
            "made read-only meanwhile. Make it available and start again."
        )
    return None


@contextmanager
def resources_explained(
    memory_advice: str = MEMORY_ADVICE, how_to_continue: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Context in which a full disk, exhausted memory and a lost folder are raised as ``ResourceError``.

    Args:
        memory_advice: the end of the sentence on memory: which keys need less of it.
        how_to_continue: gives a sentence to add, or nothing.
    """
    try:
        yield
    except (UserError, Diverged):
        raise
    except Exception as error:
        explained = explain(error, memory_advice)
        if explained is None:
            raise
        raise ResourceError(" ".join(filter(None, (str(explained), how_to_continue())))) from error


def available_memory() -> int | None:
    """Bytes of memory that this process may have in all, what it has by now included; None where it is not known.

    What the machine has left, within the limit of a container.
    """
    try:
        meminfo = Path("/proc/meminfo").read_text()
        own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        free = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    limits = [own + free]
    for file in _CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # no such container, or "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it: torch.save reports a full disk as an error of its own."""
    cause: BaseException | None = error
    for _ in range(10):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _asked_for(error: BaseException) -> str:
    found = _ASKED_FOR.search(str(error))
    if found is None:
        return ""
    return f" ({float(found[1]) * _UNITS[found[2]] / 1e9:,.2g} GB more were asked for)"
