"""Reads thousands of mutated files in a process with a bound on its memory, watched for code that a file might run."""

import json
import logging
import mmap
import os
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from psm.utils.errors import UserError

MEMORY = 2_000_000_000  # bytes of address space beyond what the process has when it begins
SLOW = 20  # seconds of CPU that one file may take

# Events (sys.audit) that no reader of a file has a reason for, once everything is imported.
FORBIDDEN = {
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill", "os.startfile"),
    *("subprocess.Popen", "pty.spawn", "socket.connect", "socket.bind", "shutil.rmtree", "os.putenv"),
    *("exec", "compile", "ctypes.dlopen", "webbrowser.open", "urllib.Request", "os.symlink", "os.link"),
}

Target = tuple[Callable[[Random], bytes], Callable[[bytes], None]]  # a mutated file, and its reading


class Slow(BaseException):
    """A file took too long; no reader may catch it."""


def watch(make: Callable[[Path, Any], Target], inputs: Any, seed: str, start: int, stop: int, folder: Path) -> None:
    """Read the mutations from ``start`` to ``stop``, and write what came of it to result.json in the folder.

    The number of the mutation in work stands in the file `at`, for whoever finds this process dead.

    Args:
        make: gives the target, from a scratch folder and its inputs.
        inputs: what was made before: paths of sound files.
        seed: mutation i is drawn from this and i.
        start, stop: the numbers of the mutations.
        folder: for the result.
    """
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)  # libtiff has much to say
    memory = Path("/dev/shm")
    scratch = (memory if os.access(memory, os.W_OK) else folder) / f"torture-{os.getpid()}"
    scratch.mkdir(parents=True)
    try:
        _watch(make, inputs, seed, start, stop, folder, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _watch(
    make: Callable[[Path, Any], Target], inputs: Any, seed: str, start: int, stop: int, folder: Path, scratch: Path
) -> None:
    mutate, read = make(scratch, inputs)
    for index in range(20):  # imports what is imported at first use
        _attempt(read, mutate(Random(f"warm-up {index}")), [True])
    forbidden, armed = _forbid(scratch)
    at = _place(folder / "at")
    signal.signal(signal.SIGPROF, _too_slow)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts, problems, slowest = {"read": 0, "refused": 0}, [], 0.0
    for index in range(start, stop):
        at[:8] = index.to_bytes(8, "little")
        content = mutate(Random(f"{seed} {index}"))
        armed[0], begun = True, time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SLOW)
        kind, said = _attempt(read, content, armed)
        signal.setitimer(signal.ITIMER_PROF, 0)
        armed[0], slowest = False, max(slowest, time.process_time() - begun)
        if forbidden:
            kind, said = "ran code", f"{forbidden[0]}"
            forbidden.clear()
        if kind in counts:
            counts[kind] += 1
        else:
            problems.append({"index": index, "kind": kind, "said": said})
            (folder / f"mutation-{index}").write_bytes(content)
            if len(problems) >= 20:
                break
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    result = {"counts": counts, "problems": problems, "grown_mb": round(grown), "slowest": round(slowest, 2)}
    (folder / "result.json").write_text(json.dumps(result | {"next": index + 1}))


def _attempt(read: Callable[[bytes], None], content: bytes, armed: list[bool]) -> tuple[str, str]:
    """("read" or "refused", "") or the kind of failure and what was said; disarms before it formats a stack trace."""
    try:
        try:
            read(content)
        finally:
            armed[0] = False
    except UserError as error:
        said = str(error)
        sentence = said and said[-1] in ".)?" and "\n" not in said and len(said) < 3000
        return ("refused", "") if sentence else ("no sentence", said[:500])
    except Slow:
        return "too slow", "".join(traceback.format_exc()[-1200:])
    except BaseException as error:
        return type(error).__name__, "".join(traceback.format_exc()[-1200:])
    return "read", ""


def _too_slow(number: int, frame: object) -> None:
    raise Slow


def _place(file: Path) -> mmap.mmap:
    """Eight bytes of memory that are in a file too, also when the process dies."""
    file.write_bytes(bytes(8))
    with file.open("r+b") as handle:
        return mmap.mmap(handle.fileno(), 8)


def _forbid(scratch: Path) -> tuple[list[str], list[bool]]:
    """Note forbidden events, and files opened for writing elsewhere, while armed."""
    found: list[str] = []
    armed = [False]

    def hook(event: str, details: tuple[Any, ...]) -> None:
        if not armed[0]:
            return
        if event in FORBIDDEN and not _importing():
            found.append(f"{event} {details!s:.200}")
        elif event == "open":
            path, _, flags = details
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and isinstance(path, (str, os.PathLike)) and not str(path).startswith((str(scratch), "/dev/")):
                found.append(f"open for writing {path}")

    sys.addaudithook(hook)
    return found, armed


def _importing() -> bool:
    """True within an import of psm's own or a library's: what these run is no file's doing."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
