"""What each run of a suite is given: cores, threads and GPUs of its own."""

import os
from pathlib import Path
from typing import Any

import pytest

from psm.experiments.executors import local
from psm.experiments.executors.base import Ended, Started
from psm.experiments.executors.resources import GpuPool, Machine, Share, choose_share, refuse_too_much, room
from psm.experiments.job import Job
from psm.experiments.plan import make_plan, read_request
from psm.utils.errors import UserError

NODES = [Machine("a", 8, 2), Machine("b", 4, 0)]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (Share(1, 0), 12),
        (Share(4, 0), 3),
        (Share(5, 0), 1),
        (Share(1, 1), 2),
        (Share(1, 2), 1),
        (Share(1, 3), 0),
        (Share(1, 0.5), 4),
        (Share(3, 0.5), 2),
        (Share(9, 0), 0),
    ],
)
def test_room_is_counted_machine_by_machine(share: Share, expected: int) -> None:
    assert room(NODES, share) == expected


@pytest.mark.parametrize(
    ("runs", "settings", "expected"),
    [
        (1, {}, Share(8, 1)),
        (2, {}, Share(4, 1)),
        (100, {}, Share(4, 1)),
        (3, {"accelerator": "cpu"}, Share(4, 0)),
        (100, {"accelerator": "cpu"}, Share(1, 0)),
        (2, {"devices": "2"}, Share(8, 2, 2)),
        (2, {"devices": "2", "accelerator": "cpu"}, Share(4, 0, 2)),
    ],
)
def test_cores_are_shared_out_without_a_run_having_to_wait_for_them(
    runs: int, settings: dict[str, Any], expected: Share
) -> None:
    assert choose_share(NODES, runs, None, None, settings) == expected


def test_what_no_machine_has_is_refused() -> None:
    with pytest.raises(UserError, match=r"gpus=3 is more than any .* \(a has 8 CPUs and 2 GPUs"):
        refuse_too_much(NODES, Share(1, 3), "the cluster")
    with pytest.raises(UserError, match="give a whole number"):
        choose_share(NODES, 1, None, 1.5, {})


def test_gpus_go_round() -> None:
    pool = GpuPool(["0", "1", "2"], 1)
    assert [pool.lend(run) for run in "abc"] == [["0"], ["1"], ["2"]]
    pool.take_back("b")
    assert pool.lend("d") == ["1"]
    halves = GpuPool(["0", "1"], 0.5)
    assert [halves.lend(run) for run in "abcd"] == [["0"], ["1"], ["0"], ["1"]]
    assert GpuPool(["4", "5", "6", "7"], 2).lend("a") == ["4", "5"]


class FakeWorker:
    """A process that ends when the test says so."""

    code: int | None = None

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """Runs that were started on a machine of two GPUs and eight cores, with their variables."""
    variables: dict[str, dict[str, str]] = {}

    def start(job: Job, own: dict[str, str]) -> FakeWorker:
        variables[job.name] = own
        return FakeWorker()

    monkeypatch.setattr(local, "start_worker", start)
    monkeypatch.setattr(local, "num_cores", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return variables


def jobs_of(request: Any) -> list[Job]:
    return [Job("study", run, False, "abc") for run in make_plan(request).runs]


def test_each_run_of_the_paper_has_a_gpu_of_its_own(started: Any) -> None:
    request = read_request(["table2"], {"preset": "paper", "data": ["cifar10"]})
    executor = local.make_local(request.config, 4, request.keys)
    assert (executor.jobs, executor.describe()) == (2, "2 at a time, 1 GPU a run")
    first, second, third = jobs_of(request)[:3]
    for job in (first, second):
        executor.submit(job)
    assert executor.poll() == [Started(first.name), Started(second.name)]
    assert [started[job.name]["CUDA_VISIBLE_DEVICES"] for job in (first, second)] == ["0", "1"]
    assert started[first.name]["OMP_NUM_THREADS"] == "4"
    executor.workers[second.name].code = -9
    assert executor.poll() == [Ended(second.name, -9)]
    executor.submit(third)
    assert started[third.name]["CUDA_VISIBLE_DEVICES"] == "1", "the one that is free again"


@pytest.mark.parametrize(
    ("keys", "jobs", "devices", "threads"),
    [
        ({"devices": "2"}, 1, "0,1", "4"),
        ({"gpus": 0.5}, 4, "0", "2"),
        ({"gpus": 0.5, "jobs": 2}, 2, "0", "4"),
        ({"accelerator": "cpu"}, 1, "", "8"),
        ({"gpus": 0, "jobs": 3}, 3, "", "2"),
        ({"gpus": 0, "cpus": 2}, 4, "", "2"),
        ({"jobs": 8}, 2, "0", "4"),
    ],
)
def test_keys_decide_what_a_run_gets(started: Any, keys: Any, jobs: int, devices: str, threads: str) -> None:
    request = read_request(["figure2"], {"preset": "paper", **keys})
    executor = local.make_local(request.config, 1, request.keys)
    job = jobs_of(request)[0]
    executor.submit(job)
    assert executor.jobs == jobs
    assert started[job.name] == {"CUDA_VISIBLE_DEVICES": devices, "OMP_NUM_THREADS": threads}


def test_more_gpus_than_there_are_is_a_mistake(started: Any) -> None:
    request = read_request(["figure2"], {"preset": "paper", "gpus": 4})
    with pytest.raises(UserError, match="gpus=4 is more than"):
        local.make_local(request.config, 1, request.keys)


def test_threads_set_by_the_user_stay_but_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "3")
    assert Share(8, 0).threads(None) == "3"
    assert Share(8, 0).threads(8) == "8"


def test_where_runs_work_is_neither_in_their_names_nor_in_the_command(tmp_path: Path) -> None:
    keys = {"preset": "smoke", "out": str(tmp_path)}
    elsewhere = {"cluster": "auto", "cpus": 2, "gpus": 1, "slurm.partition": "gpu", "ddp.timeout": 60, "jobs": 3}
    here, there = (make_plan(read_request(["figure2"], keys | more)) for more in ({}, elsewhere))
    assert [run.name for run in here.runs] == [run.name for run in there.runs]
    assert [entry.command for entry in here.entries] == [entry.command for entry in there.entries]
    assert here.entries[0].protocol == there.entries[0].protocol
