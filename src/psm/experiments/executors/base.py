"""The interface between a suite and the machines that its runs work on."""

from dataclasses import dataclass
from typing import Protocol

from psm.experiments.job import Job


@dataclass(frozen=True)
class Started:
    """A run has begun to work."""

    run: str
    node: str = ""  # empty: this machine


@dataclass(frozen=True)
class Lost:
    """The machine of a run is gone; the run waits for another one and goes on from its checkpoint."""

    run: str
    node: str
    reason: str


@dataclass(frozen=True)
class Ended:
    """A run has ended."""

    run: str
    code: int  # of its worker process; negative: the signal that ended it
    reason: str = ""  # where the log of the run cannot say it


Event = Started | Lost | Ended


class Executor(Protocol):
    """Works on jobs in worker processes somewhere. Results are in the study's folder when a run has ended."""

    jobs: int  # runs that may be submitted at a time

    def describe(self) -> str:
        """Where the runs work and how many at a time, as the end of a line."""

    def submit(self, job: Job) -> None:
        """Begin a job, now or when a machine is free for it."""

    def poll(self) -> list[Event]:
        """What has happened since the last call. Does not wait."""

    def stop(self) -> None:
        """End all jobs; their checkpoints are kept. No process is left behind."""

    def close(self) -> None:
        """Leave the cluster. Called once, after all else."""
