"""Files of embeddings by their suffix. Each is written and read in blocks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from psm.embedding.formats import csv_text, npy, npz, parquet, pt, safetensors
from psm.embedding.table import Content, Table, checksum
from psm.utils.errors import UserError, did_you_mean


class Format(NamedTuple):
    """How a kind of file is written and read."""

    write: Callable[[Path, Table], None]
    read: Callable[[Path], Content]
    beside: Mapping[str, Callable[[Path, Table], None]] = MappingProxyType({})  # added to its name -> writes that file
    check: Callable[[], None] = lambda: None  # refuses where a library is missing


FORMATS = {
    ".parquet": Format(parquet.write, parquet.read, check=parquet.check),
    ".npy": Format(npy.write, npy.read, npy.BESIDE),
    ".npz": Format(npz.write, npz.read),
    ".csv": Format(csv_text.write, csv_text.read, csv_text.BESIDE),
    ".pt": Format(pt.write, pt.read),
    ".safetensors": Format(safetensors.write, safetensors.read),
}


def find_format(path: Path, key: str) -> Format:
    """The format of a path by its suffix; ``key`` is the one that gave it, for the error."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        hint = did_you_mean(suffix, FORMATS) if suffix else ""
        raise UserError(
            f"{key}={path} ends in none of {', '.join(FORMATS)}{hint}: the suffix says how embeddings are stored."
        )
    FORMATS[suffix].check()
    return FORMATS[suffix]


def read_table(path: Path, key: str = "features") -> Table:
    """The table in a file that `psm embed` wrote; other files, and damaged ones, are a UserError."""
    if not path.exists():
        raise UserError(f"{key}={path} does not exist: give a file that `psm embed` wrote.")
    if path.is_dir():
        raise UserError(f"{key}={path} is a folder: give a file that `psm embed` wrote.")
    read = find_format(path, key).read
    try:
        content = read(path)
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is not complete: {error.filename}, which `psm embed` wrote beside it, is missing."
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except Exception as error:  # whatever a library raises on bytes that are not its own
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise UserError(f"{path} is damaged, or not a file of embeddings: {reason}.") from None
    if content.about is None:
        raise UserError(f"{path} does not say which encoder made its embeddings: give a file that `psm embed` wrote.")
    return _checked(path, content, content.about)


def _checked(path: Path, content: Content, about: dict) -> Table:
    """The table, if the file holds what it says of itself."""
    try:
        count, width, expected = int(about["count"]), int(about["encoder"]["width"]), int(about["crc32"])
        classes = tuple(map(str, about["classes"]))
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} does not say completely what made it: was it written by another version?") from None
    labels = content.labels
    if content.names is not None:
        number = {name: index for index, name in enumerate(classes)}
        labels = np.array([number.get(name or "", -1) for name in content.names], dtype=np.int64)
    whole = content.embeddings.shape == (count, width) and len(content.paths) == count
    if not whole or (labels is not None and len(labels) != count):
        raise UserError(f"{path} does not hold the {count:,} rows of {width} numbers that it was written with.")
    if checksum(content.embeddings) != expected:
        raise UserError(f"{path} is damaged: the checksum of its embeddings does not match. Write it anew.")
    return Table(content.embeddings, content.paths, labels, classes, about)
