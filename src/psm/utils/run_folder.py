"""The run folder: which files lie in it, and which checkpoint a run is resumed from."""

from dataclasses import dataclass
from pathlib import Path

from psm.utils.errors import UserError
from psm.utils.files import TEMPORARY_PREFIX, lock_file, read_lines, write_lines


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run folder."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"

    def snapshot(self, epoch: int) -> Path:
        return self.folder / "checkpoints" / f"epoch-{epoch:04d}.ckpt"

    @property
    def snapshots(self) -> list[Path]:
        """Checkpoints that were kept, earliest first."""
        return sorted(self.checkpoint.parent.glob("epoch-*.ckpt"), key=lambda path: (len(path.name), path.name))

    @property
    def encoder(self) -> Path:
        return self.folder / "encoder.safetensors"

    @property
    def info(self) -> Path:
        return self.folder / "encoder.json"

    @property
    def best(self) -> Path:
        """Checkpoint of the epoch of `psm finetune` with the best validation accuracy."""
        return self.checkpoint.parent / "best.ckpt"

    @property
    def classifier(self) -> Path:
        return self.folder / "classifier.safetensors"

    @property
    def last_classifier(self) -> Path:
        return self.folder / "classifier-last.safetensors"

    @property
    def finetuned(self) -> Path:
        """What `psm finetune` measured: accuracy, calibration, confusion."""
        return self.folder / "finetune.json"

    @property
    def worth(self) -> Path:
        """Folder of `psm worth`."""
        return self.folder / "worth"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def unreadable(self) -> Path:
        return self.folder / "unreadable.txt"

    @property
    def scores(self) -> Path:
        return self.folder / "scores.jsonl"

    @property
    def page(self) -> Path:
        return self.folder / "report.html"

    @property
    def inspection(self) -> Path:
        return self.folder / "inspect.html"

    @property
    def exports(self) -> Path:
        """The folder of what `psm export` wrote without being told where."""
        return self.folder / "export"

    @property
    def exploration(self) -> Path:
        """The folder of what `psm explore` wrote without being told where."""
        return self.folder / "explore"

    @property
    def logs(self) -> Path:
        """The folder of other loggers."""
        return self.folder / "logs"

    @property
    def marker(self) -> Path:
        """Marks the folder as a run's; the process that writes the run holds a lock on it."""
        return self.folder / ".psm"

    @property
    def used(self) -> bool:
        """True if the folder holds anything besides the marker and its lock."""
        return self.folder.exists() and bool(self._contents())

    def _contents(self) -> list[str]:
        own = (self.marker, lock_file(self.marker))
        return sorted(path.name for path in self.folder.iterdir() if path not in own)

    @property
    def _hardly_begun(self) -> bool:
        """True if a run was killed here before it had written its configuration: nothing of it is worth keeping."""
        left = [name for name in self._contents() if not name.startswith(TEMPORARY_PREFIX)]
        return set(left) <= {self.log.name}

    @property
    def trained(self) -> bool:
        """True if the folder holds a checkpoint, or anything that a run writes after its first one."""
        early = (self.config, self.checkpoint.parent, self.metrics, self.log, self.unreadable, self.logs)
        late = [path for path in self.run_files if path not in early]
        return any(path.exists() for path in (self.checkpoint, *late)) or bool(self.snapshots)

    @property
    def run_files(self) -> list[Path]:
        """Every file and folder that a run writes, except the marker.

        The configuration comes first: without it a run cannot be resumed, so that a removal which is killed leaves
        nothing that looks like a run.
        """
        written = (self.config, self.checkpoint.parent, self.metrics, self.encoder, self.info, self.log, self.scores)
        finetuned = (self.classifier, self.last_classifier, self.finetuned)
        pages = (self.page, self.inspection, self.exploration, self.worth, self.unreadable, self.exports)
        return [*written, *finetuned, *pages, self.logs]

    def resume_point(self, resume: str) -> Path | None:
        """The checkpoint that ``resume`` continues from; None for a run without checkpoint so far."""
        if resume not in ("true", "auto"):
            return self._named_snapshot(resume)
        if self.checkpoint.exists():
            return self.checkpoint
        if self.snapshots:
            raise UserError(
                f"out={self.folder} has lost checkpoints/{self.checkpoint.name}: give resume={self.snapshots[-1].stem} "
                f"to continue from that snapshot{self._other_snapshots()}, or name another out."
            )
        if resume == "auto" and self._hardly_begun:
            return None
        if self.trained or not self.config.exists():
            held = ", ".join(self._contents())
            raise UserError(
                f"out={self.folder} has no checkpoint to continue from; it holds {held}. Nothing was changed: name "
                "another out for a new run, or give overwrite=true to move this one aside."
            )
        return None

    def _named_snapshot(self, name: str) -> Path:
        path = self.checkpoint.parent / f"{name.removesuffix('.ckpt')}.ckpt"
        if path in self.snapshots:
            return path
        known = ", ".join(snapshot.stem for snapshot in self.snapshots)
        raise UserError(
            f"resume={name} is neither true, false, auto nor a snapshot of the run in {self.folder}"
            f"{f': it has {known}' if known else ', which has none'}."
        )

    def _other_snapshots(self) -> str:
        others = ", ".join(snapshot.stem for snapshot in self.snapshots[:-1])
        return f" (or an earlier one: {others})" if others else ""

    def truncate_metrics(self, step: int) -> None:
        """Drop the metrics after a step, written by a process that was killed before its next checkpoint."""
        kept = [record for record in read_lines(self.metrics) if record.get("step", step + 1) <= step]
        write_lines(self.metrics, kept)
