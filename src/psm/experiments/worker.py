"""One run of a suite in a process of its own: train or resume it, score it, measure it, record it.

Started by the suite as `python -m psm.experiments.worker` with a job as JSON on its standard input. Leaves when the
suite is gone, so that no run is trained by two processes.
"""

import json
import logging
import os
import platform
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from psm.config.schema import MAY_CHANGE
from psm.experiments.plan import BASELINES, PlannedRun, data_name
from psm.experiments.results import Study, has_gradients, read_record, write_record
from psm.methods.plugins import load_plugins
from psm.ops import keep_freed_memory
from psm.utils.errors import Diverged, UserError
from psm.utils.files import read_lines
from psm.utils.locking import locked
from psm.utils.run_folder import RunFolder


@dataclass(frozen=True)
class Job:
    """What a worker is given."""

    out: str
    run: PlannedRun
    baselines: bool  # whether it also scores raw pixels and an untrained encoder
    commit: str
    suite: int  # the process to leave with

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        content = json.loads(text)
        return cls(**content | {"run": PlannedRun(**content["run"])})


def main() -> int:
    """0 when the run is recorded, 1 when it failed; what went wrong is the last line on stderr."""
    job = Job.from_json(sys.stdin.read())
    _leave_with(job.suite)
    keep_freed_memory()
    logging.basicConfig(level=logging.WARNING, format="psm: %(message)s")
    try:
        load_plugins(job.run.settings.get("plugins", []))
        work(job)
    except (UserError, Diverged) as error:
        print(f"psm: {error}", file=sys.stderr)
        return 1
    return 0


def work(job: Job) -> None:
    """Do what is left to do of a run; whatever another process began and left is continued."""
    study = Study(Path(job.out))
    lock = study.lock(job.run.run)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock):  # a worker whose suite was killed may need a moment to notice
        _train(study, job.run)
        _score(study, job)


def _train(study: Study, run: PlannedRun) -> None:
    from psm.training.pretrain import run_pretraining

    if not _trained(RunFolder(study.run(run.run)), run.epochs):
        run_pretraining(run.settings, {"out": str(study.run(run.run)), "resume": "auto", "progress": False})


def _trained(run: RunFolder, epochs: int) -> bool:
    """The encoder is written once a run is complete."""
    try:
        return run.encoder.exists() and json.loads(run.info.read_text())["epoch"] == epochs
    except (OSError, ValueError, KeyError):
        return False


def _score(study: Study, job: Job) -> None:
    run = job.run
    path, baselines = study.record(run.run, run.evaluated), study.record(run.baseline, run.evaluated)
    record = read_record(path)
    if record is None or (job.baselines and read_record(baselines) is None):
        scores = _evaluate(study, job)
        about = _about(study, job, scores[-1]["protocol"])
        if job.baselines:
            shown = {
                "run": run.baseline,
                "title": "baselines",
                "method": "",
                "seconds": None,
                "curves": [],
                "epochs": 0,
            }
            of = [score for score in scores if score["of"] in BASELINES]
            write_record(baselines, about | shown | {"scores": of})
        record = about | {"scores": [score for score in scores if score["of"] not in BASELINES]}
    if run.gradients and not has_gradients(record):
        record["gradients"] = _gradients(study, run)
    write_record(path, record)


def _evaluate(study: Study, job: Job) -> list[dict[str, Any]]:
    from psm.evaluation.evaluate import run_evaluation

    keys = {"checkpoint": str(study.run(job.run.run)), "baselines": job.baselines, "progress": False}
    scores = [asdict(score) for score in run_evaluation(job.run.evaluation, keys).scores]
    # A record tells what was measured, not where on this machine: it can be kept and sent.
    places = ("checkpoint", "data", "images")
    return [
        score | {"protocol": {key: value for key, value in score["protocol"].items() if key not in places}}
        for score in scores
    ]


def _gradients(study: Study, run: PlannedRun) -> list[dict[str, Any]]:
    from psm.config.stored import load_run_config
    from psm.data import load_dataset
    from psm.evaluation.gradient_ranks import gradient_ranks

    folder = RunFolder(study.run(run.run))
    config = load_run_config(folder)
    return gradient_ranks(folder.checkpoint, load_dataset(config.data, config.images, progress=False))


def _about(study: Study, job: Job, protocol: dict[str, Any]) -> dict[str, Any]:
    """All that a record says beside its numbers: what was run, on what, how long it took."""
    import torch

    from psm.config import merge as settings
    from psm.config.stored import load_run_config

    run = RunFolder(study.run(job.run.run))
    config = dict(settings.flatten(settings.to_dict(load_run_config(run)))) | {"data": data_name(job.run.data)}
    curves = read_lines(run.metrics)
    return {
        "run": job.run.run,
        "evaluated": job.run.evaluated,
        "title": job.run.title,
        "method": job.run.method,
        "data": config["data"],
        "seed": job.run.seed,
        "epochs": config["epochs"],
        "batch_size": config["batch_size"],
        "encoder": config["encoder"],
        "images": protocol["train_images"],
        "test_images": protocol["test_images"],
        "classes": protocol["classes"],
        "seconds": round(sum(epoch.get("seconds", 0.0) for epoch in curves), 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": job.commit,
        "psm": version("psm"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "hardware": hardware(),
        "evaluation": dict(job.run.evaluation),
        "config": {key: value for key, value in config.items() if key not in MAY_CHANGE},
        "curves": curves,
    }


def hardware() -> str:
    """The machine in a few words: its GPU, or its CPU."""
    import torch

    cores = f"{os.cpu_count()} cores"
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)}, {cores}"
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {cores}"


def _leave_with(suite: int) -> None:
    """End this process soon after the one that started it has ended, however that ended."""

    def watch() -> None:
        while os.getppid() == suite:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
