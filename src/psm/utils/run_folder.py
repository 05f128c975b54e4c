"""The run folder: who may write it, what lies in it, and how it is written so that a kill leaves nothing half-done."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from psm.utils.errors import UserError


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
        """The copies of the checkpoint that were kept, earliest first."""
        return sorted(self.checkpoint.parent.glob("epoch-*.ckpt"), key=lambda path: (len(path.name), path.name))

    @property
    def encoder(self) -> Path:
        return self.folder / "encoder.safetensors"

    @property
    def info(self) -> Path:
        return self.folder / "encoder.json"

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
    def marker(self) -> Path:
        """Says that the folder is a run's, and is what a process that writes it locks."""
        return self.folder / ".psm"

    @property
    def trained(self) -> bool:
        """Whether anything was learned that could be lost."""
        return any(path.exists() for path in (self.checkpoint, self.encoder, self.scores)) or bool(self.snapshots)

    def resume_point(self, resume: str) -> Path | None:
        """The checkpoint that ``resume`` continues from; None where the run has only been begun."""
        if resume not in ("true", "auto"):
            return self._named_snapshot(resume)
        if self.checkpoint.exists():
            return self.checkpoint
        if self.snapshots:
            raise UserError(
                f"out={self.folder} has lost checkpoints/{self.checkpoint.name}: give resume={self.snapshots[-1].stem} "
                f"to continue from that snapshot{self._other_snapshots()}, or name another out."
            )
        if self.trained or not self.config.exists():
            held = ", ".join(sorted(path.name for path in self.folder.iterdir() if path != self.marker))
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

    @contextmanager
    def hold(self, resume: str, overwrite: str) -> Iterator[None]:
        """Take the folder for this process: nobody else's files are touched, no other process may train into it.

        The lock dies with the process. A folder made here vanishes again if nothing was written into it.
        """
        if overwrite not in ("true", "false", "delete"):
            raise UserError(
                f"overwrite={overwrite} is unknown: give true to move the run in out aside, delete to remove it."
            )
        if resume != "false" and overwrite != "false":
            raise UserError(f"resume={resume} and overwrite={overwrite} contradict each other: give one of them.")
        try:
            occupied = self.folder.exists() and not self.folder.is_dir()
        except OSError as error:
            raise UserError(f"out={self.folder} cannot be used: {error.strerror}.") from None
        if occupied:
            raise UserError(f"out={self.folder} is a file: name a folder that is empty or does not exist yet.")
        if resume not in ("false", "auto") and not self.used:
            there = "is empty" if self.folder.exists() else "does not exist"
            raise UserError(
                f"out={self.folder} {there}, so there is no run to continue: check the name, or give resume=auto to "
                "start one."
            )
        if self.used and not self.marker.exists():
            raise UserError(f"out={self.folder} is not empty and holds no run of psm: name another out.")
        made = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self._lock()
        except OSError as error:
            raise UserError(f"out={self.folder} cannot be written: {error.strerror}.") from None
        try:
            if self.used and resume == overwrite == "false":
                raise UserError(
                    f"out={self.folder} is not empty: give resume=true to continue that run, overwrite=true to "
                    "move it aside, or another out."
                )
            yield
        finally:
            if not self.used:
                self.marker.unlink(missing_ok=True)
                for folder in made:
                    folder.rmdir()
            lock.close()

    def _lock(self) -> IO[str]:
        lock = self.marker.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UserError(
                f"out={self.folder} is being written by another process: wait for it or name another out."
            ) from None
        return lock

    @contextmanager
    def replace(self, overwrite: str) -> Iterator[Path | None]:
        """Make the held folder ready for a new run; gives the folder that an earlier run was moved to, if it was.

        A run that learned something is moved aside as a whole unless it is to be deleted.
        """
        if overwrite == "delete" or not self.trained:
            self._remove_run()
            yield None
            return
        aside = self._move_aside()
        lock = self._lock()
        try:
            yield aside
        finally:
            lock.close()

    def _move_aside(self) -> Path:
        folder = self.folder.resolve()
        number = 1
        while (aside := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
            number += 1
        try:
            folder.rename(aside)
            self.folder.mkdir()
        except OSError as error:
            raise UserError(
                f"out={self.folder} cannot be moved to {aside} ({error.strerror}): name another out, or give "
                "overwrite=delete to remove the run that is there."
            ) from None
        return aside

    def _remove_run(self) -> None:
        """Remove what an earlier run left, and nothing else. Without its configuration a run cannot be resumed, so
        that goes first: a kill midway leaves nothing that could be taken for a run."""
        own = (self.config, self.checkpoint.parent, self.metrics, self.encoder, self.info, self.log, self.scores)
        for path in (*own, self.page, self.inspection, self.unreadable, self.folder / "logs"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        self.clear_leftovers()

    def clear_leftovers(self) -> None:
        """Remove temporary files of a write that was killed."""
        for path in self.folder.rglob(".writing-*"):
            path.unlink(missing_ok=True)

    def keep_metrics_until(self, step: int) -> None:
        """Drop the lines after a step, written by a process that was killed before its next checkpoint."""
        kept = [record for record in read_lines(self.metrics) if record.get("step", step + 1) <= step]
        content = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(self.metrics, lambda file: file.write(content.encode()))

    @property
    def used(self) -> bool:
        """Whether anything lies in the folder but the mark that it is a run's."""
        return self.folder.exists() and any(path != self.marker for path in self.folder.iterdir())


def launched() -> bool:
    """Whether another process of the same run, on this machine or another, is the one that writes the folder."""
    ranks = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))
    return any(rank is not None and rank.isdigit() and int(rank) > 0 for rank in ranks)


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file so that at any moment either the old or the whole new one is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # A temporary file is private to its owner; a finished one is as readable as any other that the user makes.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add a record to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"  # a kill cut the last line
        file.write(b"\n" * torn + json.dumps(record).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; what is damaged, such as a last line cut off by a kill, is passed over."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            records += [record] if isinstance(record, dict) else []
    return records
