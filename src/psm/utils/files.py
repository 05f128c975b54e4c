"""Files that stay whole when a process is killed: atomic replacement, and JSON lines."""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY_PREFIX = ".writing-"


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Replace a file by what ``write`` puts into it; readers see the old file or the complete new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY_PREFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private to their owner; give the finished file the permissions of a normal new file.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a file by a text, as UTF-8."""
    write_atomically(path, lambda file: file.write(text.encode()))


def remove_temporary_files(folder: Path) -> None:
    """Remove the temporary files of writes that were killed, in a folder and below."""
    for path in folder.rglob(f"{TEMPORARY_PREFIX}*"):
        path.unlink(missing_ok=True)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a file of JSON lines. A last line that a kill cut off is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        cut_off = False
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            cut_off = file.read(1) != b"\n"
        file.write(b"\n" * cut_off + json.dumps(record).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, [] without the file. Damaged lines are skipped."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records
