"""Any folder of images: splits and classes follow from its layout.

``train/`` beside ``test/``, ``val/``, ``valid/`` or ``validation/`` are splits; the first level of folders of a split
names the classes if it contains every image.
"""

from pathlib import Path

import numpy as np

from psm.config.schema import ImagesConfig
from psm.data.decode import EXTENSIONS
from psm.data.file_index import Files, list_files, subfolders
from psm.data.image_files import FileSet, FileSplit, number_classes
from psm.data.names import printable
from psm.data.splits import TEST_NAMES
from psm.utils.errors import UserError


def scan(root: Path, config: ImagesConfig) -> FileSet:
    """The image files of a folder, with labels and a test split where its layout has them."""
    train_folder, test_folders = _split_folders(root)
    files = _listed(root, train_folder, config)
    name = root.resolve().name
    names = _class_names(root, files, train_folder, config.labels)
    if not names:
        return FileSet(name, FileSplit(files))
    classes = tuple(sorted(set(names)))
    test = _test_split(root, test_folders, classes, config)
    return FileSet(name, FileSplit(files, number_classes(names, classes)), test, classes)


def every_file(root: Path, config: ImagesConfig) -> tuple[FileSplit, tuple[str, ...]]:
    """All images below a folder in the order of their paths, whatever their split, and the class names.

    The label is -1 where the layout names no class; there are no labels at all where it names none for any image.
    """
    train_folder, test_folders = _split_folders(root)
    files = _listed(root, "", config)
    splits = {train_folder, *test_folders} - {""}
    in_train = [row for row, path in enumerate(files.paths) if not splits or path.startswith(f"{train_folder}/")]
    names = _class_names(root, files.take(np.array(in_train, dtype=np.int64)), train_folder, config.labels)
    classes = tuple(sorted(set(names or ())))
    if not classes or len(classes) == len(in_train):  # a folder for every single image does not name classes
        return FileSplit(files), ()
    number = {name: index for index, name in enumerate(classes)}
    labels = np.full(len(files), -1, dtype=np.int64)
    for row, path in enumerate(files.paths):
        first, *rest = path.split("/")
        folders = rest[:-1] if splits else [first]
        if (not splits or first in splits) and folders:
            labels[row] = number.get(folders[0], -1)
    return FileSplit(files, labels), classes


def _split_folders(root: Path) -> tuple[str, list[str]]:
    """The training folder ("" for the root) and the candidates for the test folder.

    ``train`` among folders other than test folders is a class (the vehicle); alone it is a split.
    """
    folders = subfolders(root)
    tests = [name for name in TEST_NAMES if name in folders]
    if "train" in folders and (tests or folders == ["train"]):
        return "train", tests
    return "", []


def _listed(root: Path, below: str, config: ImagesConfig) -> Files:
    files = list_files(root, below, config)
    if not len(files):
        kinds = ", ".join(sorted(extension.lstrip(".") for extension in EXTENSIONS))
        raise UserError(f"The folder {printable(root / below)} holds no image; files ending in {kinds} are looked for.")
    return files


def _first_level(files: Files, below: str) -> list[str] | None:
    """The name of each file's folder right below the split, or None if a file lies in none."""
    depth = 1 if below else 0
    parts = [path.split("/") for path in files.paths]
    return [part[depth] for part in parts] if all(len(part) > depth + 1 for part in parts) else None


def _class_names(root: Path, files: Files, below: str, rule: str) -> list[str] | None:
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
        files = list_files(root, below, config)
        names = _first_level(files, below) if len(files) else None
        if names is None:
            continue
        unknown = sorted(set(names) - set(classes))
        if unknown:
            raise UserError(
                f"{printable(root / below)} has classes that train does not have "
                f"({printable(', '.join(unknown[:3]))}); give both the same class folders, or use images.labels=none."
            )
        return FileSplit(files, number_classes(names, classes))
    if candidates and config.labels == "subfolder":
        raise UserError(
            f"images.labels=subfolder needs the images of {printable(root / candidates[0])} in class folders, as "
            "those of train are; sort them, or remove the folder to hold out a part of train."
        )
    return None
