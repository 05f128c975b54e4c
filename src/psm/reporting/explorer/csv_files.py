"""What was found in a collection as CSV files: a row an image, paths relative to the data.

Clusters and groups are counted from 1, as on the page.
"""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from psm.embedding.collection import Collection
from psm.embedding.index import ImageIndex
from psm.utils.files import write_text_atomically

REPRESENTATIVES = 12  # of a cluster


def write_csv_files(folder: Path, index: ImageIndex, collection: Collection) -> list[Path]:
    """Write duplicates.csv, outliers.csv, clusters.csv and, for labeled images, labels.csv."""
    files = {
        "duplicates.csv": (["group", "path", "match"], duplicate_rows(index, collection)),
        "outliers.csv": (["path", "score"], outlier_rows(index, collection)),
        "clusters.csv": (["cluster", "path", "similarity", "representative"], cluster_rows(index, collection)),
    }
    if collection.votes is not None:
        files["labels.csv"] = (["path", "label", "suggested", "share", "own_share"], label_rows(index, collection))
    else:
        (folder / "labels.csv").unlink(missing_ok=True)
    for name, (header, rows) in files.items():
        write_text_atomically(folder / name, _text(header, rows))
    return [folder / name for name in files]


def _text(header: list[str], rows: Iterable[list[Any]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return stream.getvalue()


def duplicate_groups(index: ImageIndex, collection: Collection) -> list[list[int]]:
    """Rows of each group of near-duplicates, the group with the best match first.

    In a group the largest file comes first, which is the one to keep.
    """
    group, match = collection.duplicates.group, best_match(collection, len(index))
    members = (group >= 0).nonzero()[:, 0]
    ordered = members[group[members].argsort(stable=True)]
    sizes = group[members].bincount().tolist() if len(members) else []
    root = index.table.about.get("root")
    return [
        sorted(rows.tolist(), key=lambda row: (-_file_bytes(root, index.paths[row]), row))
        for rows in sorted(ordered.split(sizes), key=lambda rows: -round(float(match[rows].max()), 4))
    ]


def _file_bytes(root: str | None, path: str) -> int:
    try:
        return (Path(root) / path).stat().st_size if root else 0
    except OSError:
        return 0


def best_match(collection: Collection, count: int) -> Tensor:
    """The best match (count,) of each image with another; 0 for images without a copy."""
    best = torch.zeros(count)
    for column in (0, 1):
        rows = collection.duplicates.pairs[:, column]
        best.scatter_reduce_(0, rows, collection.duplicates.match, "amax")
    return best


def duplicate_rows(index: ImageIndex, collection: Collection) -> Iterable[list[Any]]:
    match = best_match(collection, len(index))
    for number, rows in enumerate(duplicate_groups(index, collection), 1):
        for row in rows:
            yield [number, index.paths[row], f"{float(match[row]):.4f}"]


def outlier_rows(index: ImageIndex, collection: Collection) -> Iterable[list[Any]]:
    for row in collection.outliers.tolist():
        yield [index.paths[row], f"{float(collection.outlier[row]):.4f}"]


def cluster_rows(index: ImageIndex, collection: Collection) -> Iterable[list[Any]]:
    """Cluster by cluster, the images most like its center first."""
    for number in range(collection.clusters.number):
        rows = cluster_members(collection, number)
        rank = {row: place for place, row in enumerate(representatives(collection, rows), 1)}
        for row in rows.tolist():
            similarity = f"{float(collection.clusters.similarity[row]):.4f}"
            yield [number + 1, index.paths[row], similarity, rank.get(row, "")]


def cluster_members(collection: Collection, number: int) -> Tensor:
    """Rows of a cluster, the most like its center first."""
    rows = (collection.clusters.cluster == number).nonzero()[:, 0]
    return rows[collection.clusters.similarity[rows].argsort(descending=True, stable=True)]


def representatives(collection: Collection, rows: Tensor) -> list[int]:
    """The first of a cluster's rows, of near-duplicates one alone."""
    chosen: list[int] = []
    groups: set[int] = set()
    for row in rows.tolist():
        group = int(collection.duplicates.group[row])
        if group >= 0 and group in groups:
            continue
        groups.add(group)
        chosen.append(row)
        if len(chosen) == REPRESENTATIVES:
            break
    return chosen


def label_rows(index: ImageIndex, collection: Collection) -> Iterable[list[Any]]:
    votes, classes = collection.votes, index.table.classes
    if votes is None:
        return
    for row in collection.doubtful.tolist():
        shares = [f"{float(values[row]):.2f}" for values in (votes.share, votes.own)]
        yield [index.paths[row], index.table.label(row), classes[int(votes.suggested[row])], *shares]
