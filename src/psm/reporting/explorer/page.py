"""The explorer's page: data, images, style and script in one HTML file."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from psm.config.explore import ExploreConfig
from psm.data import ImageStore
from psm.embedding.collection import Collection
from psm.embedding.images import ReadImages
from psm.embedding.index import ImageIndex
from psm.embedding.neighbors import nearest_rows
from psm.reporting.explorer.csv_files import best_match, cluster_members, duplicate_groups, representatives
from psm.reporting.page_data import MAX_PAGE_BYTES, SCALE, embedded_json, pack_array, to_fixed_point
from psm.reporting.sprites import SIDES, pack
from psm.reporting.templates import joined_sources, template_environment
from psm.utils.errors import UserError
from psm.utils.seeding import generator

NEIGHBORS = 12  # of an image on the page
COMMON_LABELS = 3  # of a cluster
LISTED = 0.2  # share of the page's images that duplicates, outliers and doubtful labels may take each
READ_AT_ONCE = 2048
PLACES = 65_535  # of a coordinate


def render(index: ImageIndex, collection: Collection, read: ReadImages, config: ExploreConfig) -> str:
    """The page. Names given by users are embedded as JSON only and reach the document as text, never as markup."""
    shown = shown_rows(index, collection, config)
    content = page_data(index, collection, shown)
    environment = template_environment()

    def fill(data: dict[str, Any]) -> str:
        return environment.get_template("explore.html").render(
            style=joined_sources(environment, "look.css", "explore.css"),
            script=joined_sources(environment, "common.js", "explore.js"),
            data=embedded_json(data),
        )

    left = MAX_PAGE_BYTES - len(fill(content).encode()) - 1_000  # for the JSON around the sheets
    sprites = pack(_images(read, shown), torch.arange(len(shown)), left)
    if sprites.characters > left:
        needed = (MAX_PAGE_BYTES - left + sprites.characters) / 1e6
        raise UserError(
            f"shown={len(shown)} images would make a page of {needed:.0f} MB, more than {MAX_PAGE_BYTES / 1e6:.0f}: "
            "give a smaller shown=."
        )
    return fill(content | {"sprites": sprites._asdict()})


def shown_rows(index: ImageIndex, collection: Collection, config: ExploreConfig) -> Tensor:
    """Sorted rows of the images on the page: all, or those that the lists begin with and others drawn by the seed."""
    count = len(index)
    if count <= config.shown:
        return torch.arange(count)
    share = max(1, round(LISTED * config.shown))
    listed = [
        *[row for rows in duplicate_groups(index, collection) for row in rows][:share],
        *collection.outliers[:share].tolist(),
        *collection.doubtful[:share].tolist(),
        *(row for number in range(collection.clusters.number) for row in _representatives(collection, number)),
    ]
    others = torch.randperm(count, generator=generator(config.seed, "shown images")).tolist()
    return torch.tensor(list(dict.fromkeys([*listed, *others]))[: config.shown]).sort().values


def _representatives(collection: Collection, number: int) -> list[int]:
    return representatives(collection, cluster_members(collection, number))


def _images(read: ReadImages, shown: Tensor) -> ImageStore:
    """Thumbnails of the images on the page; gray where an image cannot be read any more."""
    side = SIDES[0]
    pixels = np.full((len(shown), 3, side, side), 128, dtype=np.uint8)
    for start in range(0, len(shown), READ_AT_ONCE):
        rows = shown[start : start + READ_AT_ONCE].tolist()
        found = read(rows, side)
        for place, row in enumerate(rows, start):
            if row in found:
                pixels[place] = found[row]
    return ImageStore(pixels)


def page_data(index: ImageIndex, collection: Collection, shown: Tensor) -> dict[str, Any]:
    """Everything that the page needs except its images. Images are named by their position among those shown."""
    table = index.table
    place_of = {row: place for place, row in enumerate(shown.tolist())}

    def places(rows: list[int]) -> list[int]:
        return [place_of[row] for row in rows if row in place_of]

    neighbors, similarity = _neighbors(index, collection, shown)
    match = best_match(collection, len(index))
    duplicates = [group for rows in duplicate_groups(index, collection) if len(group := places(rows)) > 1]
    labels = None if table.labels is None else torch.from_numpy(np.asarray(table.labels))
    doubtful = [row for row in collection.doubtful.tolist() if row in place_of]
    return {
        "about": {**_about(index, collection, len(shown)), "scale": SCALE, "positions": PLACES},
        "classes": list(table.classes) if labels is not None else [],
        "paths": [table.paths[row] for row in shown.tolist()],
        "labels": None if labels is None else pack_array(labels[shown], "int32"),
        "x": pack_array((collection.layout[shown, 0] * PLACES).round(), "uint16"),
        "y": pack_array(((1 - collection.layout[shown, 1]) * PLACES).round(), "uint16"),
        "cluster": pack_array(collection.clusters.cluster[shown], "int32"),
        "clusters": [_cluster(index, collection, number, places) for number in range(collection.clusters.number)],
        "neighbors": pack_array(neighbors, "int32"),
        "similarity": pack_array(to_fixed_point(similarity), "int16"),
        "outlier": pack_array(to_fixed_point(collection.outlier[shown].clamp(-1, 1)), "int16"),
        "outliers": places(collection.outliers.tolist()),
        "duplicates": duplicates,
        "match": pack_array(to_fixed_point(match[shown]), "int16"),
        "doubtful": places(doubtful),
        "votes": _votes(collection, doubtful),
    }


def _about(index: ImageIndex, collection: Collection, shown: int) -> dict[str, Any]:
    about = index.table.about
    return {
        "data": about.get("root") or about.get("data") or "images",
        "encoder": about["encoder"],
        "count": len(index),
        "shown": shown,
        "unreadable": about.get("unreadable", 0),
        "labeled": collection.votes is not None,
        "layout": {"umap": "UMAP", "pca": "PCA"}[collection.layout_kind],
        "duplicate_images": int((collection.duplicates.group >= 0).sum()),
        "duplicate_groups": int(collection.duplicates.group.max()) + 1,
        "doubtful": len(collection.doubtful),
        "outliers": len(collection.outliers),
    }


def _neighbors(index: ImageIndex, collection: Collection, shown: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (M, k) of the nearest images on the page, -1 for none, and similarities."""
    if len(shown) == len(index):
        return collection.neighbors[:, :NEIGHBORS], collection.similarity[:, :NEIGHBORS].clamp(min=-1)
    vectors = index.vectors(shown.tolist())
    k = min(NEIGHBORS, len(shown) - 1)
    similarity, places = nearest_rows(vectors.numpy(), vectors, k, exclude=torch.arange(len(shown)))
    return places, similarity


def _cluster(index: ImageIndex, collection: Collection, number: int, places: Any) -> dict[str, Any]:
    """Size, representatives and the most common labels of a cluster."""
    rows = cluster_members(collection, number)
    labels = index.table.labels
    common = []
    if labels is not None:
        known = torch.from_numpy(np.asarray(labels[rows.numpy()]))
        counts = known[known >= 0].bincount()
        top = counts.argsort(descending=True, stable=True)[:COMMON_LABELS].tolist()
        common = [[label, round(float(counts[label]) / len(rows), 4)] for label in top if counts[label]]
    return {"size": len(rows), "images": places(representatives(collection, rows)), "labels": common}


def _votes(collection: Collection, rows: list[int]) -> list[list[float]]:
    """For each doubtful label: what the neighbors suggest, and the shares for it and for the image's own label."""
    votes = collection.votes
    if votes is None:
        return []
    return [[int(votes.suggested[r]), round(float(votes.share[r]), 3), round(float(votes.own[r]), 3)] for r in rows]
