"""The executor that ``cluster=`` names."""

from collections.abc import Sequence

from psm.experiments.executors.base import Executor
from psm.experiments.plan import PlannedRun, Request


def make_executor(request: Request, runs: Sequence[PlannedRun]) -> Executor:
    """This machine, a Ray cluster or SLURM; refuses what cannot work before anything is written.

    Args:
        request: its keys say where, and what each run is given.
        runs: that are to be done.
    """
    cluster = request.config.cluster
    if cluster is None:
        from psm.experiments.executors.local import make_local

        return make_local(request.config, len(runs), request.keys)
    if cluster in ("slurm", "submitit"):
        from psm.experiments.executors.submitit import make_submitit

        return make_submitit(request, runs)
    from psm.experiments.executors.ray import make_ray

    return make_ray(request, runs)
