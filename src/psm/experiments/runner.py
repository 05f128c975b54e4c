"""Running a plan: several runs at a time, each in its own process; finished runs are not repeated.

The suite locks the study's folder. A failed run is recorded with its log and the others go on. A killed suite is
continued by the same command: runs are named by their settings and resumed from their folders.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from psm.config import merge as settings
from psm.config.schema import EvaluateConfig, PretrainConfig
from psm.experiments.display import Display, SuiteProgress
from psm.experiments.plan import Plan, PlannedRun, Request, data_name, make_plan
from psm.experiments.results import (
    Study,
    add_entries,
    collect_records,
    has_baselines,
    is_finished,
    read_csv,
    write_csv,
)
from psm.experiments.worker import Job
from psm.utils.errors import UserError
from psm.utils.locking import locked
from psm.utils.resources import write_error

POLL_SECONDS = 0.2  # between checks of the running processes
TERMINATE_SECONDS = 10.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True)
class SuiteResult:
    """The study with its plan, and the runs that failed."""

    study: Study
    plan: Plan
    already_finished: int  # runs that were finished before
    failed: tuple[PlannedRun, ...]


@dataclass
class RunProcess:
    """A run and its worker process."""

    run: PlannedRun
    process: subprocess.Popen[bytes]
    baselines: bool  # whether it also scores the baselines


@dataclass
class Suite:
    """Trains and scores runs in worker processes, ``jobs`` at a time."""

    study: Study
    jobs: int
    commit: str
    display: Display
    running: list[RunProcess] = field(default_factory=list)
    failed: list[PlannedRun] = field(default_factory=list)

    def work(self, runs: Sequence[PlannedRun]) -> None:
        """Work on all runs. No process is left behind, however this ends."""
        waiting = list(runs)
        try:
            while waiting or self.running:
                while waiting and len(self.running) < self.jobs:
                    self._start(waiting.pop(0))
                for ended in [one for one in self.running if one.process.poll() is not None]:
                    self.running.remove(ended)
                    self._record_end(ended)
                self.display.refresh()
                time.sleep(POLL_SECONDS)
        finally:
            _stop(self.running)

    def _start(self, run: PlannedRun) -> None:
        in_work = any(other.baselines and other.run.baselines == run.baselines for other in self.running)
        baselines = not in_work and not has_baselines(self.study, run)
        job = Job(str(self.study.folder), run, baselines, self.commit, os.getpid())
        process = _start_worker(job, self.study.log(run.name), _worker_environment(self.jobs))
        self.running.append(RunProcess(run, process, baselines))
        self.display.run_started(run)

    def _record_end(self, ended: RunProcess) -> None:
        """Collect the results of a run that succeeded, or add it to failures.csv."""
        run, code = ended.run, ended.process.returncode
        failures: list[dict[str, Any]] = [
            dict(row) for row in read_csv(self.study.csv("failures")) if row["run"] != run.name
        ]
        if code == 0 and is_finished(self.study, run):
            self.display.run_finished(run)
            collect_records(self.study)
        else:
            self.failed.append(run)
            failures.append(_failure(self.study, run, code))
            self.display.run_failed(run, failures[-1]["reason"])
        if failures or self.study.csv("failures").exists():
            write_csv(self.study.csv("failures"), failures)


def run_experiments(request: Request) -> SuiteResult:
    """Train and score all runs of a request that are not finished, and write the results."""
    plan = make_plan(request)
    study = Study(Path(request.config.out).expanduser())
    missing = _missing(study, plan)
    if missing:
        _check_settings(missing[0])
    with _locked_folder(study):
        add_entries(study, plan.entries)
        collect_records(study)
        missing = _missing(study, plan)  # another suite may have worked on it until now
        progress = SuiteProgress(study, len(plan.runs), missing, request.config.jobs)
        with Display(progress, request.config.progress) as display:
            suite = Suite(study, request.config.jobs, package_commit(), display)
            try:
                suite.work(missing)
            finally:
                collect_records(study)
    return SuiteResult(study, plan, len(plan.runs) - len(missing), tuple(suite.failed))


def _check_settings(run: PlannedRun) -> None:
    """Refuse wrong settings before any run starts."""
    from psm.evaluation.evaluate import chosen_scores
    from psm.training.resolve import check_encoder, check_settings

    config = settings.build(PretrainConfig, run.settings)
    check_settings(config)
    check_encoder(config)
    chosen_scores(settings.build(EvaluateConfig, run.evaluation))


def _missing(study: Study, plan: Plan) -> list[PlannedRun]:
    """Runs that are not finished, and one run for each record of baselines that is missing."""
    missing = [run for run in plan.runs if not is_finished(study, run)]
    covered = {run.baselines for run in missing}
    for run in plan.runs:
        if run.baselines not in covered and not has_baselines(study, run):
            missing.append(run)
            covered.add(run.baselines)
    return missing


def _start_worker(job: Job, log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of a run; its output is appended to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        file.write(f"--- {datetime.now(UTC).isoformat(timespec='seconds')} {job.run.name}\n".encode())
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "psm.experiments.worker"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # an interrupt at the terminal reaches the suite only
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # a process that died at once is handled as any other that failed
        process.stdin.write(job.to_json().encode())
        process.stdin.close()
    return process


def _worker_environment(jobs: int) -> dict[str, str]:
    """The environment with the cores divided among the runs, unless OMP_NUM_THREADS is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // jobs))} | os.environ


def _stop(running: Sequence[RunProcess]) -> None:
    """Terminate the processes, and kill those that do not end in time."""
    for one in running:
        with suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_SECONDS
    for one in running:
        try:
            one.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def _failure(study: Study, run: PlannedRun, code: int) -> dict[str, Any]:
    """A row of failures.csv."""
    log = study.log(run.name)
    return {
        "run": run.name,
        "title": run.title,
        "data": data_name(run.data),
        "seed": run.seed,
        "reason": _failure_reason(log, code),
        "log": str(log.relative_to(study.folder)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _failure_reason(log: Path, code: int) -> str:
    """The signal that ended a process, or the last line of its log."""
    if code < 0:
        with suppress(ValueError):
            name = signal.Signals(-code).name
            return f"ended by {name}{', which the kernel sends when memory runs out' * (name == 'SIGKILL')}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].removeprefix("psm: ") if lines and not lines[-1].startswith("---") else ""
    return last or f"ended with code {code}"


@contextmanager
def _locked_folder(study: Study) -> Iterator[None]:
    """Create and lock the study's folder; refuse a folder of other files and one in use by another suite."""
    folder = study.folder
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"out={folder} is a file: name a folder that is empty or does not exist yet.")
        if folder.exists() and any(folder.iterdir()) and not study.marker.exists():
            raise UserError(f"out={folder} is not empty and holds no study of psm: name another out.")
        folder.mkdir(parents=True, exist_ok=True)
        study.marker.touch()
    except OSError as error:
        raise write_error(f"out={folder}", error) from None
    with locked(study.marker, wait=False) as acquired:
        if not acquired:
            raise UserError(f"out={folder} is in use by another suite: wait for it or name another out.")
        yield


def package_commit() -> str:
    """The commit of the checkout that the package runs from, or its version where there is none."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # the package may lie within another repository
        changed = "+changes" if git("status", "--porcelain", "--untracked-files=no", "--", "../..") else ""
        return git("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return f"version {version('psm')}"
