"""The work of one worker process, as it is handed from the suite to the process, on this machine or another."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from psm.experiments.plan import PlannedRun
from psm.experiments.results import Study
from psm.utils.files import write_text_atomically


@dataclass(frozen=True)
class Job:
    """A run to train and score, and where."""

    out: str  # folder of the study, or the folder that stands for it on another machine
    run: PlannedRun
    baselines: bool  # whether to score raw pixels and an untrained encoder too
    commit: str

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def study(self) -> Study:
        return Study(Path(self.out))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Job":
        return cls(**content | {"run": PlannedRun(**content["run"])})

    def write(self) -> Path:
        """Write the job to its file in the study, which every process of the run reads."""
        path = self.study.job(self.name)
        write_text_atomically(path, json.dumps(self.to_dict()) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> "Job":
        return cls.from_dict(json.loads(path.read_text()))
