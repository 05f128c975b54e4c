"""`psm experiment run ... cluster=slurm`: runs as jobs of submitit, in the tests its local ones."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from psm.experiments.executors import Ended, Lost, Started
from psm.experiments.executors import submitit as executor_module
from psm.experiments.executors.losses import ALLOWED
from psm.experiments.executors.submitit import SubmititExecutor, WorkerJob, make_submitit
from psm.experiments.job import Job
from psm.experiments.plan import make_plan, read_request
from psm.experiments.results import Study, read_record
from psm.experiments.worker import work
from psm.utils.errors import UserError

submitit = pytest.importorskip("submitit")

KEYS = {"preset": "smoke", "methods": ["mocov2"], "monitor.knn": False, "linear.epochs": 1, "cluster": "submitit"}


def children(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    return [child for child, parent in pairs if parent == pid]


@pytest.mark.slow
def test_a_lost_job_is_submitted_again_and_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a job are killed after the first checkpoint, as a node's are that is lost."""
    monkeypatch.setattr(executor_module, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(submitit.core.core.Job, "_results_timeout_s", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    request = read_request(["table1"], KEYS | {"epochs": 8, "out": str(tmp_path / "study")})
    (run,) = make_plan(request).runs
    study = Study(tmp_path / "study")
    study.folder.mkdir()
    study.marker.touch()
    executor = make_submitit(request, [run])
    assert executor.describe() == "up to 1 at a time by submitit (local), 1 CPU a run"
    executor.submit(Job(str(study.folder), run, False, "abc"))
    events: list[Any] = []
    killed = False
    deadline = time.monotonic() + 300
    try:
        while executor.submitted:
            assert time.monotonic() < deadline, events
            events += executor.poll()
            if not killed and (study.run(run.name) / "checkpoints" / "last.ckpt").exists():
                controller = int(executor.submitted[run.name].handle.job_id)
                for pid in (controller, *children(controller)):
                    os.kill(pid, signal.SIGKILL)
                killed = True
            time.sleep(0.05)
    finally:
        executor.stop()
    assert [type(event) for event in events] == [Started, Lost, Started, Ended]
    assert events[-1].code == 0, study.log(run.name).read_text()
    assert events[0].node == events[1].node != ""
    here = Study(tmp_path / "here")
    work(Job(str(here.folder), run, False, "abc"))
    found, expected = (read_record(x.record(run.name, run.evaluation_hash)) for x in (study, here))
    assert found is not None
    assert expected is not None
    assert found["scores"] == expected["scores"]
    assert [x["loss"] for x in found["curves"]] == [x["loss"] for x in expected["curves"]]


class FakeHandle:
    """A job of SLURM that has ended without a result."""

    def __init__(self, state: str):
        self.state = state

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        raise submitit.core.utils.UncompletedJobError("no output")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("NODE_FAIL", [Lost]),
        ("PREEMPTED", [Lost]),
        ("TIMEOUT", [Lost]),
        ("OUT_OF_MEMORY", [Ended]),
        ("CANCELLED by 1000", [Ended]),
    ],
)
def test_states_of_slurm_decide_between_a_move_and_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, expected: Any
) -> None:
    (run,) = make_plan(read_request(["table1"], KEYS)).runs
    executor = SubmititExecutor(submitit, "slurm", 1, executor_module.Share(1, 0), {}, {})

    def submit(one: Any) -> None:
        one.handle = FakeHandle(state)
        one.next_check = 0.0
        executor.submitted[run.name] = one

    monkeypatch.setattr(executor, "_submit", submit)
    executor.submit(Job(str(tmp_path), run, False, "abc"))
    events = executor.poll()
    assert [type(event) for event in events] == expected
    if expected == [Ended]:
        assert f"SLURM ended the job: {state.split()[0]}" in events[0].reason
        return
    for _ in range(5):  # no node keeps it: it is given up
        events += executor.poll()
    assert [type(event) for event in events] == [*[Lost] * ALLOWED, Ended]
    assert "lost with no checkpoint in between" in events[-1].reason


def test_a_job_on_a_node_with_other_code_or_without_the_study_fails_with_a_sentence(tmp_path: Path) -> None:
    (run,) = make_plan(read_request(["table1"], KEYS)).runs
    content = Job(str(tmp_path), run, False, "abc").to_dict()
    code, reason = WorkerJob()(content, {}, "another digest")
    assert code == 1
    assert "differs from abc of the suite" in reason
    code, reason = WorkerJob()(content, {}, executor_module.package_digest())
    assert code == 1
    assert "does not see" in reason


def test_a_preempted_job_ends_its_worker_and_is_queued_again() -> None:
    job = WorkerJob()
    job.worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
    worker = job.worker
    delayed = job.checkpoint({"out": "study"}, {}, "digest")
    assert worker.returncode == -signal.SIGTERM
    assert isinstance(delayed.function, WorkerJob)
    assert delayed.args == ({"out": "study"}, {}, "digest")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"gpus": 0.5}, "give a whole number"),
        ({"slurm.time": "long"}, "is no number of minutes"),
        ({"slurm.partitoin": "gpu"}, "submitit refuses slurm"),
        ({"cluster": "slurm"}, "there is no `srun` here"),
    ],
)
def test_mistakes_get_one_sentence(keys: Any, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no SLURM
    request = read_request(["table1"], KEYS | keys)
    with pytest.raises(UserError, match=expected):
        make_submitit(request, make_plan(request).runs)


def test_without_submitit_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    request = read_request(["table1"], KEYS)
    with pytest.raises(UserError, match=r"pip install psm\[slurm\]"):
        make_submitit(request, make_plan(request).runs)


def test_keys_become_parameters_of_the_job() -> None:
    keys = {"cpus": 4, "gpus": 2, "devices": "2", "slurm.partition": "gpu", "slurm.time": 90}
    request = read_request(["table1"], KEYS | keys)
    executor = make_submitit(request, make_plan(request).runs)
    assert executor.parameters == {
        **{"timeout_min": 90, "cpus_per_task": 4, "gpus_per_node": 2, "tasks_per_node": 1, "nodes": 1},
        "slurm_partition": "gpu",
    }
    assert executor.variables == {"OMP_NUM_THREADS": "2"}, "two processes share four cores"
