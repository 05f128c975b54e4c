"""Where the runs of a suite work: one interface, and an adapter each for this machine, Ray and SLURM."""

from psm.experiments.executors.base import Ended, Event, Executor, Lost, Started

__all__ = ["Ended", "Event", "Executor", "Lost", "Started"]
