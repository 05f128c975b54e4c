"""What a run folder says about its run, read from its text files alone. Imports nothing heavy."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psm.config.finetune import FinetuneConfig
from psm.config.keys import rows, value_at
from psm.config.schema import PretrainConfig
from psm.config.stored import is_finetuning, stored_config
from psm.data.location import data_name
from psm.utils.errors import UserError
from psm.utils.files import read_lines
from psm.utils.locking import is_held
from psm.utils.run_folder import RunFolder

ACCURACY = "accuracy"  # of a fine-tuned classifier, top-1 on the test images, in percent
RUNNING, FINISHED, STOPPED, UNREADABLE = "running", "finished", "stopped", "unreadable"


@dataclass(frozen=True)
class RunSummary:
    """A run: its settings, how far it is, and its newest scores."""

    name: str  # relative to the folder that was searched
    folder: Path
    state: str
    changed: float  # seconds since the epoch
    config: PretrainConfig | FinetuneConfig | None = None  # None: it cannot be read
    problem: str = ""
    metrics: tuple[Mapping[str, Any], ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)  # kind -> top-1, or the value of a measure

    @property
    def epoch(self) -> int:
        return int(self.metrics[-1].get("epoch", 0)) if self.metrics else 0

    @property
    def method(self) -> str:
        """The method of pretraining, or finetune."""
        if isinstance(self.config, FinetuneConfig):
            return "finetune"
        return self.config.method if self.config else ""

    @property
    def data(self) -> str:
        return data_name(self.config.data) if self.config else ""

    def score(self, kind: str) -> float | None:
        """The newest score of a kind; for kNN and linear else what was measured while training."""
        if kind in self.scores:
            return self.scores[kind]
        return next((float(line[kind]) for line in reversed(self.metrics) if kind in line), None)

    def settings(self) -> dict[str, Any]:
        """Every key and its value."""
        found: dict[str, Any] = {}
        for row in rows(self.config) if self.config else ():
            value = value_at(self.config, row.key)
            found |= (
                {f"{row.key}.{name}": one for name, one in value.items()}
                if isinstance(value, dict)
                else {row.key: value}
            )
        return found


def find_runs(folder: Path) -> list[RunSummary]:
    """The runs below a folder, or the run that it is; those that changed last come first.

    Raises:
        UserError: The folder does not exist or holds no run.
    """
    if not folder.is_dir():
        raise UserError(f"folder={folder} does not exist: give the folder that your runs are in.")
    markers = [folder / ".psm"] if (folder / ".psm").exists() else sorted(folder.rglob(".psm"))
    found = [summarize(marker.parent, folder) for marker in markers]
    if not found:
        raise UserError(f"folder={folder} holds no run: `psm pretrain out={folder}/a data=FOLDER` makes one.")
    return sorted(found, key=lambda run: -run.changed)


def summarize(folder: Path, root: Path) -> RunSummary:
    """Read one run folder; what cannot be read is said in ``problem``."""
    run = RunFolder(folder)
    name = folder.name if folder == root else str(folder.relative_to(root))
    written = [path.stat().st_mtime for path in (run.metrics, run.scores, run.config, run.marker) if path.exists()]
    changed = max(written, default=time.time())
    config: PretrainConfig | FinetuneConfig
    try:
        config = stored_config(run, FinetuneConfig) if is_finetuning(run) else stored_config(run, PretrainConfig)
    except UserError as error:
        return RunSummary(name, folder, UNREADABLE, changed, problem=str(error))
    metrics = tuple(read_lines(run.metrics))
    finished = run.encoder.exists() or run.finetuned.exists()
    state = RUNNING if is_held(run.marker) else FINISHED if finished else STOPPED
    return RunSummary(name, folder, state, changed, config, metrics=metrics, scores=_scores(run))


def _scores(run: RunFolder) -> dict[str, float]:
    """The newest score of each kind, and the accuracy of a classifier on the test images."""
    found = _newest(read_lines(run.scores))
    with suppress(OSError, ValueError, KeyError, TypeError):  # none, or of another version
        found[ACCURACY] = float(json.loads(run.finetuned.read_text(encoding="utf-8"))["best"]["test"]["top1"])
    return found


def _newest(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The newest score of each kind of the encoder itself, baselines left out."""
    found = {}
    for line in lines:
        value = next((line[name] for name in ("top1", "map", "nmi", "rankme", "lidar") if name in line), None)
        if value is not None and line.get("of") not in ("raw pixels", "untrained encoder"):
            found[str(line.get("score"))] = float(value)
    return found
