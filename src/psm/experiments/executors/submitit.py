"""Runs as jobs of SLURM through submitit, for sites that have nothing else; submitit's local jobs work alike.

The study's folder has to be on a file system that this machine and the nodes share: a job works in it as a worker
process of this machine does.
"""

import re
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psm.experiments.code_version import package_commit, package_digest
from psm.experiments.executors.base import Ended, Event, Lost, Started
from psm.experiments.executors.losses import Losses
from psm.experiments.executors.process import TERMINATE_SECONDS, TOLD_TO_END, Worker, start_worker, stop_workers
from psm.experiments.executors.resources import Share, count_devices
from psm.experiments.job import Job
from psm.experiments.plan import PlannedRun, Request
from psm.utils.errors import UserError

CHECK_SECONDS = 2.0  # between looks at a job
PREEMPT_SECONDS = 60.0  # for a run to finish its step and to write a checkpoint; SLURM gives 90
PATIENCE = 120.0  # seconds for SLURM to end a job after SIGTERM
MINUTES = 24 * 60  # of a job without slurm.time
REQUEUES = 1000  # times that a job may reach its time limit and is queued again
FAILED = ("OUT_OF_MEMORY", "CANCELLED", "DEADLINE", "FAILED")  # states of a job that ended by itself or by a person
HEADER = re.compile(rb"^--- \S+ \S+ on (.+)$", re.MULTILINE)  # of the log, see `start_worker`


class WorkerJob:
    """What a job of SLURM executes: the worker process of a run."""

    def __init__(self) -> None:
        self.worker: Worker | None = None

    def __call__(self, content: Mapping[str, Any], variables: Mapping[str, str], digest: str) -> tuple[int, str]:
        """The worker's exit code, and a reason where the worker was not started."""
        job, node = Job.from_dict(dict(content)), socket.gethostname()
        if package_digest() != digest:
            return 1, f"node {node} runs psm at {package_commit()}, which differs from {job.commit} of the suite"
        if not job.study.marker.exists():
            return 1, f"node {node} does not see {job.out}: the study has to be on a file system that all nodes share"
        self.worker = start_worker(job, variables, node)
        while self.worker.poll() is None:  # not wait: a signal's handler waits for the same process
            time.sleep(0.2)
        if self.worker.returncode in TOLD_TO_END:  # this job ends too; its state will say why
            time.sleep(PATIENCE)
        return self.worker.returncode, ""

    def checkpoint(self, *arguments: Any) -> Any:
        """Before a job is preempted or reaches its time limit: end the worker in order and be queued again."""
        import submitit

        if self.worker is not None:
            stop_workers([self.worker], PREEMPT_SECONDS)
            self.worker = None
        return submitit.helpers.DelayedSubmission(WorkerJob(), *arguments)

    __submitit_checkpoint__ = checkpoint  # the name that submitit looks for, beside the older one


@dataclass
class Submitted:
    """A run and its job."""

    job: Job
    handle: Any
    log_read: int = 0
    node: str = ""
    next_check: float = 0.0

    def __post_init__(self) -> None:
        self.losses = Losses(self.job.study.run(self.job.name))


@dataclass
class SubmititExecutor:
    """Submits a job for each run. SLURM queues those that do not fit yet."""

    submitit: Any
    cluster: str  # slurm or local
    jobs: int
    share: Share
    parameters: Mapping[str, Any]
    variables: Mapping[str, str]
    submitted: dict[str, Submitted] = field(default_factory=dict)

    def describe(self) -> str:
        return f"up to {self.jobs} at a time by submitit ({self.cluster}), {self.share}"

    def submit(self, job: Job) -> None:
        self._submit(Submitted(job, None))

    def poll(self) -> list[Event]:
        now = time.monotonic()
        events: list[Event] = []
        for one in list(self.submitted.values()):
            if now >= one.next_check:
                one.next_check = now + CHECK_SECONDS
                done = one.handle.done()  # before the log is read: what it says is complete then
                events += self._starts(one)
                events += self._ended(one) if done else []
        return events

    def stop(self) -> None:
        """Cancel all jobs. Their workers get SIGTERM, finish their step and write a checkpoint."""
        for one in self.submitted.values():
            one.handle.cancel(check=False)
        deadline = time.monotonic() + TERMINATE_SECONDS
        while self.cluster == "local" and time.monotonic() < deadline:
            if all(one.handle.done() for one in self.submitted.values()):
                break
            time.sleep(0.1)
        self.submitted.clear()

    def close(self) -> None:
        pass

    def _submit(self, one: Submitted) -> None:
        job = one.job
        executor = make_auto(self.submitit, job.study.folder / "submitit", self.cluster, self.parameters)
        executor.update_parameters(name=f"psm-{job.name}"[:100])
        one.log_read, one.node = _size(job.study.log(job.name)), ""
        try:
            one.handle = executor.submit(WorkerJob(), job.to_dict(), dict(self.variables), package_digest())
        except (RuntimeError, self.submitit.core.utils.FailedJobError) as error:
            raise UserError(f"SLURM refuses a job: {' '.join(str(error).split())[-300:]}") from None
        self.submitted[job.name] = one

    def _starts(self, one: Submitted) -> list[Event]:
        """Nodes on which the worker has begun since the last look, by the headers in its log."""
        path = one.job.study.log(one.job.name)
        if _size(path) <= one.log_read:
            return []
        with path.open("rb") as file:
            file.seek(one.log_read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        one.log_read += len(whole)
        nodes = [found.group(1).decode(errors="replace") for found in HEADER.finditer(whole)]
        if nodes:
            one.node = nodes[-1]
        return [Started(one.job.name, node) for node in nodes]

    def _ended(self, one: Submitted) -> list[Event]:
        del self.submitted[one.job.name]
        try:
            code, reason = one.handle.result()
            return [Ended(one.job.name, code, reason)]
        except self.submitit.core.utils.UncompletedJobError as error:
            state = str(one.handle.state).split()[0] if str(one.handle.state) else "UNKNOWN"
            # a function that raises has a result too: an error, of a subclass of this kind
            if isinstance(error, self.submitit.core.utils.FailedJobError):
                return [Ended(one.job.name, 1, str(error).strip().splitlines()[-1])]
        if self.cluster == "slurm" and state in FAILED:
            return [Ended(one.job.name, 1, f"SLURM ended the job: {state}")]
        if not one.losses.add():
            return [Ended(one.job.name, 1, f"jobs: {one.losses} ({state})")]
        node = one.node
        self._submit(one)
        return [Lost(one.job.name, node, f"its job is gone ({state})")]


def make_submitit(request: Request, runs: Sequence[PlannedRun]) -> SubmititExecutor:
    """The executor for ``cluster=slurm`` or ``cluster=submitit``; nothing is written yet."""
    config = request.config
    try:
        import submitit
    except ImportError:
        raise UserError(f"cluster={config.cluster} needs submitit: pip install psm[slurm].") from None
    cluster = "slurm" if config.cluster == "slurm" or shutil.which("srun") else "local"
    if cluster == "slurm" and not shutil.which("srun"):
        raise UserError("cluster=slurm finds no SLURM: there is no `srun` here. Start the suite on a login node.")
    processes = count_devices(request.keys)
    wants = request.keys.get("accelerator", "auto") in ("gpu", "cuda")
    gpus = config.gpus if config.gpus is not None else processes if wants else 0
    if gpus != int(gpus):
        raise UserError(f"gpus={gpus:g} cannot be given to a job of SLURM: give a whole number.")
    share = Share(config.cpus or processes, gpus, processes)
    minutes = config.slurm.get("time", MINUTES)
    if not isinstance(minutes, (int, float)) or minutes <= 0:
        raise UserError(f"slurm.time={minutes} is no number of minutes: give for example slurm.time=720 for 12 hours.")
    parameters = {
        "timeout_min": minutes,
        "cpus_per_task": share.cpus,
        "gpus_per_node": int(gpus),
        "tasks_per_node": 1,
        "nodes": 1,
        **{f"slurm_{name}": value for name, value in config.slurm.items() if name != "time"},
    }
    with tempfile.TemporaryDirectory() as folder:
        make_auto(submitit, Path(folder), cluster, parameters)
    # A job has the cores that it asked for, whatever is set here.
    variables = {"OMP_NUM_THREADS": share.threads(share.cpus)}
    return SubmititExecutor(submitit, cluster, config.jobs or len(runs), share, parameters, variables)


def make_auto(submitit: Any, folder: Path, cluster: str, parameters: Mapping[str, Any]) -> Any:
    """An executor of submitit with its parameters, or a sentence on those that it refuses."""
    try:
        executor = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=REQUEUES)
        executor.update_parameters(**parameters)
    except (NameError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"submitit refuses slurm.*: {' '.join(str(error).split())[:300]}") from None
    return executor


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
