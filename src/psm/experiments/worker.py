"""One run of a suite in its own process: train or resume it, score it, measure its gradients, write its record.

Started by the suite as `python -m psm.experiments.worker` with a job as JSON on standard input. Exits when the suite
is gone, so that no run is trained by two processes.
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
from psm.utils.errors import Diverged, ResourceError, UserError
from psm.utils.files import read_lines
from psm.utils.locking import locked
from psm.utils.resources import resources_explained
from psm.utils.run_folder import RunFolder


@dataclass(frozen=True)
class Job:
    """The work of one worker process."""

    out: str  # folder of the study
    run: PlannedRun
    baselines: bool  # whether to score raw pixels and an untrained encoder too
    commit: str
    suite_pid: int  # the worker exits with this process

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        content = json.loads(text)
        return cls(**content | {"run": PlannedRun(**content["run"])})


def main() -> int:
    """Exit code 0 if the run is recorded, 1 if it failed; the reason is the last line on stderr."""
    job = Job.from_json(sys.stdin.read())
    _exit_with(job.suite_pid)
    keep_freed_memory()
    logging.basicConfig(level=logging.WARNING, format="psm: %(message)s")
    try:
        with resources_explained():
            load_plugins(job.run.settings.get("plugins", []))
            work(job)
    except (UserError, Diverged, ResourceError) as error:
        print(f"psm: {error}", file=sys.stderr)
        return 1
    return 0


def work(job: Job) -> None:
    """Train and score a run, continuing what another process began."""
    study = Study(Path(job.out))
    lock = study.lock(job.run.name)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock):  # a worker whose suite was killed may need a moment to exit
        _train(study, job.run)
        _score(study, job)


def _train(study: Study, run: PlannedRun) -> None:
    from psm.training.pretrain import run_pretraining

    if not _is_trained(RunFolder(study.run(run.name)), run.epochs):
        call = {"out": str(study.run(run.name)), "resume": "auto", "progress": False}
        # What the plan says is all there is to say: nothing depends on the device, and init= gives weights alone.
        run_pretraining({"preset": "paper"}, run.settings, call, take_over=False)


def _is_trained(run: RunFolder, epochs: int) -> bool:
    """True if the encoder of the last epoch was written and is intact; else training writes it once more."""
    from psm.models.pretrained import read_encoder

    try:
        return run.encoder.exists() and read_encoder(run.encoder)[0].epoch == epochs
    except UserError:
        return False


def _score(study: Study, job: Job) -> None:
    """Write the records of a run and, if asked for, of the baselines."""
    run = job.run
    path, baselines = (study.record(name, run.evaluation_hash) for name in (run.name, run.baselines))
    record = read_record(path)
    if record is None or (job.baselines and read_record(baselines) is None):
        scores = _evaluate(study, job)
        about = _run_description(study, job, scores[-1]["protocol"])
        if job.baselines:
            write_record(baselines, _baselines_record(about, run, scores))
        record = about | {"scores": [score for score in scores if score["of"] not in BASELINES]}
    if run.gradients and not has_gradients(record):
        record["gradients"] = _gradients(study, run)
    write_record(path, record)


def _baselines_record(about: dict[str, Any], run: PlannedRun, scores: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of the baselines: that of the run without a method and its training."""
    untrained: dict[str, Any] = {
        "run": run.baselines,
        "title": "baselines",
        "method": "",
        "seconds": None,
        "curves": [],
        "epochs": 0,
    }
    return about | untrained | {"scores": [score for score in scores if score["of"] in BASELINES]}


def _evaluate(study: Study, job: Job) -> list[dict[str, Any]]:
    """The scores of a run, without paths of this machine in their protocols."""
    from psm.evaluation.evaluate import run_evaluation

    keys = {"checkpoint": str(study.run(job.run.name)), "baselines": job.baselines, "progress": False}
    scores = [score.record() for score in run_evaluation(job.run.evaluation, keys).scores]
    paths = ("checkpoint", "data", "images")
    return [
        score | {"protocol": {key: value for key, value in score["protocol"].items() if key not in paths}}
        for score in scores
    ]


def _gradients(study: Study, run: PlannedRun) -> list[dict[str, Any]]:
    from psm.config.stored import load_run_config
    from psm.data import load_dataset
    from psm.evaluation.gradient_ranks import gradient_ranks

    folder = RunFolder(study.run(run.name))
    config = load_run_config(folder)
    return gradient_ranks(folder.checkpoint, load_dataset(config.data, config.images, progress=False))


def _run_description(study: Study, job: Job, protocol: dict[str, Any]) -> dict[str, Any]:
    """A record without its scores: settings, data, machine, duration and metrics of the run."""
    import torch

    from psm.config import merge as settings
    from psm.config.stored import load_run_config

    run = RunFolder(study.run(job.run.name))
    config = dict(settings.flatten(settings.to_dict(load_run_config(run)))) | {"data": data_name(job.run.data)}
    if config["init"] is not None:
        config["init"] = Path(config["init"]).name
    config.pop("preset")
    curves = read_lines(run.metrics)
    return {
        "run": job.run.name,
        "evaluation_hash": job.run.evaluation_hash,
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
    """Name of the GPU, or of the CPU, and number of cores."""
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


def _exit_with(suite_pid: int) -> None:
    """Exit soon after the suite's process has ended, however it ended."""

    def watch() -> None:
        while os.getppid() == suite_pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
