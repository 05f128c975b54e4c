"""`psm experiment run ... cluster=`: runs on the nodes of a Ray cluster, one of which is lost."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from psm.experiments.code_version import package_digest
from psm.experiments.executors import Ended, Lost, Started, ray_cluster
from psm.experiments.executors import ray as executor_module
from psm.experiments.executors.ray_cluster import check_nodes, connect, node_names
from psm.experiments.executors.remote_run import NodeInfo, Report
from psm.experiments.job import Job
from psm.experiments.plan import make_plan, read_request
from psm.experiments.results import Study, read_record
from psm.experiments.worker import work
from psm.utils.errors import UserError
from psm.utils.files import read_lines

SMOKE = {"preset": "smoke", "methods": ["mocov2", "psm"], "monitor.knn": False, "linear.epochs": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a core each, on this machine."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": 80_000_000}
    here = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2] / "src"), here])
    cluster = Cluster(initialize_head=True, head_node_args=options | {"node_name": "first", "include_dashboard": False})
    cluster.add_node(**options, node_name="second")
    yield cluster
    cluster.shutdown()
    os.environ["PYTHONPATH"] = here


def request_for(out: Path, cluster: Any, **keys: Any) -> Any:
    return read_request(["table1"], SMOKE | {"out": str(out), "cluster": cluster.address} | keys)


def scores_of(study: Study, run: Any) -> Any:
    record = read_record(study.record(run.name, run.evaluation_hash))
    assert record is not None
    return record["scores"], [{k: v for k, v in x.items() if k in ("epoch", "loss")} for x in record["curves"]]


@pytest.mark.slow
def test_a_lost_node_costs_a_move_and_changes_no_bit(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run on each node; the node of one is killed after its first checkpoint has come back."""
    monkeypatch.setattr(executor_module, "REPORT_SECONDS", 0.1)
    monkeypatch.setattr(executor_module, "FETCH_SECONDS", 0.1)
    request = request_for(tmp_path, cluster, epochs=8)
    runs = make_plan(request).runs
    study = Study(tmp_path / "study")
    executor = executor_module.make_ray(request, runs)
    try:
        assert executor.describe() == "2 at a time on 2 nodes of Ray, 1 CPU a run"
        for run in runs:
            executor.submit(Job(str(study.folder), run, False, "abc"))
        events: list[Any] = []
        killed = ""
        deadline = time.monotonic() + 300
        while executor.seats:
            assert time.monotonic() < deadline, events
            events += executor.poll()
            place = {event.node: event.run for event in events if isinstance(event, Started)}
            victim = place.get("second", "")
            if not killed and victim and (study.run(victim) / "checkpoints" / "last.ckpt").exists():
                killed = victim
                (node,) = cluster.worker_nodes
                cluster.remove_node(node, allow_graceful=False)
            time.sleep(0.05)
    finally:
        executor.stop()
        executor.close()
    assert killed
    other = next(run.name for run in runs if run.name != killed)
    assert [type(event) for event in events if event.run == other] == [Started, Ended]
    assert [type(event) for event in events if event.run == killed] == [Started, Lost, Started, Ended]
    assert [event.node for event in events if event.run == killed and not isinstance(event, Ended)] == [
        *("second", "second", "first")
    ]
    assert all(event.code == 0 for event in events if isinstance(event, Ended))
    text = study.log(killed).read_text()
    assert "on second" in text
    assert "on first" in text
    here = Study(tmp_path / "here")  # as one process of this machine gives it, uninterrupted
    run = next(run for run in runs if run.name == killed)
    work(Job(str(here.folder), run, False, "abc"))
    assert scores_of(study, run) == scores_of(here, run)
    assert len(read_lines(study.run(killed) / "metrics.jsonl")) == 8
    record = read_record(study.record(killed, run.evaluation_hash))
    assert record is not None
    assert record["threads"] == 1


@pytest.mark.slow
def test_a_failed_run_is_a_result_and_its_log_comes_back(cluster: Any, tmp_path: Path, capfd: Any) -> None:
    from psm.cli.main import main

    out = tmp_path / "study"
    keys = ["preset=smoke", "methods=simclr", f"data={tmp_path}/nowhere", f"cluster={cluster.address}", f"out={out}"]
    assert main(["experiment", "run", "table1", *keys]) == 1
    output = capfd.readouterr().err
    assert "starts simclr · nowhere · seed 0 on first" in output
    assert "FAILED simclr · nowhere" in output
    assert "LOST" not in output
    (failure,) = (out / "failures.csv").read_text().splitlines()[1:]
    assert "nowhere does not exist" in failure


def test_what_no_node_has_is_refused_at_once(cluster: Any, tmp_path: Path) -> None:
    for keys, expected in (({"gpus": 2}, "gpus=2 is more than any"), ({"cpus": 64}, "cpus=64 gpus=0 is more than any")):
        request = request_for(tmp_path, cluster, **keys)
        with pytest.raises(UserError, match=expected):
            executor_module.make_ray(request, make_plan(request).runs)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("slrum", "cluster=slrum is unknown (did you mean 'slurm'?)"),
        ("127.0.0.1:PORT", "does not answer"),
        ("ray://127.0.0.1:PORT", "does not answer"),
    ],
)
def test_an_address_without_a_cluster_gets_a_sentence(address: str, expected: str, tmp_path: Path, capsys: Any) -> None:
    from psm.cli.main import main

    pytest.importorskip("ray")
    out = tmp_path / "study"
    address = address.replace("PORT", str(free_port()))
    assert main(["experiment", "run", "figure2", "preset=smoke", f"out={out}", f"cluster={address}"]) == 2
    output = capsys.readouterr().err
    assert expected in output
    assert len(output.strip().splitlines()) == 1
    assert not out.exists()


def test_another_server_is_not_taken_for_ray() -> None:
    """Ray itself would try for minutes."""
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(UserError, match="answers, but not as Ray does"):
            connect(f"127.0.0.1:{server.getsockname()[1]}")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install psm\[ray\]"):
        connect("auto")


def test_an_address_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_cluster, "CONNECT_SECONDS", 0.01)
    with pytest.raises(UserError, match="does not answer"):
        connect("192.0.2.77:6379")  # an address for documentation, at which nothing is


NODE = NodeInfo("vm", "abc", package_digest(), "2.6", "3.11.4", ())


def test_nodes_with_other_code_or_without_the_images_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    check_nodes({"a": NODE, "b": NODE})
    with pytest.raises(UserError, match=r"node b runs psm at def, which differs from .* here: install the same"):
        check_nodes({"a": NODE, "b": replace(NODE, digest="0", commit="def")})
    lacking = replace(NODE, missing=("/images",))
    with pytest.raises(UserError, match="/images is not on node b: put it there"):
        check_nodes({"a": NODE, "b": lacking})
    check_nodes({"a": lacking, "b": lacking})  # the runs themselves will say so
    check_nodes({"a": NODE, "b": replace(NODE, torch="2.7")})
    assert "torch 2.6, Python 3.11.4 and torch 2.7, Python 3.11.4" in caplog.text


def test_nodes_are_told_apart() -> None:
    address = {"NodeManagerAddress": "10.0.0.1"}
    nodes = [
        {"NodeID": "abcdefghi", "NodeName": "10.0.0.1", **address},
        {"NodeID": "bcdefghij", "NodeName": "10.0.0.1", **address},
        {"NodeID": "cdefghijk", "NodeName": "large", **address},
    ]
    hosts = {node["NodeID"]: "vm" for node in nodes}
    assert node_names(nodes, hosts) == {
        "abcdefghi": "vm/abcdef",
        "bcdefghij": "vm/bcdefg",
        "cdefghijk": "large",
    }


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    (run,) = make_plan(read_request(["figure2"], {"preset": "smoke"})).runs
    job = Job(str(tmp_path), run, True, "abc")
    assert Job.read(job.write()) == job
    assert json.loads((tmp_path / "jobs" / f"{run.name}.json").read_text())["baselines"]


class FakeRay:
    """Says which nodes there are, and remembers which actors were killed."""

    def wait(self, calls: Any, **how: Any) -> Any:
        return calls, []

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def nodes(self) -> Any:
        about = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 1.0}}
        return [about | {"NodeID": name, "NodeName": name} for name in ("old", "new")]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


def test_a_node_that_joins_with_other_code_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (run,) = make_plan(read_request(["figure2"], {"preset": "smoke"})).runs
    ray = FakeRay()
    executor = executor_module.RayExecutor(ray, 1, executor_module.Share(1, 0), {}, [], {"old": "old"})
    placed: list[Any] = []
    monkeypatch.setattr(executor, "_place", placed.append)
    seat = executor_module.Seat(Job(str(tmp_path), run, False, "abc"), actor="actor")
    other = replace(NODE, digest="0", commit="def")
    assert executor._begin(seat, "new", other) == []
    assert (placed, ray.killed, executor.left_out) == ([seat], ["actor"], {"new"})
    assert "new is left out: it runs psm at def" in caplog.text
    with pytest.raises(UserError, match="no other node is left"):
        executor._begin(seat, "old", other)


def test_a_run_that_is_told_to_end_moves_and_one_that_fails_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A node that is shut down in order sends SIGTERM to its processes."""
    (run,) = make_plan(read_request(["figure2"], {"preset": "smoke"})).runs
    executor = executor_module.RayExecutor(FakeRay(), 1, executor_module.Share(1, 0), {}, [], {"old": "old"})
    monkeypatch.setattr(executor, "_place", lambda seat: None)
    seat = executor_module.Seat(Job(str(tmp_path), run, False, "abc"), mock.MagicMock(), node="old", working=True)
    executor.seats[run.name] = seat
    moves = [executor._report(seat, Report(code, b"text\n"), 0.0) for code in (143, -15, 143, 143)]
    assert moves[:3] == [[Lost(run.name, "old", "was told to end")]] * 3
    assert isinstance(moves[3][0], Ended)
    assert "nodes: 4 in a row were lost" in moves[3][0].reason
    executor.seats[run.name] = seat
    assert executor._report(seat, Report(1), 0.0) == [Ended(run.name, 1)]
    assert executor.seats == {}
    assert Study(tmp_path).log(run.name).read_text() == "text\n" * 4
