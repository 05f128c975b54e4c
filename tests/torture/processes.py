"""Child processes of the harness: psm or a Python function in a fork, what it takes, and its end at a chosen moment."""

import ctypes
import json
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import FORKS, command_line

PRELOAD = (
    *("psm.cli.main", "psm.training.pretrain", "psm.evaluation.evaluate", "psm.embedding.embed"),
    *("psm.cli.pretrain", "psm.cli.evaluate", "psm.cli.embed", "psm.cli.experiment", "psm.reporting.run_page"),
    *("psm.experiments.runner", "psm.experiments.report", "psm.models.init_weights", "torture.targets"),
)
FORKS.set_forkserver_preload(list(PRELOAD))
PERMISSIONS = 0b1110  # capabilities of root: to read, write and change files whatever their modes
TICKS = os.sysconf("SC_CLK_TCK")
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate", "os.utime"}


class Stopwatch:
    """Seconds that this process was awake: the time between two readings counts up to 5 s, not a pause by SIGSTOP."""

    def __init__(self) -> None:
        self._last, self._seconds = time.monotonic(), 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._last, 5.0)
        self._last = now
        return self._seconds


@dataclass(frozen=True)
class Ended:
    """How a command ended. A negative code is the number of the signal that ended it."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    cpu: float

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def crashed(self) -> str:
        """What is wrong with the way it ended: a stack trace, a signal, or no sentence; "" where nothing is."""
        said = self.stderr.strip()
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}: {said[-300:]}"
        if "Traceback (most recent call last)" in said:
            return f"a stack trace: {said[-600:]}"
        if self.code not in (0, 1, 2, 143):
            return f"exit code {self.code}: {said[-300:]}"
        if self.code in (1, 2) and "psm: " not in said:
            return f"exit code {self.code} without a sentence: {said[-300:]}"
        return ""

    @property
    def sentence(self) -> str:
        """The last thing that it said."""
        lines = [line for line in self.stderr.strip().splitlines() if line.startswith("psm: ")]
        return lines[-1] if lines else ""


def end_descendants() -> None:
    """Kill every process that this one has started, and theirs: commands are children of a fork server."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    ended = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in ended} - ended:
        ended |= found
    for pid in ended - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Moment:
    """When a process is killed: before its n-th change of a file, or when it has used so much CPU or wall time."""

    write: int | None = None
    cpu: float | None = None
    wall: float | None = None

    def __str__(self) -> str:
        if self.write is not None:
            return f"before change {self.write} of a file"
        return f"after {self.cpu:.2f} s of CPU" if self.cpu is not None else f"after {self.wall:.2f} s"


class Running:
    """A psm command in a process of its own."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        write: int | None = None,
        obedient: bool = False,
        threads: int = 1,
        **environment: str,
    ):
        """Start it.

        Args:
            arguments: what stands after `psm`.
            folder: of the files stdout, stderr and writes; only changes of files below its parent are counted.
            write: kill it before its n-th change of a file.
            obedient: without root's right to write what the modes of files forbid.
            threads: of torch.
            environment: variables to set.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.arguments, self.folder = arguments, folder
        variables = {"OMP_NUM_THREADS": str(threads), "COLUMNS": "160", "PSM_CACHE": str(folder / "cache")}
        self.seconds = Stopwatch()
        self.process = FORKS.Process(
            target=_psm, args=(arguments, folder, variables | environment, write, obedient, str(folder.parent))
        )
        self.process.start()
        self._cpu = 0.0

    @property
    def pid(self) -> int:
        return int(self.process.pid or 0)

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return self._cpu
        self._cpu = (int(fields[11]) + int(fields[12])) / TICKS
        return self._cpu

    def reaches(self, moment: Moment, timeout: float = 900) -> bool:
        """Wait for the moment; False if the process ended before."""
        while self.process.is_alive():
            used, waited = self.cpu_seconds(), self.seconds()
            if (moment.cpu is not None and used >= moment.cpu) or (moment.wall is not None and waited >= moment.wall):
                return True
            if waited > timeout:
                return False
            time.sleep(0.004)
        return False

    def end(self, timeout: float = 900) -> Ended:
        """Wait for its end."""
        while self.process.is_alive() and self.seconds() < timeout:
            self.cpu_seconds()
            self.process.join(0.05)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        out, err = (
            (self.folder / name).read_text(errors="replace") if (self.folder / name).exists() else ""
            for name in ("stdout", "stderr")
        )
        code = self.process.exitcode
        return Ended(-1 if code is None else code, out, err, self.seconds(), self._cpu)

    def kill(self) -> Ended:
        self.process.kill()
        return self.end()

    @property
    def writes(self) -> int:
        """Changes of files that it made, once it has ended by itself."""
        file = self.folder / "writes"
        return int(file.read_text()) if file.exists() else 0


def run(arguments: list[str], folder: Path, **options: Any) -> Ended:
    """A psm command to its end."""
    return Running(arguments, folder, **options).end()


def _psm(
    arguments: list[str], folder: Path, environment: dict[str, str], write: int | None, obedient: bool, within: str
) -> None:
    os.setpgrp()
    if obedient:
        _obey_modes()
    count = 0

    def hook(event: str, details: tuple[Any, ...]) -> None:
        nonlocal count
        if event == "open":
            path, _, flags = details
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in WRITES:
            path = details[0]
        else:
            return
        if isinstance(path, (str, os.PathLike)) and str(path).startswith(within):
            count += 1
            if count == write:
                os.kill(os.getpid(), signal.SIGKILL)

    for name in ("stdout", "stderr"):
        (folder / name).unlink(missing_ok=True)
    sys.addaudithook(hook)
    try:
        command_line(arguments, folder, environment)
    except SystemExit:
        (folder / "writes").write_text(str(count))
        raise


def _obey_modes() -> None:
    """Give up root's right to do with files what their modes forbid; another user may not even read the interpreter."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice, for capabilities from 32 on
    if libc.capget(header, held):
        raise OSError(ctypes.get_errno(), "capget")
    for place in (0, 1):
        held[place] &= ~PERMISSIONS
    if libc.capset(header, held):
        raise OSError(ctypes.get_errno(), "capset")


def call(function: Callable[..., Any], *arguments: Any, folder: Path, timeout: float = 3600) -> Any:
    """What a Python function returns in a process of its own; RuntimeError with its stack trace if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    process = FORKS.Process(target=_call, args=(function, arguments, folder))
    process.start()
    seconds = Stopwatch()
    while process.is_alive() and seconds() < timeout:
        process.join(1.0)
    if process.is_alive():
        process.kill()
        raise RuntimeError(f"{function.__name__} took more than {timeout:.0f} s")
    if process.exitcode:
        said = (folder / "stderr").read_text(errors="replace") if (folder / "stderr").exists() else ""
        raise RuntimeError(f"{function.__name__} ended with code {process.exitcode}: {said[-1500:]}")
    return pickle.loads((folder / "result").read_bytes())


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["PSM_CACHE"] = str(folder / "cache")
    with (folder / "stderr").open("w", buffering=1) as sys.stderr:
        try:
            (folder / "result").write_bytes(pickle.dumps(function(*arguments)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    rss: float  # MB
    handles: int
    threads: int


def usage(pid: int | str = "self") -> Usage | None:
    """What a process holds at the moment; None if it is gone."""
    root = Path(f"/proc/{pid}")
    try:
        pages = int((root / "statm").read_text().split()[1])
        handles, threads = (len(list((root / name).iterdir())) for name in ("fd", "task"))
    except OSError:
        return None
    return Usage(pages * resource.getpagesize() / 1e6, handles, threads)


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file by JSON."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)
