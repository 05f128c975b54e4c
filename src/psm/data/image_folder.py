"""Any folder of images: splits and classes follow from its layout.

``train/`` beside ``test/``, ``val/``, ``valid/`` or ``validation/`` are splits; the first level of folders of a split
names the classes if it contains every image.
"""

from pathlib import Path

import numpy as np

from psm.config.schema import ImagesConfig
from psm.data.dataset import ImageDataset
from psm.data.decode import EXTENSIONS
from psm.data.image_files import File, FileSplit, list_files, load_files, subfolders, typical_size
from psm.data.names import printable
from psm.data.splits import held_out_mask
from psm.utils.errors import UserError

_TEST_FOLDERS = ("test", "val", "valid", "validation")


def load(root: Path, config: ImagesConfig, progress: bool) -> ImageDataset:
    """The images of a folder, with labels and a test split where its layout has them."""
    train_folder, test_folders = _split_folders(root)
    files = _listed(root, train_folder)
    train, test, classes = _labeled_splits(root, files, train_folder, test_folders, config)
    size = config.size or typical_size(root, files)
    return load_files(root.resolve().name, root, train, test, classes, size, config, progress)


def _labeled_splits(
    root: Path, files: list[File], train_folder: str, test_folders: list[str], config: ImagesConfig
) -> tuple[FileSplit, FileSplit | None, tuple[str, ...]]:
    """Train split, test split and class names; without labels everything trains."""
    names = _class_names(root, files, train_folder, config.labels)
    if not names:
        return FileSplit(files), None, ()
    classes = tuple(sorted(set(names)))
    labels = _numbered(names, classes)
    test = _test_split(root, test_folders, classes, config)
    if test is not None:
        return FileSplit(files, labels), test, classes
    held_out = held_out_mask(labels, config.test_share)
    if not held_out.any():  # a folder for every single image does not name classes
        return FileSplit(files), None, ()
    labeled = FileSplit(files, labels)
    return labeled.take(np.flatnonzero(~held_out)), labeled.take(np.flatnonzero(held_out)), classes


def _split_folders(root: Path) -> tuple[str, list[str]]:
    """The training folder ("" for the root) and the candidates for the test folder.

    ``train`` among folders other than test folders is a class (the vehicle); alone it is a split.
    """
    folders = subfolders(root)
    tests = [name for name in _TEST_FOLDERS if name in folders]
    if "train" in folders and (tests or folders == ["train"]):
        return "train", tests
    return "", []


def _listed(root: Path, below: str) -> list[File]:
    files = list_files(root, below)
    if not files:
        kinds = ", ".join(sorted(extension.lstrip(".") for extension in EXTENSIONS))
        raise UserError(f"The folder {printable(root / below)} holds no image; files ending in {kinds} are looked for.")
    return files


def _first_level(files: list[File], below: str) -> list[str] | None:
    """The name of each file's folder right below the split, or None if a file lies in none."""
    depth = 1 if below else 0
    parts = [file.path.split("/") for file in files]
    return [part[depth] for part in parts] if all(len(part) > depth + 1 for part in parts) else None


def _class_names(root: Path, files: list[File], below: str, rule: str) -> list[str] | None:
    """The class of each training file, or None where there are no labels."""
    if rule == "none":
        return None
    names = _first_level(files, below)
    if rule == "subfolder" and names is None:
        raise UserError(
            f"images.labels=subfolder needs every image of {printable(root / below)} in a folder named after its "
            "class, but some lie outside; move them, or use images.labels=none."
        )
    return names if rule == "subfolder" or (names and len(set(names)) > 1) else None


def _test_split(root: Path, candidates: list[str], classes: tuple[str, ...], config: ImagesConfig) -> FileSplit | None:
    """The first test folder whose images are in class folders; others cannot be scored and are skipped."""
    for below in candidates:
        files = list_files(root, below)
        names = _first_level(files, below) if files else None
        if names is None:
            continue
        unknown = sorted(set(names) - set(classes))
        if unknown:
            raise UserError(
                f"{printable(root / below)} has classes that train does not have "
                f"({printable(', '.join(unknown[:3]))}); give both the same class folders, or use images.labels=none."
            )
        return FileSplit(files, _numbered(names, classes))
    if candidates and config.labels == "subfolder":
        raise UserError(
            f"images.labels=subfolder needs the images of {printable(root / candidates[0])} in class folders, as "
            "those of train are; sort them, or remove the folder to hold out a part of train."
        )
    return None


def _numbered(names: list[str], classes: tuple[str, ...]) -> np.ndarray:
    """Class names as labels int64 (N,)."""
    number = {name: index for index, name in enumerate(classes)}
    return np.array([number[name] for name in names], dtype=np.int64)
