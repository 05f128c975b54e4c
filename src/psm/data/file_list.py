"""A list of image files: text, CSV, TSV, JSON lines or Parquet, with or without labels and splits.

Columns are found by name (``path``, ``label``, ``split`` and the like). Without a header the first column of a CSV or
TSV has the paths and the second the labels; a text file has one path a line. Paths are relative to the list's folder.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from psm.config.schema import ImagesConfig
from psm.data.file_index import file_status, make_files
from psm.data.image_files import FileSet, FileSplit, natural, number_classes
from psm.data.names import printable
from psm.data.splits import TEST_NAMES
from psm.utils.errors import UserError

SUFFIXES = (".txt", ".csv", ".tsv", ".jsonl", ".parquet")
_PATHS = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "img_path")
_LABELS = ("label", "class", "class_name", "category", "target")
_SPLITS = ("split", "subset", "fold")

Row = tuple[str, str | None, str | None]  # path, label, split


def scan(path: Path, config: ImagesConfig, part: bool = False) -> FileSet:
    """The files that a list names; labels and a test split where it has them.

    A single class is no label, unless the list is a part of a set: other parts may have other classes.
    """
    try:
        rows = list(_READERS[path.suffix.lower()](path))
    except OSError as error:
        raise UserError(f"data={printable(path)} cannot be read ({error.strerror}).") from None
    except (UnicodeDecodeError, csv.Error, json.JSONDecodeError) as error:
        raise UserError(f"data={printable(path)} is no {path.suffix[1:]} file in UTF-8 ({error}); repair it.") from None
    if not rows:
        raise UserError(f"data={printable(path)} names no image; give a file with a path in each line.")
    paths, labels, splits = [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
    _check_paths(path, paths)
    files = make_files(path.parent, paths, file_status(path.parent, paths))
    known = [label for label in labels if label is not None]
    if config.labels == "none" or not known:
        if config.labels == "subfolder":
            raise UserError(f"images.labels=subfolder needs labels, and data={printable(path)} has none; add a column.")
        return FileSet(path.stem, FileSplit(files))
    if len(known) < len(labels):
        number = next(index for index, label in enumerate(labels) if label is None)
        raise UserError(
            f"data={printable(path)} gives {printable(paths[number])} no label, where others have one; complete the "
            "list, or use images.labels=none."
        )
    classes = tuple(sorted(set(known), key=natural))
    if len(classes) < 2 and not part:
        return FileSet(path.stem, FileSplit(files))
    whole = FileSplit(files, number_classes(known, classes))
    held = np.array([_is_test(path, split) for split in splits])
    if not held.any():
        return FileSet(path.stem, whole, None, classes)
    return FileSet(path.stem, whole.take(np.flatnonzero(~held)), whole.take(np.flatnonzero(held)), classes)


def _check_paths(path: Path, paths: Sequence[str]) -> None:
    wrong = next((text for text in paths if not text or "\0" in text), None)
    if wrong is not None:
        raise UserError(f"data={printable(path)} has a line without a path; give one in each line.")


def _is_test(path: Path, split: str | None) -> bool:
    word = (split or "train").strip().lower()
    if word != "train" and word not in TEST_NAMES:
        raise UserError(
            f"data={printable(path)} has an image of split {printable(word)!r}; give train or one of "
            f"{', '.join(TEST_NAMES)}."
        )
    return word != "train"


def _read_text(path: Path) -> Iterator[Row]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            yield line.strip(), None, None


def _read_delimited(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = (row for row in csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",") if row)
        first = next(rows, None)
        if first is None:
            return
        columns = _columns([cell.strip().lower() for cell in first])
        if columns is None:
            columns = (0, 1 if len(first) > 1 else None, None)
            yield _row(first, columns)
        for row in rows:
            yield _row(row, columns)


def _read_json_lines(path: Path) -> Iterator[Row]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            record = json.loads(line)
            if not isinstance(record, dict):
                raise UserError(f"data={printable(path)} has a line that is no object; give {{'path': ...}} in each.")
            names = [str(name).lower() for name in record]
            columns = _columns(names)
            if columns is None:
                raise _no_paths(path, names)
            yield _row(list(record.values()), columns)


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"data={path} needs pyarrow: pip install 'psm[parquet]', or give the list as .csv.") from None
    try:
        names = parquet.read_schema(path).names
        columns = _columns([name.lower() for name in names])
        if columns is None:
            raise _no_paths(path, names)
        table = parquet.read_table(path, columns=[names[column] for column in columns if column is not None])
    except ArrowException as error:
        raise UserError(f"data={printable(path)} is no Parquet file that can be read ({error}).") from None
    values = {name: table[name].to_pylist() for name in table.column_names}
    ordered = [values.get(names[column]) if column is not None else None for column in columns]
    for index in range(table.num_rows):
        yield _row([None if column is None else column[index] for column in ordered], (0, 1, 2))


_READERS = {
    ".txt": _read_text,
    ".csv": _read_delimited,
    ".tsv": _read_delimited,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}


def _columns(names: Sequence[str]) -> tuple[int | None, int | None, int | None] | None:
    """Which columns have paths, labels and splits; None where none has paths."""
    found = [next((names.index(word) for word in words if word in names), None) for words in (_PATHS, _LABELS, _SPLITS)]
    return None if found[0] is None else (found[0], found[1], found[2])


def _row(cells: Sequence[Any], columns: tuple[int | None, int | None, int | None]) -> Row:
    def text(column: int | None) -> str | None:
        value = cells[column] if column is not None and column < len(cells) else None
        return None if value is None or str(value).strip() == "" else str(value).strip()

    path, label, split = map(text, columns)
    return path or "", label, split


def _no_paths(path: Path, names: Sequence[str]) -> UserError:
    return UserError(
        f"data={printable(path)} has no column of paths (it has {printable(', '.join(names[:8]))}); name one of them "
        "path. For images within Parquet files, give hf: before the name."
    )
