"""A run on a machine that does not share the study's folder: its files go there and come back."""

import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from psm.experiments.executors.process import stop_workers
from psm.experiments.executors.remote_run import RemoteRun
from psm.experiments.executors.transfer import changed_files, files_to_resume, write_files
from psm.experiments.job import Job
from psm.experiments.plan import make_plan, read_request


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job with the files of a run that is under way."""
    (run,) = make_plan(read_request(["figure2"], {"preset": "smoke"})).runs
    job = Job(str(tmp_path / "study"), run, True, "abc")
    folder = job.study.run(run.name)
    for name in ("checkpoints/last.ckpt", "checkpoints/epoch-0001.ckpt", "metrics.jsonl", "config.yaml", ".psm"):
        write_files(folder, {name: name.encode()})
    write_files(folder, {"checkpoints/.writing-xyz": b"half", "logs/events": b"many"})
    return job


def names(job: Job, files: Any) -> set[str]:
    return {name.removeprefix(f"runs/{job.name}/") for name in files}


def test_what_a_node_needs_is_sent_and_nothing_else(job: Job) -> None:
    assert names(job, files_to_resume(job)) == {"checkpoints/last.ckpt", "metrics.jsonl", "config.yaml", ".psm"}


def test_only_what_changed_comes_back(job: Job) -> None:
    known: Any = {}
    assert names(job, changed_files(job, known, weights=False, records=False)) == {
        *("metrics.jsonl", "config.yaml", ".psm", "logs/events")
    }
    assert names(job, changed_files(job, known, weights=True, records=False)) == {
        *("checkpoints/last.ckpt", "checkpoints/epoch-0001.ckpt")
    }
    assert changed_files(job, known, weights=True, records=True) == {}
    write_files(job.study.run(job.name), {"checkpoints/last.ckpt": b"of the next epoch"})
    write_files(job.study.folder, {f"records/{job.run.baselines}.{job.run.evaluation_hash}.json": b"{}"})
    fresh = changed_files(job, known, weights=True, records=True)
    assert list(fresh) == [
        f"records/{job.run.baselines}.{job.run.evaluation_hash}.json",
        f"runs/{job.name}/checkpoints/last.ckpt",
    ]


def test_what_rests_on_other_files_is_read_before_and_written_after_them(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that is cut off never has a record without its encoder, or a checkpoint without its metrics."""
    run = f"runs/{job.name}"
    record = f"records/{job.name}.{job.run.evaluation_hash}.json"
    write_files(job.study.folder, {f"{run}/encoder.safetensors": b"e", record: b"{}"})
    files = changed_files(job, {}, weights=True, records=True)
    wanted = [record, f"{run}/encoder.safetensors", f"{run}/checkpoints/last.ckpt", f"{run}/metrics.jsonl"]
    assert [name for name in files if name in wanted] == wanted
    written: list[str] = []
    monkeypatch.setattr(
        "psm.experiments.executors.transfer.write_atomically",
        lambda path, write: written.append(str(path.relative_to(tmp_path))),
    )
    write_files(tmp_path, files)
    assert [name for name in written if name in wanted] == wanted[::-1]


def test_a_run_is_started_reported_and_stopped(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a shell script for Python, so that nothing is trained."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    prefix = f"psm-run-{socket.gethostname()}-"
    (tmp_path / "scratch" / f"{prefix}999999999-x").mkdir()  # of a process that was killed
    (tmp_path / "scratch" / f"{prefix}{os.getpid()}-x").mkdir()
    monkeypatch.setattr("psm.experiments.executors.process.sys.executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text('#!/bin/sh\necho "$FLAG" "$(pwd)"\nexec sleep 60\n')
    (tmp_path / "python").chmod(0o755)
    remote = RemoteRun()
    report = remote.start(job.to_dict(), files_to_resume(job), {"FLAG": "given"}, str(tmp_path), "node-a")
    left = {path.name for path in (tmp_path / "scratch").iterdir()}
    assert f"{prefix}999999999-x" not in left
    assert f"{prefix}{os.getpid()}-x" in left
    text = b""
    deadline = time.monotonic() + 30
    while b"given" not in text and time.monotonic() < deadline:
        report = remote.poll(weights=True, received=report.number)
        text += report.log
        assert (report.code, report.files) == (None, {}), "what was sent is known"
        time.sleep(0.05)
    assert f"{job.name} on node-a" in text.decode()
    assert f"given {tmp_path}" in text.decode()
    write_files(Path(remote.job.out), {f"runs/{job.name}/checkpoints/last.ckpt": b"of epoch 2"})
    for _ in range(2):  # the first of them is lost
        seen = remote.poll(weights=True, received=report.number)
        assert list(seen.files.values()) == [b"of epoch 2"], "until it is confirmed"
    assert remote.poll(weights=True, received=seen.number).files == {}
    worker = remote.worker
    assert worker is not None
    assert remote.stop(seen.number + 1).code == -15
    remote.close()
    assert not Path(remote.job.out).exists()
    stop_workers([worker])  # of one that is gone: nothing
