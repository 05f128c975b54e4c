"""A run on a machine that does not share the study's folder; used by Ray, and knows nothing of it."""

import importlib.metadata
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from psm.experiments.code_version import package_commit, package_digest
from psm.experiments.executors.process import TOLD_TO_END, Worker, start_worker, stop_workers
from psm.experiments.executors.transfer import Files, Stamps, changed_files, write_files
from psm.experiments.job import Job


@dataclass(frozen=True)
class NodeInfo:
    """What a machine says about itself."""

    host: str
    commit: str
    digest: str  # of the package's sources
    torch: str
    python: str
    missing: tuple[str, ...]  # of the paths that it was asked for


def describe_node(paths: Sequence[str] = ()) -> NodeInfo:
    """Describe this machine, and say which of the paths are not there."""
    return NodeInfo(
        host=socket.gethostname(),
        commit=package_commit(),
        digest=package_digest(),
        torch=importlib.metadata.version("torch"),
        python=platform.python_version(),
        missing=tuple(path for path in paths if not Path(path).exists()),
    )


@dataclass(frozen=True)
class Report:
    """What is new of a run."""

    code: int | None  # None while its worker process runs
    log: bytes = b""
    files: Files = field(default_factory=dict)
    number: int = 0  # of this report, which the next question confirms


class RemoteRun:
    """Works on one job in a temporary folder of this machine and reports the files that change.

    A report may get lost on its way: what it had is reported again until the next question confirms it.
    """

    def __init__(self) -> None:
        self.job: Job | None = None
        self.worker: Worker | None = None
        self.known: Stamps = {}
        self.log_read = 0
        self.sent = 0  # number of the last report
        self.offered: dict[int, tuple[Stamps, int]] = {}  # what is known, and read of the log, once it is confirmed

    def start(
        self, content: Mapping[str, Any], files: Files, variables: Mapping[str, str], cwd: str, node: str
    ) -> Report:
        """Start the worker process.

        Args:
            content: of the job.
            files: to continue from.
            variables: for the environment of the process.
            cwd: its working directory, where this machine has it.
            node: name of this machine.
        """
        _remove_abandoned()
        scratch = tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-")
        self.job = replace(Job.from_dict(dict(content)), out=scratch)
        write_files(Path(scratch), files)
        changed_files(self.job, self.known, weights=True, records=True)  # what came is known
        self.worker = start_worker(self.job, variables, node, cwd if Path(cwd).is_dir() else scratch)
        return Report(None)

    def poll(self, weights: bool, received: int) -> Report:
        """What is new; everything, once the worker process has ended.

        Args:
            weights: with checkpoints and encoder.
            received: number of the last report that has arrived.
        """
        if self.worker is None:  # the call that should have started it got lost
            return Report(TOLD_TO_END[1])
        return self._report(self.worker.poll(), weights, received)

    def stop(self, received: int) -> Report:
        """End the worker process; gives its last checkpoint."""
        if self.worker is None:
            return Report(TOLD_TO_END[1])
        stop_workers([self.worker])
        return self._report(self.worker.returncode, True, received)

    def close(self) -> None:
        """Remove the temporary folder."""
        if self.job is not None:
            shutil.rmtree(self.job.out, ignore_errors=True)

    def _report(self, code: int | None, weights: bool, received: int) -> Report:
        assert self.job is not None
        if received in self.offered:
            self.known, self.log_read = self.offered[received]
            self.offered.clear()
        known = dict(self.known)
        files = changed_files(self.job, known, weights or code is not None, records=code is not None)
        with self.job.study.log(self.job.name).open("rb") as file:
            file.seek(self.log_read)
            log = file.read()
        self.sent += 1
        self.offered[self.sent] = known, self.log_read + len(log)
        return Report(code, log, files, self.sent)


def _prefix() -> str:
    """How the temporary folders of this host begin; in a container the host is the container."""
    return f"psm-run-{socket.gethostname()}-"


def _remove_abandoned() -> None:
    """Remove the folders of runs whose process was killed, as that of a suite is by SIGKILL."""
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        process = path.name.removeprefix(_prefix()).partition("-")[0]
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (OSError, ValueError):
            continue
