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
from typing import Any, BinaryIO

from psm.errors import UserError


@dataclass(frozen=True)
class Run:
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
    def loading(self) -> Path:
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
    def resumable(self) -> bool:
        return self.config.exists() and self.checkpoint.exists()

    @contextmanager
    def hold(self, resume: bool, overwrite: bool) -> Iterator[None]:
        """Take the folder for this process: nobody else's files are touched, no other process may train into it.

        The lock dies with the process. A folder made here vanishes again if nothing was written into it.
        """
        if resume and overwrite:
            raise UserError("resume=true and overwrite=true contradict each other: give one of them.")
        try:
            occupied = self.folder.exists() and not self.folder.is_dir()
        except OSError as error:
            raise UserError(f"out={self.folder} cannot be used: {error.strerror}.") from None
        if occupied:
            raise UserError(f"out={self.folder} is a file: name a folder that is empty or does not exist yet.")
        if self._used() and not self.marker.exists():
            raise UserError(f"out={self.folder} is not empty and holds no run of psm: name another out.")
        made = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self.marker.open("a")
        except OSError as error:
            raise UserError(f"out={self.folder} cannot be written: {error.strerror}.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UserError(
                f"out={self.folder} is being written by another process: wait for it or name another out."
            ) from None
        try:
            if self._used() and not (resume or overwrite):
                raise UserError(
                    f"out={self.folder} is not empty: give resume=true to continue that run, overwrite=true to "
                    "replace it, or another out."
                )
            yield
        finally:
            if not self._used():
                self.marker.unlink(missing_ok=True)
                for folder in made:
                    folder.rmdir()
            lock.close()

    def empty(self) -> None:
        """Remove what an earlier run left, and nothing else. Without its configuration a run cannot be resumed, so
        that goes first: a kill midway leaves nothing that could be taken for a run."""
        own = (self.config, self.checkpoint.parent, self.metrics, self.encoder, self.loading, self.log, self.scores)
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

    def _used(self) -> bool:
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
