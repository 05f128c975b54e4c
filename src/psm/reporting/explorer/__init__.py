"""The explorer: a page to look at a collection of images, and CSV files of what was found in it."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from psm.config import merge as settings
from psm.config.explore import ExploreConfig
from psm.config.stored import run_folder_of
from psm.data import ImageDataset
from psm.data.from_torch import from_torch
from psm.embedding.collection import Collection, analyze
from psm.embedding.embed import images_config, run_embedding
from psm.embedding.images import table_images
from psm.embedding.index import ImageIndex
from psm.models.pretrained import find_encoder, read_encoder
from psm.reporting.explorer.csv_files import write_csv_files
from psm.reporting.explorer.page import render
from psm.utils.errors import UserError
from psm.utils.files import write_text_atomically
from psm.utils.progress import counting_images
from psm.utils.run_folder import RunFolder

PAGE, FEATURES = "explore.html", "features.npy"


@dataclass(frozen=True)
class Exploration:
    """The folder that was written, its page and CSV files, and what they show."""

    folder: Path
    page: Path
    files: list[Path]
    index: ImageIndex
    collection: Collection


def explore(
    checkpoint: str | Path,
    data: str | Path | Sequence[str | Path] | ImageDataset | Dataset | None = None,
    out: str | Path | None = None,
    encoder: nn.Module | None = None,
    **keys: Any,
) -> Exploration:
    """Write a page to look at a collection of images, and CSV files of duplicates, outliers and clusters.

    Examples:
        >>> psm.explore("runs/a", "photos").page  # doctest: +SKIP

    Args:
        checkpoint: run folder, checkpoint (.ckpt) or encoder (.safetensors).
        data: name or folder of a data set, a loaded one, or a map-style `torch.utils.data.Dataset` of images; by
            default the data of the run.
        out: folder to write; by default ``explore`` in the run folder.
        encoder: receives the weights where the run was given a module instead of a name.
        keys: those of `psm explore`, nested ones as dictionaries.
    """
    given = {**keys, "checkpoint": str(checkpoint)}
    if out is not None:
        given["out"] = str(out)
    if isinstance(data, (str, Path)):
        given["data"] = str(data)
    elif isinstance(data, (list, tuple)):
        given["data"] = [str(source) for source in data]
    loaded = data if isinstance(data, (ImageDataset, Dataset)) else None
    return run_exploration(given, data=loaded, encoder=encoder)


def run_exploration(
    *overrides: Mapping[str, Any], data: ImageDataset | Dataset | None = None, encoder: nn.Module | None = None
) -> Exploration:
    """Explore by the merged overrides; a given ``data`` replaces the one that its key names."""
    first = settings.build(ExploreConfig, *overrides)
    if not first.checkpoint:
        raise UserError("checkpoint= is missing: give a run folder, for example checkpoint=runs/a.")
    file = find_encoder(first.checkpoint)
    folder = _folder(first, file)
    config = settings.build(ExploreConfig, *overrides, base=ExploreConfig(images=images_config(file)))
    if isinstance(data, Dataset):
        size = config.images.size or read_encoder(file)[0].size
        data = from_torch(data, replace(config.images, size=size), config.progress)
    _embed(folder / FEATURES, config, data, encoder)
    index = ImageIndex(folder / FEATURES, config.index)
    if len(index) < 2:
        _remove_features(folder)
        raise UserError(f"data={config.data} holds a single image that can be read: give more of them.")
    with table_images(index.table, data=data) as read:
        collection = analyze(index, read, config)
        files = write_csv_files(folder, index, collection)
        with counting_images("writing the page", len(index), config.progress):
            content = render(index, collection, read, config)
    write_text_atomically(folder / PAGE, content)
    return Exploration(folder, folder / PAGE, files, index, collection)


def _embed(
    features: Path, config: ExploreConfig, data: ImageDataset | Dataset | None, encoder: nn.Module | None
) -> None:
    """Embed the images, or take over the embeddings of an earlier call with the same encoder and images."""
    shared = ("checkpoint", "data", "batch_size", "accelerator", "precision", "progress", "images")
    given = {name: getattr(config, name) for name in shared}
    run_embedding(given | {"out": str(features), "overwrite": True}, data=data, encoder=encoder, reuse=True)


def _remove_features(folder: Path) -> None:
    """Remove the embeddings that nothing will be made of, and the folder if it holds nothing else."""
    for path in folder.glob(f"{FEATURES}*"):
        path.unlink()
    with suppress(OSError):
        folder.rmdir()


def _folder(config: ExploreConfig, encoder: Path) -> Path:
    """The folder to write; refused before anything is computed if it cannot be written or holds something else."""
    folder = Path(config.out).expanduser() if config.out else RunFolder(run_folder_of(encoder)).exploration
    if folder.exists() and not folder.is_dir():
        raise UserError(f"out={folder} is a file: name a folder.")
    if config.out and not config.overwrite and (folder / PAGE).exists():
        raise UserError(f"out={folder} holds a page already: give overwrite=true to replace it, or another out.")
    if config.out and folder.exists() and not (folder / PAGE).exists():
        others = [path.name for path in folder.iterdir() if not path.name.startswith(FEATURES)]
        if others:
            raise UserError(f"out={folder} is not empty and holds no page of psm explore: name another out.")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK):
        raise UserError(f"out={folder} cannot be written: {there} is no folder that you may write to.")
    return folder
