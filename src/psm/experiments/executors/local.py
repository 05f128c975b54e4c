"""Runs on this machine, several at a time, each in a process of its own and with GPUs of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from psm.config.schema import ExperimentConfig
from psm.experiments.executors.base import Ended, Event, Started
from psm.experiments.executors.process import Worker, start_worker, stop_workers
from psm.experiments.executors.resources import (
    GpuPool,
    Machine,
    Share,
    choose_share,
    refuse_too_much,
    room,
    visible_gpus,
)
from psm.experiments.job import Job
from psm.utils.devices import num_cores


class LocalExecutor:
    """Starts a worker process for each job at once."""

    def __init__(self, jobs: int, share: Share, gpus: Sequence[str] = (), threads: str = "1"):
        """
        Args:
            jobs: runs at a time.
            share: what each run takes.
            gpus: those of this machine, as CUDA_VISIBLE_DEVICES names them.
            threads: OMP_NUM_THREADS of each process.
        """
        self.jobs, self.share, self.threads = jobs, share, threads
        self.pool = GpuPool(gpus, share.gpus) if gpus else None
        self.workers: dict[str, Worker] = {}
        self.events: list[Event] = []

    def describe(self) -> str:
        gpus = f", {self.share.gpus:g} GPU{'s' * (self.share.gpus > 1)} a run" if self.share.gpus else ""
        return f"{self.jobs} at a time{gpus}"

    def submit(self, job: Job) -> None:
        variables = {"OMP_NUM_THREADS": self.threads}
        if self.pool is not None:  # devices=auto takes what it sees
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.pool.lend(job.name))
        self.workers[job.name] = start_worker(job, variables)
        self.events.append(Started(job.name))

    def poll(self) -> list[Event]:
        for name, worker in list(self.workers.items()):
            code = worker.poll()
            if code is not None:
                del self.workers[name]
                if self.pool is not None:
                    self.pool.take_back(name)
                self.events.append(Ended(name, code))
        events, self.events = self.events, []
        return events

    def stop(self) -> None:
        stop_workers(list(self.workers.values()))
        self.workers.clear()

    def close(self) -> None:
        pass


def make_local(config: ExperimentConfig, runs: int, settings: Mapping[str, Any]) -> LocalExecutor:
    """The executor of this machine.

    Without ``jobs=`` as many runs work at a time as ``cpus=`` and the GPUs leave room for, one where neither says
    anything.
    """
    gpus = visible_gpus()
    machine = Machine("this machine", num_cores(), len(gpus))
    # Runs may share cores, as they always could: only GPUs bound their number.
    least = choose_share([machine], runs, 1, config.gpus, settings)
    refuse_too_much([machine], least, "this machine")
    if config.jobs is not None:
        jobs = config.jobs
    elif config.cpus is not None:
        jobs = max(1, machine.cpus // config.cpus)
    else:
        jobs = room([machine], least) if least.gpus else 1
    if least.gpus:
        jobs = min(jobs, room([Machine(machine.name, jobs, machine.gpus)], least))
    share = Share(config.cpus or max(1, machine.cpus // jobs), least.gpus, least.processes)
    return LocalExecutor(jobs, share, gpus, share.threads(config.cpus))
