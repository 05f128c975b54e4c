"""From what the user calls a data set to the set itself."""

from pathlib import Path

import torch

from psm.config.schema import ImagesConfig
from psm.data import cifar, download, tiny_imagenet
from psm.data import image_folder as folder
from psm.data import materialize as store
from psm.data import synthetic_shapes as shapes
from psm.data.dataset import ImageDataset, ImageStore
from psm.data.registry import ARCHIVES, NAMES
from psm.utils.errors import UserError, did_you_mean


def load_dataset(data: str, config: ImagesConfig | None = None, progress: bool = True) -> ImageDataset:
    """A set by its name (shapes, cifar10, cifar100, tiny-imagenet) or by the path of a folder of images."""
    config = config or ImagesConfig()
    _check(config)
    name = str(data)
    if name == "shapes":
        return _shapes(config, progress)
    if name in ARCHIVES:
        return _published(name, config, progress)
    path = Path(name).expanduser()
    if not path.is_dir():
        raise UserError(_unknown(name, path))
    return _recognized(path, config, progress) or folder.load(path, config, progress)


def _published(name: str, config: ImagesConfig, progress: bool) -> ImageDataset:
    root = Path(config.root).expanduser()
    loaded = _in(root, name, config, progress)
    if loaded is None:
        download.install(ARCHIVES[name], root, progress, config.download)
        loaded = _in(root, name, config, progress)
    if loaded is None:
        place = root / ARCHIVES[name].folder
        raise UserError(f"{place} does not hold {name} as published; remove it, and it will be fetched again.")
    return loaded


def _in(root: Path, name: str | None, config: ImagesConfig, progress: bool) -> ImageDataset | None:
    """The named set (or any published one) from a folder that is or holds it."""
    if name in (None, "cifar10", "cifar100") and (place := cifar.found(root, name)):
        return cifar.load(*place, config, progress)
    if name in (None, "tiny-imagenet") and (place := tiny_imagenet.found(root)):
        return tiny_imagenet.load(place, config, progress)
    return None


def _recognized(path: Path, config: ImagesConfig, progress: bool) -> ImageDataset | None:
    """A published layout at a path, unless the path holds other folders too and could mean any of them."""
    for layout_folder in (path, *_only_folder(path)):
        if (place := cifar.found(layout_folder)) and place[0] == layout_folder:
            return cifar.load(*place, config, progress)
        if tiny_imagenet.found(layout_folder) == layout_folder:
            return tiny_imagenet.load(layout_folder, config, progress)
    return None


def _only_folder(path: Path) -> list[Path]:
    folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return folders if len(folders) == 1 else []


def _shapes(config: ImagesConfig, progress: bool) -> ImageDataset:
    size = config.size or shapes.SIDE
    counts = {"train": min(config.limit or shapes.TRAIN, shapes.MOST), "test": shapes.TEST}
    recipes = [
        store.Recipe("drawing shapes", count, size, shapes.fingerprint(split, count, size), shapes.maker(split, size))
        for split, count in counts.items()
    ]
    held = store.hold(recipes, config, progress)
    train, test = (ImageStore(made.pixels, torch.from_numpy(shapes.labels(len(made.pixels)))) for made in held)
    return ImageDataset("shapes", train, test, tuple(shapes.CLASSES))


def _unknown(name: str, path: Path) -> str:
    if path.exists():
        return f"data={name} is a file; give the folder that holds the images."
    hint = did_you_mean(name.lower(), NAMES)
    return f"data={name} is neither a folder nor one of {', '.join(NAMES)}{hint}; give one of these or a path."


def _check(config: ImagesConfig) -> None:
    """Refuse settings that mean nothing, before any work is done."""
    rules = [
        ("size", config.size is None or config.size >= 8, "none or 8 and more"),
        ("limit", config.limit is None or config.limit >= 2, "none or 2 and more"),
        ("split", config.split in ("paper", "official"), "paper or official"),
        ("labels", config.labels in ("auto", "subfolder", "none"), "auto, subfolder or none"),
        ("test_share", 0 < config.test_share < 1, "between 0 and 1, both excluded"),
        ("max_unreadable", 0 <= config.max_unreadable <= 1, "from 0 to 1"),
        ("memory", config.memory > 0, "a number of GB above 0"),
    ]
    for key, sound, allowed in rules:
        if not sound:
            raise UserError(f"images.{key}={getattr(config, key)} is not possible; it must be {allowed}.")
