"""Taking a run folder for writing: one process at a time, and never over the files of something else."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from psm.utils.errors import UserError
from psm.utils.files import remove_temporary_files
from psm.utils.locking import holder, locked
from psm.utils.resources import write_error
from psm.utils.run_folder import RunFolder


@contextmanager
def lock_run(run: RunFolder, resume: str, overwrite: str) -> Iterator[None]:
    """Hold the lock of a run folder, which is created if missing and removed again if nothing was written into it.

    Args:
        run: The folder.
        resume: "false", "true", "auto" or the name of a snapshot.
        overwrite: "false", "true" (move the run aside) or "delete".

    Raises:
        UserError: The arguments contradict each other or the contents of the folder, the folder holds something
            other than a run, or another process holds its lock. Nothing is changed then.
    """
    _check_arguments(resume, overwrite)
    _check_folder(run, resume)
    missing = [folder for folder in (run.folder, *run.folder.parents) if not folder.exists()]
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(f"out={run.folder}", error) from None
    with _lock_marker(run):
        try:
            if run.used and resume == overwrite == "false":
                raise UserError(
                    f"out={run.folder} is not empty: give resume=true to continue that run, overwrite=true to "
                    "move it aside, or another out."
                )
            yield
        finally:
            if not run.used:
                run.marker.unlink(missing_ok=True)
                remove_empty(missing)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove these folders, the innermost first, up to one that another process has put something into meanwhile."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def clear_run(run: RunFolder, overwrite: str) -> Iterator[Path | None]:
    """Make a locked folder ready for a new run.

    A run with a checkpoint, an encoder or scores is moved to another folder as a whole, unless ``overwrite`` is
    "delete"; the folder that replaces it is locked as well.

    Yields:
        The folder that the earlier run was moved to, or None.
    """
    if overwrite == "delete" or not run.trained:
        _remove_run(run)
        yield None
        return
    moved_to = _move_aside(run)
    with _lock_marker(run):
        yield moved_to


def _check_arguments(resume: str, overwrite: str) -> None:
    if overwrite not in ("true", "false", "delete"):
        raise UserError(
            f"overwrite={overwrite} is unknown: give true to move the run in out aside, delete to remove it."
        )
    if resume != "false" and overwrite != "false":
        raise UserError(f"resume={resume} and overwrite={overwrite} contradict each other: give one of them.")


def _check_folder(run: RunFolder, resume: str) -> None:
    try:
        is_file = run.folder.exists() and not run.folder.is_dir()
    except OSError as error:
        raise UserError(f"out={run.folder} cannot be used: {error.strerror}.") from None
    if is_file:
        raise UserError(f"out={run.folder} is a file: name a folder that is empty or does not exist yet.")
    if resume not in ("false", "auto") and not run.used:
        there = "is empty" if run.folder.exists() else "does not exist"
        raise UserError(
            f"out={run.folder} {there}, so there is no run to continue: check the name, or give resume=auto to "
            "start one."
        )
    if run.used and not run.marker.exists():
        raise UserError(f"out={run.folder} is not empty and holds no run of psm: name another out.")


@contextmanager
def _lock_marker(run: RunFolder) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            held = stack.enter_context(locked(run.marker, wait=False))
        except OSError as error:
            raise write_error(f"out={run.folder}", error) from None
        if not held:
            raise UserError(
                f"out={run.folder} is being written by another process{holder(run.marker)}: wait for it or name "
                "another out."
            )
        yield


def _move_aside(run: RunFolder) -> Path:
    folder = run.folder.resolve()
    number = 1
    while (moved_to := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
        number += 1
    try:
        folder.rename(moved_to)
        folder.mkdir()  # not run.folder, which may be a link to it
    except OSError as error:
        raise UserError(
            f"out={run.folder} cannot be moved to {moved_to} ({error.strerror}): name another out, or give "
            "overwrite=delete to remove the run that is there."
        ) from None
    return moved_to


def _remove_run(run: RunFolder) -> None:
    """Remove what an earlier run wrote, and nothing else."""
    for path in run.run_files:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    remove_temporary_files(run.folder)
