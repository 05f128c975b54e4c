"""Runs on the nodes of a Ray cluster, each in an actor that holds its cores and GPUs.

Nodes share nothing with this machine but the images: a run works in a temporary folder of its node, and its metrics,
checkpoints and records are fetched into the study's folder, which alone has the state of the suite. A lost node costs a
run what it did since the last checkpoint that was fetched.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from psm.data.registry import NAMES
from psm.experiments.code_version import package_digest
from psm.experiments.executors.base import Ended, Event, Lost, Started
from psm.experiments.executors.losses import Losses
from psm.experiments.executors.process import TERMINATE_SECONDS, TOLD_TO_END
from psm.experiments.executors.ray_cluster import (
    ask_nodes,
    check_nodes,
    connect,
    first_line,
    machines_of,
    needed_paths,
    node_names,
)
from psm.experiments.executors.remote_run import NodeInfo, RemoteRun, Report, describe_node
from psm.experiments.executors.resources import Share, choose_share, refuse_too_much, room
from psm.experiments.executors.transfer import files_to_resume, write_files
from psm.experiments.job import Job
from psm.experiments.plan import PlannedRun, Request
from psm.utils.errors import UserError

log = logging.getLogger("psm")

REPORT_SECONDS = 1.0  # between reports of a run
FETCH_SECONDS = 5.0  # at least, between checkpoints that are fetched
FETCH_SHARE = 0.1  # of the time may go into fetching checkpoints
CLOSE_SECONDS = 5.0  # for an actor to remove its folder
GRACE_SECONDS = 10.0  # for a node to be known as lost after its processes are gone
FORWARDED = ("PSM_KERNELS", "ONEDNN_MAX_CPU_ISA", "CUBLAS_WORKSPACE_CONFIG")  # variables that change results


class RayRun(RemoteRun):
    """The actor of a run."""

    def hello(self, paths: Sequence[str]) -> tuple[str, NodeInfo]:
        """The node's id and what it says about itself."""
        import ray

        return ray.get_runtime_context().get_node_id(), describe_node(paths)


@dataclass
class Seat:
    """A run, its actor, and the call that is under way."""

    job: Job
    actor: Any = None
    call: Any = None
    node: str = ""  # id; empty until the actor is somewhere
    working: bool = False
    next_report: float = 0.0
    next_fetch: float = 0.0
    asked_at: float = 0.0
    received: int = 0  # number of the last report
    died_at: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        self.losses = Losses(self.job.study.run(self.job.name))


@dataclass
class RayExecutor:
    """Gives each job to an actor. Ray queues those that do not fit yet."""

    ray: Any
    jobs: int
    share: Share
    variables: Mapping[str, str]
    paths: Sequence[str]  # that a node needs
    names: dict[str, str]  # of nodes, by id
    owned: bool = True  # whether the connection ends with the suite
    seats: dict[str, Seat] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)  # nodes with other code

    def describe(self) -> str:
        at_a_time = min(self.jobs, room(machines_of(self.ray.nodes()), self.share))
        several = "s" * (len(self.names) > 1)
        return f"{at_a_time} at a time on {len(self.names)} node{several} of Ray, {self.share}"

    def submit(self, job: Job) -> None:
        self.seats[job.name] = Seat(_with_absolute_root(job))
        self._place(self.seats[job.name])

    def poll(self) -> list[Event]:
        events: list[Event] = []
        for seat in list(self.seats.values()):
            events += self._poll(seat)
        return events

    def stop(self) -> None:
        """End all runs and fetch their last checkpoints."""
        calls = {}
        for seat in self.seats.values():
            if seat.working and seat.died_at is None:
                calls[seat.actor.stop.remote(seat.received)] = seat
        wanted = list(calls)
        ready, _ = self.ray.wait(wanted, num_returns=len(wanted), timeout=TERMINATE_SECONDS * 2) if wanted else ([], [])
        for call in ready:
            try:
                self._store(calls[call], self.ray.get(call))
            except self.ray.exceptions.RayError as error:
                log.warning("the last checkpoint of %s was not fetched: %s", calls[call].job.name, first_line(error))
        self._dismiss(list(self.seats.values()))
        self.seats.clear()

    def _dismiss(self, seats: Sequence[Seat]) -> None:
        """End actors, and with them what they hold; those that can remove their folders first."""
        calls = [seat.actor.close.remote() for seat in seats if seat.working and seat.died_at is None]
        if calls:
            self.ray.wait(calls, num_returns=len(calls), timeout=CLOSE_SECONDS)
        for seat in seats:
            self.ray.kill(seat.actor)

    def close(self) -> None:
        if self.owned:
            self.ray.shutdown()

    def _place(self, seat: Seat) -> None:
        """Ask Ray for a node."""
        options: dict[str, Any] = {"num_cpus": self.share.cpus, "num_gpus": self.share.gpus, "max_restarts": 0}
        if self.left_out:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(self.left_out))})"}
        seat.actor = self.ray.remote(RayRun).options(**options).remote()
        seat.call = seat.actor.hello.remote(list(self.paths))
        seat.node, seat.working, seat.died_at, seat.reason, seat.received = "", False, None, "", 0

    def _poll(self, seat: Seat) -> list[Event]:
        now = time.monotonic()
        if seat.died_at is not None:
            return self._judge(seat, now)
        if seat.call is None:
            if now >= seat.next_report:
                seat.call, seat.asked_at = seat.actor.poll.remote(now >= seat.next_fetch, seat.received), now
            return []
        ready, _ = self.ray.wait([seat.call], timeout=0)
        if not ready:
            return []
        call, seat.call = seat.call, None
        try:
            answer = self.ray.get(call)
        except self.ray.exceptions.ActorUnavailableError:  # the network hiccups: ask again
            seat.next_report = now + REPORT_SECONDS
            return []
        except self.ray.exceptions.RayActorError as error:
            seat.died_at, seat.reason = now, first_line(error)
            return []
        except self.ray.exceptions.RayError as error:
            return [self._end(seat, 1, f"on {self._name(seat)}: {first_line(error)}")]
        if not isinstance(answer, Report):
            return self._begin(seat, *answer)
        return self._report(seat, answer, now)

    def _begin(self, seat: Seat, node: str, info: NodeInfo) -> list[Event]:
        """The actor of a run is on a node: check the node's code, then start the run."""
        if node not in self.names:  # it has joined after the suite began
            name = node_names(self.ray.nodes(), {node: info.host})[node]
            self.names[node] = name if name not in self.names.values() else f"{name}/{node[:6]}"
        if info.digest != package_digest():
            self._leave_out(node, info)
            self.ray.kill(seat.actor)
            self._place(seat)
            return []
        seat.node, seat.working = node, True
        cwd = str(Path.cwd())
        seat.call = seat.actor.start.remote(
            seat.job.to_dict(), files_to_resume(seat.job), self.variables, cwd, self.names[node]
        )
        seat.next_fetch = time.monotonic() + FETCH_SECONDS
        return [Started(seat.job.name, self.names[node])]

    def _leave_out(self, node: str, info: NodeInfo) -> None:
        """Use a node no more that runs other code than the suite; end the suite if no other is left."""
        self.left_out.add(node)
        others = [x for x in self.ray.nodes() if x["Alive"] and x["NodeID"] not in self.left_out]
        if not room(machines_of(others), self.share):
            raise UserError(
                f"node {self.names[node]} runs psm at {info.commit}, which is not what the suite began with, and no "
                "other node is left: install the same on every node, and leave it alone while a suite works."
            )
        log.warning("%s is left out: it runs psm at %s, not what the suite began with.", self.names[node], info.commit)

    def _report(self, seat: Seat, report: Report, now: float) -> list[Event]:
        self._store(seat, report)
        if report.code in TOLD_TO_END:  # by a node that is shut down in order
            self._dismiss([seat])
            return self._move(seat, "was told to end")
        if report.code is not None:
            return [self._end(seat, report.code)]
        seat.next_report = now + REPORT_SECONDS
        if any(name.endswith(".ckpt") for name in report.files):
            taken = time.monotonic() - seat.asked_at
            seat.next_fetch = time.monotonic() + max(FETCH_SECONDS, taken / FETCH_SHARE)
        return []

    def _judge(self, seat: Seat, now: float) -> list[Event]:
        """The actor of a run is gone: with its node, which costs a move, or alone, which is a failure."""
        assert seat.died_at is not None
        alive = {node["NodeID"] for node in self.ray.nodes() if node["Alive"]}
        if seat.node in alive:
            if now - seat.died_at < GRACE_SECONDS:
                return []
            return [self._end(seat, 1, f"its process on {self._name(seat)} ended: {seat.reason}")]
        return self._move(seat, "the node is gone")

    def _move(self, seat: Seat, reason: str) -> list[Event]:
        """Ask for another node, unless the run has lost too many of them."""
        name, told = self._name(seat), seat.working
        if not seat.losses.add():
            return [self._end(seat, 1, f"nodes: {seat.losses}, the last one {name}: {seat.reason or reason}")]
        self._place(seat)
        return [Lost(seat.job.name, name, reason)] if told else []

    def _end(self, seat: Seat, code: int, reason: str = "") -> Ended:
        del self.seats[seat.job.name]
        self._dismiss([seat])
        return Ended(seat.job.name, code, reason)

    def _store(self, seat: Seat, report: Report) -> None:
        """Put what a node has reported into the study's folder."""
        seat.received = report.number
        study = seat.job.study
        write_files(study.folder, report.files)
        if report.log:
            path = study.log(seat.job.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(report.log)

    def _name(self, seat: Seat) -> str:
        return self.names.get(seat.node, "a node")


def make_ray(request: Request, runs: Sequence[PlannedRun]) -> RayExecutor:
    """Connect to the cluster that ``cluster=`` names, and check that its nodes can work on the runs."""
    config = request.config
    ray, owned = connect(str(config.cluster))
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        machines = machines_of(nodes)
        share = choose_share(machines, len(runs), config.cpus, config.gpus, request.keys)
        refuse_too_much(machines, share, f"the Ray cluster at {config.cluster}")
        usable = [node for node, machine in zip(nodes, machines, strict=True) if room([machine], share)]
        paths = needed_paths(runs)
        infos = ask_nodes(ray, usable, paths)
        names = node_names(nodes, {node: info.host for node, info in infos.items()})
        check_nodes({names[node]: info for node, info in infos.items()})
    except BaseException:
        if owned:
            ray.shutdown()
        raise
    variables = {"OMP_NUM_THREADS": share.threads(config.cpus)}
    variables |= {name: os.environ[name] for name in FORWARDED if name in os.environ}
    if not share.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return RayExecutor(ray, config.jobs or len(runs), share, variables, paths, names, owned)


def _with_absolute_root(job: Job) -> Job:
    """The job with the folder of published sets as an absolute path: a node has another working directory."""
    if job.run.data not in NAMES:
        return job
    root = str(Path(job.run.settings.get("images.root", "data")).expanduser().resolve())
    return replace(job, run=replace(job.run, settings={**job.run.settings, "images.root": root}))
