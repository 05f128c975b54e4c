"""Any folder of images: its splits and classes are read from how it is laid out.

``train/`` beside ``test/``, ``val/``, ``valid/`` or ``validation/`` are splits; the first level of folders below names
the classes when it holds every image of the split.
"""

from pathlib import Path

import numpy as np

from psm.config.schema import ImagesConfig
from psm.data import splits as choosing
from psm.data.dataset import ImageDataset
from psm.data.decode import EXTENSIONS
from psm.data.image_files import File, Part, assemble, listing, shown, typical_size
from psm.utils.errors import UserError

_TESTS = ("test", "val", "valid", "validation")


def load(root: Path, config: ImagesConfig, progress: bool) -> ImageDataset:
    """The images of a folder, with labels and a test split where its layout has them."""
    train_name, test_names = _splits(root)
    train = _listed(root, train_name)
    names = _classes(root, train, train_name, config.labels)
    classes = tuple(sorted(set(names))) if names else ()
    part, test = Part(train), None
    if classes:
        part = Part(train, _numbered(names, classes))
        test = _test(root, test_names, classes, config)
    if classes and test is None:
        held = choosing.held_out(part.labels, config.test_share)
        if held.any():
            part, test = part.take(np.flatnonzero(~held)), part.take(np.flatnonzero(held))
        else:  # a folder for every single image says nothing about classes
            part, classes = Part(train), ()
    size = config.size or typical_size(root, train)
    return assemble(root.resolve().name, root, part, test, classes, size, config, progress)


def _splits(root: Path) -> tuple[str, list[str]]:
    """The folder that trains ("" for the whole) and those that may test.

    A lone ``train`` among other folders is a class, the vehicle; alone in its folder it is a split.
    """
    folders = {entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    tests = [name for name in _TESTS if name in folders]
    if "train" in folders and (tests or folders == {"train"}):
        return "train", tests
    return "", []


def _listed(root: Path, below: str) -> list[File]:
    files = listing(root, below)
    if not files:
        kinds = ", ".join(sorted(extension.lstrip(".") for extension in EXTENSIONS))
        raise UserError(f"The folder {shown(root / below)} holds no image; files ending in {kinds} are looked for.")
    return files


def _first_level(files: list[File], below: str) -> list[str] | None:
    """The name of each file's folder right below the split, or None when a file lies in none."""
    depth = 1 if below else 0
    parts = [file.path.split("/") for file in files]
    return [part[depth] for part in parts] if all(len(part) > depth + 1 for part in parts) else None


def _classes(root: Path, files: list[File], below: str, rule: str) -> list[str] | None:
    """The class of each training file, or None where there are no labels."""
    if rule == "none":
        return None
    names = _first_level(files, below)
    if rule == "subfolder" and names is None:
        raise UserError(
            f"images.labels=subfolder needs every image of {shown(root / below)} in a folder named after its "
            "class, but some lie outside; move them, or use images.labels=none."
        )
    return names if rule == "subfolder" or (names and len(set(names)) > 1) else None


def _test(root: Path, candidates: list[str], classes: tuple[str, ...], config: ImagesConfig) -> Part | None:
    """The first test folder with images sorted into classes; one without cannot score anything and is passed over."""
    for below in candidates:
        files = listing(root, below)
        names = _first_level(files, below) if files else None
        if names is None:
            continue
        strangers = sorted(set(names) - set(classes))
        if strangers:
            raise UserError(
                f"{shown(root / below)} has classes that train has not ({shown(', '.join(strangers[:3]))}); give both "
                "the same class folders, or use images.labels=none."
            )
        return Part(files, _numbered(names, classes))
    if candidates and config.labels == "subfolder":
        raise UserError(
            f"images.labels=subfolder needs the images of {shown(root / candidates[0])} in class folders as those "
            "of train are; sort them, or remove the folder to hold out a share of train."
        )
    return None


def _numbered(names: list[str], classes: tuple[str, ...]) -> np.ndarray:
    number = {name: place for place, name in enumerate(classes)}
    return np.array([number[name] for name in names], dtype=np.int64)
