"""The folder of a comparison: its settings, its cells, and one process at a time."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psm.config import merge as settings
from psm.config.keys import show
from psm.config.worth import WorthConfig
from psm.utils.errors import UserError
from psm.utils.files import remove_temporary_files, write_text_atomically
from psm.utils.locking import locked

# What may differ when a comparison is continued: more labels, draws or arms are added to what is there.
MAY_CHANGE = {
    *("labels", "draws", "arms", "checkpoint", "data", "out", "overwrite", "progress", "accelerator"),
    *("images.root", "images.download", "images.memory", "images.cache", "images.max_unreadable"),
}


@dataclass(frozen=True)
class WorthFolder:
    """Paths of a comparison."""

    folder: Path

    @property
    def page(self) -> Path:
        return self.folder / "worth.html"

    @property
    def cells(self) -> Path:
        """A file for each finished cell."""
        return self.folder / "cells"

    @property
    def runs(self) -> Path:
        """Trainings that are under way; removed when their cell is finished."""
        return self.folder / "runs"

    @property
    def settings(self) -> Path:
        return self.folder / "settings.json"

    @property
    def results(self) -> Path:
        return self.folder / "results.csv"

    @property
    def summary(self) -> Path:
        return self.folder / "summary.json"

    @property
    def lock(self) -> Path:
        return self.folder / ".worth"


@contextmanager
def held(folder: WorthFolder) -> Iterator[None]:
    """Hold the folder, which is created if missing and removed again if nothing was written into it."""
    path = folder.folder
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not folder.lock.exists())):
        raise UserError(f"out={path} is not empty and holds no results of `psm worth`: name another out.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with locked(folder.lock, wait=False) as mine:
            if not mine:
                raise UserError(f"out={path} is being written by another process: wait for it or name another out.")
            try:
                yield
            finally:
                if not any(file != folder.lock for file in path.iterdir()):
                    folder.lock.unlink()
                    path.rmdir()
    except OSError as error:
        raise UserError(f"out={path} cannot be written: {error.strerror}.") from None


def begin(folder: WorthFolder, config: WorthConfig, subject: Mapping[str, Any]) -> None:
    """Store what is compared, or refuse to go on with something else than is there.

    Args:
        folder: held by this process.
        config: the settings.
        subject: the encoder and the data, by their checksums.
    """
    now = json.loads(json.dumps({"config": settings.to_dict(config), "subject": dict(subject)}))
    remove_temporary_files(folder.folder)
    if folder.settings.exists():
        _refuse_changes(folder, json.loads(folder.settings.read_text()), now)
    write_text_atomically(folder.settings, json.dumps(now, indent=2) + "\n")


def move_aside(folder: WorthFolder) -> Path | None:
    """Move the results that are there to another folder; None where there are none."""
    if not folder.settings.exists():
        return None
    path, number = folder.folder.resolve(), 1
    while (moved_to := path.with_name(f"{path.name}.replaced-{number}")).exists():
        number += 1
    path.rename(moved_to)
    return moved_to


def _refuse_changes(folder: WorthFolder, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    other = "continue it without that change, give overwrite=true to move it aside, or another out"
    for name, value in now["subject"].items():
        if before["subject"].get(name) != value:
            raise UserError(f"the results in {folder.folder} are of another {name}: {other}.")
    was, given = (dict(settings.flatten(x["config"])) for x in (before, now))
    for dotted, value in given.items():
        if dotted not in MAY_CHANGE and was.get(dotted) != value:
            raise UserError(
                f"{dotted}={show(value)} differs from {dotted}={show(was.get(dotted))} of the results in "
                f"{folder.folder}: {other}."
            )
