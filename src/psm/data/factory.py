"""Load a data set by its name or path."""

from pathlib import Path

import torch

from psm.config.schema import ImagesConfig
from psm.config.values import check_values
from psm.data import cifar, download, image_folder, tiny_imagenet
from psm.data import synthetic_shapes as shapes
from psm.data.dataset import ImageDataset, ImageStore
from psm.data.image_files import subfolders
from psm.data.materialize import PixelSource, materialize
from psm.data.registry import ARCHIVES, NAMES
from psm.utils.errors import UserError, did_you_mean


def load_dataset(data: str, config: ImagesConfig | None = None, progress: bool = True) -> ImageDataset:
    """Load a data set.

    Args:
        data: shapes, cifar10, cifar100, tiny-imagenet, or the path of a folder of images.
        config: size, limit, split, memory and so on; None: the defaults.
        progress: whether to show a bar on a terminal.
    """
    config = config or ImagesConfig()
    check_values(config, "images.")
    name = str(data)
    if name == "shapes":
        return _load_shapes(config, progress)
    if name in ARCHIVES:
        return _load_published(name, config, progress)
    path = Path(name).expanduser()
    if not path.is_dir():
        raise UserError(_not_found(name, path))
    return _load_recognized(path, config, progress) or image_folder.load(path, config, progress)


def _load_published(name: str, config: ImagesConfig, progress: bool) -> ImageDataset:
    """A published data set from images.root, downloaded if it is not there."""
    root = Path(config.root).expanduser()
    loaded = _load_named(root, name, config, progress)
    if loaded is None:
        download.install(ARCHIVES[name], root, progress, config.download)
        loaded = _load_named(root, name, config, progress)
    if loaded is None:
        folder = root / ARCHIVES[name].folder
        raise UserError(f"{folder} does not contain {name} as published; remove it, and it is downloaded again.")
    return loaded


def _load_named(root: Path, name: str, config: ImagesConfig, progress: bool) -> ImageDataset | None:
    """The named data set from a folder that is or contains it; None if it is not there."""
    if name == "tiny-imagenet":
        folder = tiny_imagenet.find(root)
        return tiny_imagenet.load(folder, config, progress) if folder else None
    found = cifar.find(root, name)
    return cifar.load(*found, config, progress) if found else None


def _load_recognized(path: Path, config: ImagesConfig, progress: bool) -> ImageDataset | None:
    """A published layout at a path, unless the path has other folders too and could mean any of them."""
    folders = subfolders(path)
    for folder in (path, *(path / name for name in folders if len(folders) == 1)):
        found = cifar.find(folder)
        if found and found[0] == folder:
            return cifar.load(*found, config, progress)
        if tiny_imagenet.find(folder) == folder:
            return tiny_imagenet.load(folder, config, progress)
    return None


def _load_shapes(config: ImagesConfig, progress: bool) -> ImageDataset:
    size = config.size or shapes.SIZE
    counts = {"train": min(config.limit or shapes.TRAIN, shapes.MOST), "test": shapes.TEST}
    sources = [
        PixelSource("drawing shapes", count, size, shapes.fingerprint(split, count, size), shapes.reader(split, size))
        for split, count in counts.items()
    ]
    train, test = (
        ImageStore(result.pixels, torch.from_numpy(shapes.labels(len(result.pixels))))
        for result in materialize(sources, config, progress)
    )
    return ImageDataset("shapes", train, test, tuple(shapes.CLASSES))


def _not_found(name: str, path: Path) -> str:
    """Why a name or path cannot be loaded."""
    if path.exists():
        return f"data={name} is a file; give the folder that holds the images."
    if len(path.parts) > 1 or name.startswith(("~", ".")):
        here = "" if path.is_absolute() else f" in {Path.cwd()}"
        return (
            f"data={name} does not exist (any more){here}: it was deleted, moved or misspelled; give with data= the "
            "folder where the images are."
        )
    hint = did_you_mean(name.lower(), NAMES)
    return f"data={name} is neither a folder nor one of {', '.join(NAMES)}{hint}; give one of these or a path."
