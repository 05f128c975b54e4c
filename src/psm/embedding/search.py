"""`psm search`: queries from image files or rows, embedded by the encoder that made the file."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from psm.config import merge as settings
from psm.config.search import SearchConfig
from psm.data.any_image import square_pixels
from psm.data.decode import quiet_pillow
from psm.data.file_index import list_files
from psm.embedding.encoder import LoadedEncoder, open_encoder
from psm.embedding.index import ImageIndex
from psm.utils.errors import UserError


@dataclass(frozen=True)
class Match:
    """An image that was found."""

    row: int
    path: str
    label: str | None
    similarity: float


@dataclass(frozen=True)
class QueryResult:
    """A query, an image file or a row, and the images that are most like it, most similar first."""

    name: str
    file: Path | None
    row: int | None
    label: str | None
    matches: list[Match]


@dataclass(frozen=True)
class Search:
    """The results of all queries, and how long the search itself took."""

    index: ImageIndex
    results: list[QueryResult]
    seconds: float


@dataclass(frozen=True)
class Query:
    """An image file outside of the index, or a row of it."""

    name: str
    file: Path | None = None
    row: int | None = None


def search(
    features: str | Path,
    query: str | Path | list[str | Path] | None = None,
    row: int | list[int] | None = None,
    encoder: nn.Module | None = None,
    **keys: Any,
) -> list[QueryResult]:
    """Find the images that are most like a query.

    Examples:
        >>> psm.search("features.parquet", "photo.jpg", k=5)[0].matches  # doctest: +SKIP

    Args:
        features: file that `psm embed` wrote.
        query: image file, folder of images or path of an image of the file; or several.
        row: row of the file as the query; or several.
        encoder: receives the weights where the run was given a module instead of a name.
        keys: those of `psm search`.

    Returns:
        A result per query.
    """
    queries = [] if query is None else [query] if isinstance(query, (str, Path)) else query
    given = {**keys, "features": str(features), "query": [str(item) for item in queries], "row": row}
    return run_search(given, encoder=encoder).results


def run_search(*overrides: Mapping[str, Any], encoder: nn.Module | None = None) -> Search:
    """Search by the merged overrides."""
    config = settings.build(SearchConfig, *overrides)
    check_settings(config)
    index = ImageIndex(config.features, config.index, config.probes)
    queries = find_queries(config, index)
    vectors = _vectors(queries, index, config, encoder)
    started = time.perf_counter()
    exclude = [-1 if query.row is None else query.row for query in queries]
    alone = len(index) == 1  # nothing is left to find beside the query itself
    similarity, rows = index.search(vectors, config.k, None if alone or max(exclude) < 0 else exclude)
    seconds = time.perf_counter() - started
    table = index.table
    results = [
        QueryResult(
            query.name,
            query.file,
            query.row,
            None if query.row is None else table.label(query.row),
            [
                Match(row, index.paths[row], table.label(row), float(score))
                for row, score in zip(found.tolist(), scores, strict=True)
                if row >= 0
            ],
        )
        for query, found, scores in zip(queries, rows, similarity, strict=True)
    ]
    return Search(index, results, seconds)


def check_settings(config: SearchConfig) -> None:
    """Refuse settings without a file or without a query."""
    if not config.features:
        raise UserError("features= is missing: give a file that `psm embed` wrote, for example features.parquet.")
    if not config.query and config.row in (None, []):
        raise UserError("a query is missing: give query=photo.jpg, query=[a.jpg,b.jpg] or a row of the file, row=17.")


def find_queries(config: SearchConfig, index: ImageIndex) -> list[Query]:
    """The queries that the keys name."""
    queries: list[Query] = []
    for given in config.query:
        path = Path(given).expanduser()
        if path.is_dir():
            files = list_files(path)
            if not len(files):
                raise UserError(f"query={given} holds no image.")
            queries += [Query(str(path / name), path / name) for name in files.paths]
        elif path.exists():
            queries.append(Query(given, path))
        elif (row := index.row_of(given)) is not None:
            queries.append(Query(given, row=row))
        else:
            raise UserError(f"query={given} is neither an image file nor the path of an image in {index.file}.")
    for row in [] if config.row is None else config.row if isinstance(config.row, list) else [config.row]:
        if row >= len(index):
            raise UserError(f"row={row} is not in {index.file}, whose rows run from 0 to {len(index) - 1}.")
        queries.append(Query(index.paths[row], row=row))
    return queries


def _vectors(queries: list[Query], index: ImageIndex, config: SearchConfig, encoder: nn.Module | None) -> np.ndarray:
    """Embeddings (Q, D): of rows from the file, of image files by the encoder that made it."""
    width = index.table.embeddings.shape[1]
    vectors = torch.empty(len(queries), width)
    rows = [place for place, query in enumerate(queries) if query.row is not None]
    vectors[rows] = index.vectors([queries[place].row or 0 for place in rows])
    files = [place for place, query in enumerate(queries) if query.file is not None]
    if files:
        loaded = open_same_encoder(index, config, encoder)
        with quiet_pillow():
            pixels = np.stack([square_pixels(queries[place].file, loaded.info.size) for place in files])
        vectors[files] = loaded.embed(torch.from_numpy(pixels))
    return vectors.numpy()


def open_same_encoder(index: ImageIndex, config: SearchConfig, encoder: nn.Module | None = None) -> LoadedEncoder:
    """The encoder that made the embeddings of an index; any other is refused."""
    about = index.table.about["encoder"]
    stored = Path(about["file"])
    if config.checkpoint is None and not stored.exists():
        raise UserError(f"the encoder that made {index.file} is not in {stored} any more: give checkpoint=.")
    precision = index.table.about.get("precision", "32-true")
    loaded = open_encoder(config.checkpoint or stored, encoder, config.accelerator, precision)
    if loaded.checksum != about["checksum"]:
        raise UserError(
            f"{index.file} was made by another encoder ({about['encoder']}, checksum {about['checksum']}) than the "
            f"one in {loaded.file} ({loaded.info.encoder}, checksum {loaded.checksum}): give its checkpoint=, or embed "
            "anew."
        )
    return loaded
