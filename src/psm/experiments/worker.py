"""One run of a suite in its own process: train or resume it, score it, measure its gradients, write its record.

Started as `python -m psm.experiments.worker JOB.json PARENT`. Exits when the process PARENT is gone, so that no run is
trained by two processes; without PARENT it runs to its end, to repeat a run by hand. A run with several devices starts
its further processes by the same line: these train along and leave.
"""

import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from psm.config.schema import MAY_CHANGE
from psm.experiments.job import Job
from psm.experiments.plan import BASELINES, PlannedRun, data_name
from psm.experiments.results import Study, has_gradients, read_record, write_record
from psm.methods.plugins import load_plugins
from psm.ops import keep_freed_memory
from psm.utils.errors import Diverged, Preempted, ResourceError, UserError
from psm.utils.files import read_lines
from psm.utils.locking import locked
from psm.utils.resources import resources_explained
from psm.utils.run_folder import RunFolder

TERMINATED = 143  # exit code of a run that was told to end, and has written a checkpoint


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 if the run is recorded, 1 if it failed, 143 after SIGTERM; the reason is the last line on stderr."""
    from psm.training.exchange import inherited

    path, *parent = arguments
    job = Job.read(Path(path))
    first = inherited() is None  # else a process of several devices, started by the first one
    if parent:
        _exit_with(int(parent[0]) if first else os.getppid())
    if hasattr(signal, "SIGUSR2"):  # submitit's, sent to all processes of a job; the one that it is for ends this one
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    keep_freed_memory()
    logging.basicConfig(level=logging.WARNING, format="psm: %(message)s")
    try:
        with resources_explained():
            load_plugins(job.run.settings.get("plugins", []))
            if first:
                work(job)
            else:
                _train(job.study, job.run)
    except (UserError, Diverged, ResourceError) as error:
        print(f"psm: {error}", file=sys.stderr)
        return 1
    except Preempted as error:
        print(f"psm: ended by {error}, with a checkpoint", file=sys.stderr)
        return TERMINATED
    return 0


def work(job: Job) -> None:
    """Train and score a run, continuing what another process began."""
    lock = job.study.lock(job.name)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock):  # a worker whose suite was killed may need a moment to exit
        if not _is_trained(RunFolder(job.study.run(job.name)), job.run.epochs):
            _train(job.study, job.run)
        _score(job.study, job)


def _train(study: Study, run: PlannedRun) -> None:
    from psm.training.pretrain import run_pretraining

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


def _exit_with(parent: int) -> None:
    """Exit soon after the process that started this one has ended, however it ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
