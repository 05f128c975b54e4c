"""The images in a tar file of WebDataset's layout: their names, places and labels.

Files of one sample follow each other and share the name up to the first dot: ``0001.jpg``, ``0001.cls``. The image is
the sample's first file with an image's extension; ``.cls`` holds its label as a whole number, and so may the entry
``label`` of ``.json``.
"""

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psm.data.decode import EXTENSIONS
from psm.data.shard_files import ShardError

_NO_LABEL = -1
_LARGEST_LABEL_FILE = 1 << 16


@dataclass(frozen=True)
class TarIndex:
    """The images of one shard in the order of the file."""

    names: list[str]  # of the image files
    offsets: np.ndarray  # int64 (N,): where the content of each begins
    sizes: np.ndarray  # int64 (N,): bytes of the content
    labels: np.ndarray  # int64 (N,); -1 where there is none
    problem: str = ""  # why images at its end are missing, if it is damaged


def read_tar(path: Path) -> TarIndex:
    """Index a tar file; a damaged one up to where it is damaged."""
    rows: list[tuple[str, int, int, int]] = []
    problem = ""
    try:
        if path.stat().st_size == 0:
            raise ShardError("the file is empty")
        with tarfile.open(path, "r:") as archive:
            try:
                for sample in _samples(archive):
                    rows += _row(archive, sample)
                problem = _end_problem(archive, path)
            except (tarfile.TarError, EOFError) as error:
                problem = f"damaged at byte {archive.offset:,}: {error}"
    except (tarfile.TarError, EOFError) as error:
        raise ShardError(f"not a tar file ({error})") from None
    except OSError as error:
        raise ShardError(error.strerror or str(error)) from None
    offsets, sizes, labels = (np.array([row[column] for row in rows], dtype=np.int64) for column in (1, 2, 3))
    return TarIndex([row[0] for row in rows], offsets, sizes, labels, problem)


def _samples(archive: tarfile.TarFile) -> Iterator[list[tarfile.TarInfo]]:
    """Groups of consecutive files that share their name up to the first dot of its last part."""
    group: list[tarfile.TarInfo] = []
    key = None
    while (member := archive.next()) is not None:
        vars(archive)["members"] = []  # tarfile keeps every member it has seen
        if not member.isreg():
            continue
        folder, slash, name = member.name.rpartition("/")
        stem, dot, _ = name.partition(".")
        if not stem or not dot:  # hidden files and files without extension belong to no sample
            continue
        if f"{folder}{slash}{stem}" != key and group:
            yield group
            group = []
        key = f"{folder}{slash}{stem}"
        group.append(member)
    if group:
        yield group


def _row(archive: tarfile.TarFile, sample: list[tarfile.TarInfo]) -> list[tuple[str, int, int, int]]:
    image = next((member for member in sample if _extension(member) in EXTENSIONS), None)
    if image is None:
        return []
    return [(image.name, image.offset_data, image.size, _label(archive, sample))]


def _extension(member: tarfile.TarInfo) -> str:
    return member.name[member.name.rfind(".") :].lower()


def _label(archive: tarfile.TarFile, sample: list[tarfile.TarInfo]) -> int:
    for extension in (".cls", ".json"):
        member = next((member for member in sample if _extension(member) == extension), None)
        if member is not None and member.size <= _LARGEST_LABEL_FILE:
            content = archive.extractfile(member)
            label = _parse_label(content.read() if content else b"", extension)
            if label is not None:
                return label
    return _NO_LABEL


def _parse_label(content: bytes, extension: str) -> int | None:
    try:
        if extension == ".cls":
            label: Any = int(content.decode("ascii").strip())
        else:
            record = json.loads(content)
            label = record.get("label") if isinstance(record, dict) else None
    except (ValueError, RecursionError):
        return None
    return label if type(label) is int and 0 <= label < 1 << 31 else None


def _end_problem(archive: tarfile.TarFile, path: Path) -> str:
    """A sentence's end if the file does not end as a tar file does, with blocks of zeros; empty if it does."""
    with path.open("rb") as file:
        file.seek(archive.offset)
        block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        return f"cut off at byte {archive.offset + len(block):,}"
    if block.strip(b"\0"):
        return f"damaged at byte {archive.offset:,}: no header of a file"
    return ""
