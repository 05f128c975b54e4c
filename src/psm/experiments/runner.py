"""Running a plan: several runs at a time, each a process of its own; what is finished is not repeated.

The suite holds a lock on the study's folder. A run that fails is noted with its log and the others go on. Killed at any
moment, the same command continues: a run is what its settings say, and its folder what it has reached.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from psm.config import merge as settings
from psm.config.schema import EvaluateConfig, PretrainConfig
from psm.experiments.display import Display, Progress
from psm.experiments.plan import Plan, PlannedRun, Request, data_name, make_plan
from psm.experiments.results import (
    Study,
    add_places,
    collect,
    finished,
    has_baselines,
    read_table,
    write_table,
)
from psm.experiments.worker import Job
from psm.utils.errors import UserError
from psm.utils.locking import locked

LOOK = 0.2  # seconds between looks at the running processes
GRACE = 10.0  # seconds that a process has to end when it is asked to


@dataclass(frozen=True)
class Outcome:
    """What became of a suite."""

    study: Study
    plan: Plan
    repeated: int  # runs that were finished before
    failed: tuple[PlannedRun, ...]


@dataclass
class Running:
    """A run and the process that works on it."""

    run: PlannedRun
    process: subprocess.Popen
    baselines: bool


def run_experiments(request: Request) -> Outcome:
    """Train and score whatever the request still lacks, and write the results."""
    plan = make_plan(request)
    study = Study(Path(request.config.out).expanduser())
    missing = _missing(study, plan)
    if missing:
        _check(missing[0])
    with _held(study):
        add_places(study, plan.places)
        collect(study)
        missing = _missing(study, plan)  # another suite may have worked on it until now
        commit = package_commit()
        failed: list[PlannedRun] = []
        progress = Progress(study, len(plan.runs), missing, request.config.jobs)
        with Display(progress, request.config.progress) as display:
            try:
                with closing(_processes(study, missing, request.config.jobs, commit, display)) as processes:
                    for ended in processes:
                        _note(study, ended, failed, display)
            finally:
                collect(study)
        return Outcome(study, plan, len(plan.runs) - len(missing), tuple(failed))


def _check(run: PlannedRun) -> None:
    """What is wrong with the settings of all runs is said before any of them starts."""
    from psm.evaluation.evaluate import check_settings as check_evaluation
    from psm.training.resolve import check_settings

    check_settings(settings.build(PretrainConfig, run.settings))
    check_evaluation(settings.build(EvaluateConfig, run.evaluation))


def _missing(study: Study, plan: Plan) -> list[PlannedRun]:
    """Runs with something left to do: to train, to score, or to give a data set its baselines."""
    missing = [run for run in plan.runs if not finished(study, run)]
    covered = {run.baseline for run in missing}
    for run in plan.runs:
        if run.baseline not in covered and not has_baselines(study, run):
            missing.append(run)
            covered.add(run.baseline)
    return missing


def _processes(study: Study, runs: Sequence[PlannedRun], jobs: int, commit: str, display: Display) -> Iterator[Running]:
    """Work on the runs, ``jobs`` at a time; yields each as it ends. However this ends, no process is left behind."""
    waiting, running = list(runs), []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                taken = any(other.baselines and other.run.baseline == run.baseline for other in running)
                baselines = not taken and not has_baselines(study, run)
                running.append(Running(run, _start(study, run, baselines, jobs, commit), baselines))
                display.started(run)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                yield one
            display.look()
            time.sleep(LOOK)
    finally:
        _stop(running)


def _start(study: Study, run: PlannedRun, baselines: bool, jobs: int, commit: str) -> subprocess.Popen:
    log = study.log(run.run)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        file.write(f"--- {datetime.now(UTC).isoformat(timespec='seconds')} {run.run}\n".encode())
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "psm.experiments.worker"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(jobs),
            start_new_session=True,  # an interrupt at the terminal is the suite's to pass on
        )
    with suppress(BrokenPipeError):  # a process that died at once is noted as any other that failed
        process.stdin.write(Job(str(study.folder), run, baselines, commit, os.getpid()).to_json().encode())
        process.stdin.close()
    return process


def _environment(jobs: int) -> dict[str, str]:
    """Cores are shared out among the runs, unless the user has said how many threads there are to be."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // jobs))} | os.environ


def _stop(running: Sequence[Running]) -> None:
    for one in running:
        with suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for one in running:
        try:
            one.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def _note(study: Study, ended: Running, failed: list[PlannedRun], display: Display) -> None:
    """Write down what became of a run."""
    run, code = ended.run, ended.process.returncode
    failures = [row for row in read_table(study.table("failures")) if row["run"] != run.run]
    if code == 0 and finished(study, run):
        display.finished(run)
        collect(study)
    else:
        failed.append(run)
        reason = _reason(study.log(run.run), code)
        log = str(study.log(run.run).relative_to(study.folder))
        when = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"run": run.run, "title": run.title, "data": data_name(run.data), "seed": run.seed}
        failures.append(about | {"reason": reason, "log": log, "date": when})
        display.failed(run, reason)
    if failures or study.table("failures").exists():
        write_table(study.table("failures"), failures)


def _reason(log: Path, code: int) -> str:
    """The last thing that was said, or the signal that ended it."""
    if code < 0:
        with suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = lines[-1].removeprefix("psm: ") if lines and not lines[-1].startswith("---") else ""
    return said or f"ended with code {code}"


@contextmanager
def _held(study: Study) -> Iterator[None]:
    """Take the folder for this suite; nobody else's files are touched, and no other suite works in it meanwhile."""
    folder = study.folder
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"out={folder} is a file: name a folder that is empty or does not exist yet.")
        if folder.exists() and any(folder.iterdir()) and not study.marker.exists():
            raise UserError(f"out={folder} is not empty and holds no study of psm: name another out.")
        folder.mkdir(parents=True, exist_ok=True)
        study.marker.touch()
    except OSError as error:
        raise UserError(f"out={folder} cannot be written: {error.strerror}.") from None
    with locked(study.marker, wait=False) as free:
        if not free:
            raise UserError(f"out={folder} is being worked on by another suite: wait for it or name another out.")
        yield


def package_commit() -> str:
    """The commit of the checkout that the package runs from, or its version where there is none."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # the package may merely lie within somebody's repository
        changed = "+changes" if git("status", "--porcelain", "--untracked-files=no", "--", "../..") else ""
        return git("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return f"version {version('psm')}"
