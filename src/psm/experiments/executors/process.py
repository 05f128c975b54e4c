"""A worker process: the same on every machine, whichever executor starts it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from psm.experiments.job import Job

TERMINATE_SECONDS = 10.0  # from SIGTERM to SIGKILL

TOLD_TO_END = (143, -signal.SIGTERM)  # exit codes of a worker after SIGTERM, with and without a last checkpoint

Worker = subprocess.Popen[bytes]


def start_worker(job: Job, variables: Mapping[str, str], node: str = "", cwd: str | None = None) -> Worker:
    """Start the process of a run, which ends with this process; its output is appended to the log.

    Args:
        job: what to work on.
        variables: put over the environment of this process.
        node: name of this machine for the log.
        cwd: working directory of the process; None: that of this one.
    """
    path = job.write()
    log = job.study.log(job.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        place = f" on {node}" if node else ""
        file.write(f"--- {datetime.now(UTC).isoformat(timespec='seconds')} {job.name}{place}\n".encode())
        file.flush()
        return subprocess.Popen(
            [sys.executable, "-m", "psm.experiments.worker", str(path), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            cwd=cwd,
            process_group=0,  # an interrupt at the terminal reaches the suite only
        )


def stop_workers(workers: Sequence[Worker], seconds: float = TERMINATE_SECONDS) -> None:
    """Terminate the processes and those that they started, and kill those that do not end in time."""
    for worker in workers:
        _send(worker, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _send(worker, signal.SIGKILL)
            worker.wait()


def _send(worker: Worker, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, number)
