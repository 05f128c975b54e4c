"""Files that stay whole when a process is killed or the disk is full: atomic replacement, and JSON lines."""

import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from psm.utils.checksums import Damaged, seal, unseal
from psm.utils.errors import UserError
from psm.utils.resources import disk_full, is_disk_full

log = logging.getLogger("psm")

TEMPORARY_PREFIX = ".writing-"


class _File(io.BufferedWriter):
    """Remembers why a write failed: torch.save hides a full disk behind an error of its own."""

    failure: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.failure = error
            raise


def lock_file(path: Path) -> Path:
    """The file that is the lock of another where the file system has no locks."""
    return path.with_name(f"{path.name}.lock")


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Replace a file by what ``write`` puts into it; readers see the old file or the complete new one.

    Raises ``ResourceError`` if the disk is full; the old file is then as it was.
    """
    file: _File | None = None
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY_PREFIX)
        with _File(io.FileIO(handle, "wb")) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private to their owner; give the finished file the permissions of a normal new file.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        cause = file.failure if file is not None and file.failure is not None else error
        if isinstance(cause, OSError) and is_disk_full(cause):
            raise disk_full(path, cause) from error
        raise


def output_file(out: str | None, default: Path, overwrite: bool) -> Path:
    """The file that a command writes; refused before anything is computed if it cannot be written.

    Args:
        out: the user's key, None for the default.
        default: the file where the user named none; replaced if it is there.
        overwrite: replace the file that the user named.
    """
    file = Path(out).expanduser() if out else default
    if file.is_dir():
        raise UserError(f"out={file} is a folder: name a file, for example out={file / default.name}.")
    if out and file.exists() and not overwrite:
        raise UserError(f"out={file} exists: give overwrite=true to replace it, or another out.")
    there = next(folder for folder in file.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"out={file} cannot be written: {there} is no folder that you may write to.")
    return file


@contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """A path beside a file, for writers that take a path; what is written there replaces the file at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a file by a text, as UTF-8."""
    write_atomically(path, lambda file: file.write(text.encode()))


@contextmanager
def temporary_folder(beside: Path) -> Iterator[Path]:
    """A new folder on the same disk as a path that does not exist yet; removed afterwards with what is still in it.

    What is finished is moved out of it: nothing half-written ever has its final name. Folders that had to be created
    above the path are removed again if they are left empty.
    """
    missing = [folder for folder in beside.parents if not folder.exists()]
    beside.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=beside.parent, prefix=TEMPORARY_PREFIX))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()


def move_into_place(path: Path, target: Path) -> None:
    """Give a finished file or folder its final name, in place of what has that name. Both are on the same disk."""
    if not path.is_dir():
        path.replace(target)
        return
    replaced = None
    if target.exists():
        replaced = target.with_name(f"{TEMPORARY_PREFIX}replaced-{target.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    path.rename(target)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def remove_temporary_files(folder: Path, below: bool = True) -> None:
    """Remove the temporary files and folders of writes that were killed, in a folder and, where wanted, below."""
    find = folder.rglob if below else folder.glob
    for path in list(find(f"{TEMPORARY_PREFIX}*")):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def append_line(path: Path, record: dict[str, Any], sync: bool = True) -> None:
    """Append a record to a file of JSON lines, with its checksum. What a kill left of a last line is removed.

    Raises ``ResourceError`` if the disk is full; the file is then as it was.

    Args:
        path: the file.
        record: what JSON can hold.
        sync: wait until the disk has it, as a power cut would ask for; a kill of the process does not.
    """
    line, existed = _line(record).encode(), path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            size = _end_of_lines(file)
            try:
                written = 0
                while written < len(line):
                    written += file.write(line[written:])
                if sync:
                    os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                if not existed:
                    path.unlink(missing_ok=True)
                raise
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path, error) from error
        raise


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Replace a file of JSON lines, each with its checksum."""
    write_text_atomically(path, "".join(_line(record) for record in records))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, without their checksums; [] without the file.

    Lines that cannot be read or differ from their checksum are left out with a warning, a last line that is being
    written, or was when its process was killed, without one.
    """
    if not path.exists():
        return []
    records, damaged = [], []
    lines = path.read_text(errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            damaged.append(number)
    if damaged:
        _warn_of_damage(path, tuple(damaged))
    return records


@cache
def _warn_of_damage(path: Path, lines: tuple[int, ...]) -> None:
    """Once in a process: some files are read every second."""
    several = len(lines) > 1
    which = f"line{'s' * several} {', '.join(map(str, lines[:10]))}{', ...' * (len(lines) > 10)}"
    log.warning("%s of %s %s damaged and left out.", which, path, "are" if several else "is")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(seal(record)) + "\n"


def _record(line: str) -> dict[str, Any] | None:
    """A line's record without its checksum; None if the line is damaged."""
    try:
        record = json.loads(line)
        return unseal(record) if isinstance(record, dict) else None
    except (ValueError, RecursionError, Damaged):
        return None


def _end_of_lines(file: io.FileIO) -> int:
    """Where the next line begins, after ending a whole last line or removing one that a kill cut off."""
    size = file.seek(0, os.SEEK_END)
    start = size
    while start > 0:  # back to the end of the line before
        step = min(start, 4096)
        file.seek(start - step)
        block = file.read(step)
        if (newline := block.rfind(b"\n")) >= 0:
            start = start - step + newline + 1
            break
        start -= step
    if start == size:
        return size
    file.seek(start)
    rest = file.read(size - start)
    if _record(rest.decode(errors="replace")) is None:
        file.truncate(start)
        return start
    file.write(b"\n")
    return size + 1
