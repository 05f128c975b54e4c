"""Connecting to a Ray cluster, and checking that its nodes can work on the runs of a suite."""

import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from psm.experiments.code_version import package_commit, package_digest
from psm.experiments.executors.remote_run import NodeInfo, describe_node
from psm.experiments.executors.resources import Machine
from psm.experiments.plan import PlannedRun, absolute_data
from psm.utils.errors import UserError, did_you_mean

log = logging.getLogger("psm")

CONNECT_SECONDS = 10.0  # to reach an address
ANSWER_SECONDS = 120.0  # for a node to import psm and describe itself


def connect(address: str) -> tuple[Any, bool]:
    """Ray, connected to a cluster, and whether this call has connected it."""
    try:
        import ray
    except ImportError:
        raise UserError(f"cluster={address} needs Ray: pip install psm[ray] here and on every node.") from None
    _check_address(address)
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="psm")
    except (ConnectionError, TimeoutError) as error:
        advice = "start one here by `ray start --head`, or give cluster=ADDRESS" if address == "auto" else "check it"
        raise UserError(f"cluster={address} finds no Ray cluster: {first_line(error)} {advice}.") from None
    except (RuntimeError, ValueError, AssertionError, ImportError) as error:
        raise UserError(f"cluster={address} cannot be used: {' '.join(str(error).split())[:400]}") from None
    _quiet(ray)
    return ray, True


def _quiet(ray: Any) -> None:
    """Keep Ray from printing the logs of a lost node into the suite's output, which no option of Ray's does."""
    with suppress(AttributeError):
        ray._private.worker._worker_logs_enabled = False


def _check_address(address: str) -> None:
    """Refuse what is no address, and one that nothing answers at: Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        known = ("auto", "slurm", "submitit")
        raise UserError(
            f"cluster={address} is unknown{did_you_mean(address, known)}: give auto or HOST:PORT for Ray, slurm or "
            "submitit."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
            is_ray = "RAY_USE_TLS" in os.environ or _speaks_http2(connection)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"cluster={address} does not answer ({getattr(error, 'strerror', None) or error}): check that "
            "`ray start --head` runs there, and that this machine reaches the port."
        ) from None
    if not is_ray:
        raise UserError(f"cluster={address} answers, but not as Ray does: give the port of `ray start --head`.")


def _speaks_http2(connection: socket.socket) -> bool:
    """True if the other side opens a connection as gRPC servers do, by a frame of settings."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
    header = connection.recv(9)
    return len(header) >= 4 and header[3] == 4


def machines_of(nodes: Iterable[Mapping[str, Any]]) -> list[Machine]:
    """What the nodes of a cluster have."""
    return [
        Machine(node["NodeName"], int(node["Resources"].get("CPU", 0)), node["Resources"].get("GPU", 0))
        for node in nodes
        if node["Alive"]
    ]


def node_names(nodes: Iterable[Mapping[str, Any]], hosts: Mapping[str, str]) -> dict[str, str]:
    """A name for each node of which the host is known: that which `ray start --node-name` gave, or its host.

    Nodes of the same name, of which a machine may have several, are told apart by the beginning of their id.
    """
    given = {node["NodeID"]: node["NodeName"] for node in nodes if node["NodeName"] != node["NodeManagerAddress"]}
    names = {node: given.get(node) or host for node, host in hosts.items()}
    counts = [*names.values()]
    return {node: name if counts.count(name) == 1 else f"{name}/{node[:6]}" for node, name in names.items()}


def needed_paths(runs: Iterable[PlannedRun]) -> list[str]:
    """Files and folders outside the study that runs read: images, weights to start from, plugins."""
    paths: dict[str, None] = {}
    for run in runs:
        data = absolute_data(run.data)
        of_run = [
            data if Path(data).is_absolute() else None,
            run.settings.get("init"),
            *run.settings.get("plugins", []),
        ]
        paths |= dict.fromkeys(path for path in of_run if path and Path(path).is_absolute())
    return list(paths)


def ask_nodes(ray: Any, nodes: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> dict[str, NodeInfo]:
    """What each node says about itself, by its id."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(describe_node)
    calls = {
        remote.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(list(paths)): node
        for node in nodes
    }
    ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_SECONDS)
    if late:
        raise UserError(
            f"node {calls[late[0]]['NodeName']} did not answer within {ANSWER_SECONDS:g} s: see `ray status`."
        )
    infos = {}
    for call in ready:
        try:
            infos[calls[call]["NodeID"]] = ray.get(call)
        except ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise UserError(
                f"node {calls[call]['NodeName']} cannot run psm: {lines[-1] if lines else type(error).__name__}. "
                "Install there what is installed here."
            ) from None
    return infos


def check_nodes(infos: Mapping[str, NodeInfo]) -> None:
    """Refuse nodes with other code than here, and paths that some nodes have and others have not."""
    here = package_digest()
    for name, info in infos.items():
        if info.digest != here:
            raise UserError(
                f"node {name} runs psm at {info.commit}, which differs from {package_commit()} here: install the same "
                "on every node."
            )
    versions = {f"torch {info.torch}, Python {info.python}" for info in infos.values()}
    if len(versions) > 1:
        log.warning("nodes differ: %s; results agree to rounding only.", " and ".join(sorted(versions)))
    for path in sorted({path for info in infos.values() for path in info.missing}):
        lacking = [name for name, info in infos.items() if path in info.missing]
        if len(lacking) < len(infos):
            raise UserError(
                f"{path} is not on node {', '.join(lacking)}: put it there at the same path, or on a file system that "
                "the nodes share."
            )


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
