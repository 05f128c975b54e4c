"""Runs on this machine, several at a time, each in a process of its own."""

import os

from psm.experiments.executors.base import Ended, Event, Started
from psm.experiments.executors.process import Worker, start_worker, stop_workers
from psm.experiments.job import Job
from psm.utils.devices import num_cores


class LocalExecutor:
    """Starts a worker process for each job at once."""

    def __init__(self, jobs: int):
        self.jobs = jobs
        self.workers: dict[str, Worker] = {}
        self.events: list[Event] = []

    def describe(self) -> str:
        return f"{self.jobs} at a time"

    def submit(self, job: Job) -> None:
        self.workers[job.name] = start_worker(job, _threads(self.jobs))
        self.events.append(Started(job.name))

    def poll(self) -> list[Event]:
        for name, worker in list(self.workers.items()):
            code = worker.poll()
            if code is not None:
                del self.workers[name]
                self.events.append(Ended(name, code))
        events, self.events = self.events, []
        return events

    def stop(self) -> None:
        stop_workers(list(self.workers.values()))
        self.workers.clear()


def _threads(jobs: int) -> dict[str, str]:
    """The cores divided among the runs, unless OMP_NUM_THREADS is set."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, num_cores() // jobs))}
