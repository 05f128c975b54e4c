"""``init=`` in experiments: every run starts from the weights, with the suite's settings and not those of their run."""

import json
from pathlib import Path
from typing import Any

import psm
from helpers import SMALL
from psm.experiments.plan import make_plan, read_request
from psm.experiments.results import Study
from psm.experiments.worker import _run_description, _train


class Job:
    """What a description of a run needs of a job."""

    commit = ""

    def __init__(self, run: Any) -> None:
        self.run = run


def test_runs_start_from_the_weights(tmp_path: Path) -> None:
    settings: dict[str, Any] = SMALL | {"epochs": 1, "monitor": {"knn": False}, "optim": {"weight_decay": 0.5}}
    first = psm.pretrain(tmp_path / "first", **settings).out
    keys = {"preset": "smoke", "init": str(first), "methods": ["psm"], "monitor.knn": False}
    plan = make_plan(read_request(["table1"], keys))
    (run,) = plan.runs
    assert run.settings["init"] == str(first)
    assert str(tmp_path) not in "".join(entry.command for entry in plan.entries), "no paths of this machine in results"
    study = Study(tmp_path / "study")
    _train(study, run)
    folder = study.run(run.name)
    told = json.loads((folder / "encoder.json").read_text())["init"]
    assert told["from"] == str(first)
    assert not told["settings"]
    protocol = {"train_images": 1, "test_images": 1, "classes": 1}
    config = _run_description(study, Job(run), protocol)["config"]
    assert config["init"] == "first"
    assert config["optim.weight_decay"] == 1e-3, "the suite's settings, so that rows compare"
