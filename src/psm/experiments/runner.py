"""Running a plan: several runs at a time, where an executor says, each in its own process; finished runs stay.

The suite locks the study's folder. A failed run is recorded with its log and the others go on. A killed suite is
continued by the same command: runs are named by their settings and resumed from their folders.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from psm.config import merge as settings
from psm.config.schema import EvaluateConfig, PretrainConfig
from psm.experiments.code_version import package_commit
from psm.experiments.display import Display, SuiteProgress
from psm.experiments.executors import Ended, Event, Executor, Lost, Started
from psm.experiments.executors.choose import make_executor
from psm.experiments.job import Job
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
from psm.utils.errors import UserError
from psm.utils.files import remove_temporary_files
from psm.utils.locking import locked
from psm.utils.resources import write_error

POLL_SECONDS = 0.2  # between questions to the executor


@dataclass(frozen=True)
class SuiteResult:
    """The study with its plan, and the runs that failed."""

    study: Study
    plan: Plan
    already_finished: int  # runs that were finished before
    failed: tuple[PlannedRun, ...]


@dataclass
class Suite:
    """Gives runs to an executor, as many at a time as it takes, and keeps the study's files up to date."""

    study: Study
    executor: Executor
    commit: str
    display: Display
    submitted: dict[str, Job] = field(default_factory=dict)
    failed: list[PlannedRun] = field(default_factory=list)

    def work(self, runs: Sequence[PlannedRun]) -> None:
        """Work on all runs, to the end of the last one."""
        waiting = list(runs)
        while waiting or self.submitted:
            while waiting and len(self.submitted) < self.executor.jobs:
                self._submit(waiting.pop(0))
            for event in self.executor.poll():
                self._handle(event)
            self.display.refresh()
            time.sleep(POLL_SECONDS)

    def _submit(self, run: PlannedRun) -> None:
        in_work = any(job.baselines and job.run.baselines == run.baselines for job in self.submitted.values())
        baselines = not in_work and not has_baselines(self.study, run)
        job = Job(str(self.study.folder.resolve()), run, baselines, self.commit)
        self.submitted[run.name] = job
        self.executor.submit(job)

    def _handle(self, event: Event) -> None:
        run = self.submitted[event.run].run
        if isinstance(event, Started):
            self.display.run_started(run, event.node)
        elif isinstance(event, Lost):
            self.display.run_lost(run, event.node, event.reason)
        else:
            del self.submitted[event.run]
            self._record_end(run, event)

    def _record_end(self, run: PlannedRun, ended: Ended) -> None:
        """Collect the results of a run that succeeded, or add it to failures.csv."""
        failures: list[dict[str, Any]] = [
            dict(row) for row in read_csv(self.study.csv("failures")) if row["run"] != run.name
        ]
        if ended.code == 0 and is_finished(self.study, run):
            self.display.run_finished(run)
            collect_records(self.study)
        else:
            self.failed.append(run)
            failures.append(_failure(self.study, run, ended))
            self.display.run_failed(run, failures[-1]["reason"])
        if failures or self.study.csv("failures").exists():
            write_csv(self.study.csv("failures"), failures)


def run_experiments(request: Request) -> SuiteResult:
    """Train and score all runs of a request that are not finished, and write the results."""
    plan = make_plan(request)
    study = Study(Path(request.config.out).expanduser())
    missing = _missing(study, plan)
    executor: Executor | None = None
    if missing:
        _check_settings(missing[0])
        executor = make_executor(request, missing)
    try:
        with _locked_folder(study):
            add_entries(study, plan.entries)
            collect_records(study)
            missing = _missing(study, plan) if executor else []  # another suite may have worked on it until now
            progress = SuiteProgress(study, len(plan.runs), missing)
            with Display(progress, executor.describe() if executor else "", request.config.progress) as display:
                failed = _work(Suite(study, executor, package_commit(), display), plan, missing) if executor else []
    finally:
        if executor:
            executor.close()
    return SuiteResult(study, plan, len(plan.runs) - len(missing), tuple(failed))


def _work(suite: Suite, plan: Plan, missing: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Work on the missing runs; gives those that failed. No process is left behind, however this ends."""
    try:
        suite.work(missing)
        # The run that was to score them may have failed: another one of the same data and seed does.
        suite.work([run for run in _missing(suite.study, plan) if is_finished(suite.study, run)])
    finally:
        suite.executor.stop()
        collect_records(suite.study)
    return suite.failed


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


def _failure(study: Study, run: PlannedRun, ended: Ended) -> dict[str, Any]:
    """A row of failures.csv."""
    log = study.log(run.name)
    return {
        "run": run.name,
        "title": run.title,
        "data": data_name(run.data),
        "seed": run.seed,
        "reason": ended.reason or _failure_reason(log, ended.code),
        "log": str(log.relative_to(study.folder)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _failure_reason(log: Path, code: int) -> str:
    """The signal that ended a process, or the last line of its log."""
    if code < 0:
        with suppress(ValueError):
            name = signal.Signals(-code).name
            return f"ended by {name}{', which the kernel sends when memory runs out' * (name == 'SIGKILL')}"
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
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
        for part in (folder, folder / "jobs", folder / "records", study.report):  # not of runs, which have own locks
            remove_temporary_files(part, below=False)
        yield
