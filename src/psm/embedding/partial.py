"""Embeddings in the making, in a folder beside the file that they will be: a process that is killed loses two batches.

The folder holds ``about.json`` (what is computed of what), ``rows.bin`` (the embeddings so far) and ``batches.jsonl``,
a line for each batch with the checksum of its rows. A batch counts when its line is complete and its rows have that
checksum, which is compared when work is continued; so nobody waits for the disk after each batch.
"""

import json
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from psm.data.cache import Failure
from psm.utils.errors import UserError
from psm.utils.files import append_line, read_lines, write_lines, write_text_atomically
from psm.utils.locking import locked

ABOUT, ROWS, BATCHES, LOCK = "about.json", "rows.bin", "batches.jsonl", "lock"
SUFFIX = ".part"


class PartialRows:
    """The rows computed so far, (n, width), and where to go on."""

    def __init__(self, folder: Path, width: int, dtype: str):
        self.folder, self.width, self.dtype = folder, width, np.dtype(dtype)
        self.images = 0  # done, readable or not
        self.rows = 0
        self.failures: list[Failure] = []
        self._continue()

    def append(self, embeddings: np.ndarray, images: int, failures: list[Failure]) -> None:
        """Add the rows of a batch.

        Args:
            embeddings: (n, width), of the images that could be read.
            images: how many the batch has, readable or not.
            failures: the images that could not be read.
        """
        content = np.ascontiguousarray(embeddings, dtype=self.dtype)
        with (self.folder / ROWS).open("ab") as file:
            file.write(content.data)
        record = {"images": images, "rows": len(content), "rows_crc32": zlib.crc32(content.data), "failures": failures}
        append_line(self.folder / BATCHES, record, sync=False)
        self._count(record)

    def embeddings(self) -> np.ndarray:
        """All rows, memory-mapped."""
        return np.memmap(self.folder / ROWS, self.dtype, "c", shape=(self.rows, self.width))

    def _count(self, record: Mapping[str, Any]) -> None:
        self.images += record["images"]
        self.rows += record["rows"]
        self.failures += [(index, reason) for index, reason in record["failures"]]

    def _continue(self) -> None:
        """Take over the batches whose rows are there as they were written, and drop what follows them."""
        rows, batches = self.folder / ROWS, self.folder / BATCHES
        row_bytes, kept = self.width * self.dtype.itemsize, []
        rows.touch()
        with rows.open("rb") as file:
            for record in read_lines(batches):
                content = file.read(record.get("rows", 0) * row_bytes)
                if len(content) != record.get("rows", -1) * row_bytes or zlib.crc32(content) != record["rows_crc32"]:
                    break
                self._count(record)
                kept.append(record)
        with rows.open("r+b") as file:
            file.truncate(self.rows * row_bytes)
        write_lines(batches, kept)


@contextmanager
def partial_rows(
    out: Path, identity: Mapping[str, Any], width: int, dtype: str, overwrite: bool
) -> Iterator[PartialRows]:
    """The work on a file: begun, or continued if it was begun with the same encoder, images and settings.

    The folder stays when an error or an interrupt ends the block, and is removed when the block is done.

    Args:
        out: the file that is being made.
        identity: what the rows depend on, by the name that an error calls it.
        width: numbers in a row.
        dtype: of the numbers.
        overwrite: drop work that was begun otherwise, instead of refusing.
    """
    folder = out.with_name(out.name + SUFFIX)
    if folder.exists() and not (folder / LOCK).exists():
        raise UserError(f"{folder} is in the way: remove it, or give another out.")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK, wait=False) as held:
        if not held:
            raise UserError(f"out={out} is being written by another process: wait for it or name another out.")
        _check_identity(folder, out, identity, overwrite)
        write_text_atomically(folder / ABOUT, json.dumps(dict(identity)))
        work = PartialRows(folder, width, dtype)
        try:
            yield work
        except BaseException:
            if not work.rows:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _check_identity(folder: Path, out: Path, identity: Mapping[str, Any], overwrite: bool) -> None:
    about = folder / ABOUT
    try:
        before = json.loads(about.read_text()) if about.exists() else None
    except ValueError:
        before = {}
    if before is None or before == dict(identity):
        return
    if not overwrite:
        other = ", ".join(name for name in identity if before.get(name) != identity[name])
        raise UserError(
            f"{folder} holds unfinished work on out={out} with another {other}: give the settings and data that it was "
            "begun with to continue it, overwrite=true to begin anew, or another out."
        )
    for name in (ROWS, BATCHES):
        (folder / name).unlink(missing_ok=True)
