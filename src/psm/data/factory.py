"""Load a data set by its name or path."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from psm.config.schema import ImagesConfig
from psm.config.values import check_values
from psm.data import cifar, download, file_list, hugging_face, image_folder, shards, tiny_imagenet
from psm.data import synthetic_shapes as shapes
from psm.data.dataset import ImageDataset, ImageStore
from psm.data.file_index import subfolders
from psm.data.holdout import hold_out
from psm.data.image_files import FileSet, FileSplit, join_sets, load_files
from psm.data.materialize import PixelSource, materialize
from psm.data.registry import ARCHIVES, NAMES
from psm.data.shard_files import is_shards
from psm.utils.errors import UserError, did_you_mean


def load_dataset(
    data: str | Path | Sequence[str | Path],
    config: ImagesConfig | None = None,
    progress: bool = True,
    shared: bool = False,
) -> ImageDataset:
    """Load a data set.

    Args:
        data: shapes, cifar10, cifar100, tiny-imagenet; the path of a folder of images or of a list of files (text,
            CSV, TSV, JSON lines, Parquet), or several of these, whose images are joined; shards (tar files, with
            braces, ``*`` or an address of fsspec); ``hf:`` and the name or path of a Hugging Face dataset.
        config: size, limit, split, memory and so on; None: the defaults.
        progress: whether to show a bar on a terminal.
        shared: whether other processes of this machine load the same data: it is then decoded by one of them.
    """
    config = config or ImagesConfig()
    check_values(config, "images.")
    sources = [str(data)] if isinstance(data, (str, Path)) else [str(source) for source in data]
    return hold_out(_load(sources, config, progress, shared), config.holdout)


def _load(sources: list[str], config: ImagesConfig, progress: bool, shared: bool) -> ImageDataset:
    if any(source.startswith(hugging_face.PREFIX) for source in sources):
        if len(sources) > 1:
            raise UserError(f"data={sources} joins a Hugging Face dataset with others: give it alone.")
        return hugging_face.load(sources[0], config, progress, shared)
    of_shards = [source for source in sources if source not in NAMES and is_shards(source)]
    if of_shards and len(of_shards) < len(sources):
        other = next(source for source in sources if source not in of_shards)
        raise UserError(
            f"data={of_shards[0]} is shards and data={other} is not: write the images of {other} as shards too, with "
            f"`psm data data={other} shards=...`."
        )
    if of_shards:
        return shards.load(sources, config, progress)
    if len(sources) != 1:
        return load_files(joined_files(sources, config), config.size, config, progress, shared)
    (name,) = sources
    if name == "shapes":
        return _load_shapes(config, progress, shared)
    if name in ARCHIVES:
        return _load_published(name, config, progress, shared)
    path = Path(name).expanduser()
    if is_list(path):
        return load_files(file_list.scan(path, config), config.size, config, progress, shared)
    if not path.is_dir():
        raise UserError(_not_found(name, path))
    loaded = _load_recognized(path, config, progress, shared)
    return loaded or load_files(image_folder.scan(path, config), config.size, config, progress, shared)


def is_list(path: Path) -> bool:
    """True for a file that lists image files."""
    return path.suffix.lower() in file_list.SUFFIXES and path.is_file()


def joined_files(sources: Sequence[str], config: ImagesConfig) -> FileSet:
    """The files of several folders and lists, named by their source."""
    if not sources:
        raise UserError("data=[] names nothing: give a name, a folder or a list of files.")
    paths = [Path(source).expanduser() for source in sources]
    for source, path in zip(sources, paths, strict=True):
        if source in NAMES:
            raise UserError(f"data={source} stands alone: only folders and lists of files can be joined.")
        if not path.is_dir() and not is_list(path):
            raise UserError(_not_found(source, path))
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"data=[{','.join(sources)}] names a source twice: give each once.")
    short = [path.resolve().name if path.is_dir() else "" for path in paths]
    sets = []
    for source, path, prefix in zip(sources, paths, short, strict=True):
        files = image_folder.scan(path, config) if path.is_dir() else file_list.scan(path, config, part=True)
        unique = short.count(prefix) == 1
        prefixed = f"{(prefix if unique else source.rstrip('/'))}/" if prefix else ""
        sets.append(_with_prefix(files, prefixed))
    joined = join_sets(sets)
    one_class = len(joined.classes) == 1 and config.labels != "subfolder"
    return joined.unlabeled if one_class and joined.test is None else joined


def _with_prefix(data: FileSet, prefix: str) -> FileSet:
    def named(split: FileSplit) -> FileSplit:
        return replace(split, files=replace(split.files, prefixes=(prefix,)))

    return replace(data, train=named(data.train), test=data.test and named(data.test))


def _load_published(name: str, config: ImagesConfig, progress: bool, shared: bool) -> ImageDataset:
    """A published data set from images.root, downloaded if it is not there."""
    root = Path(config.root).expanduser()
    loaded = _load_named(root, name, config, progress, shared)
    if loaded is None:
        download.install(ARCHIVES[name], root, progress, config.download)
        loaded = _load_named(root, name, config, progress, shared)
    if loaded is None:
        folder = root / ARCHIVES[name].folder
        raise UserError(f"{folder} does not contain {name} as published; remove it, and it is downloaded again.")
    return loaded


def _load_named(root: Path, name: str, config: ImagesConfig, progress: bool, shared: bool) -> ImageDataset | None:
    """The named data set from a folder that is or contains it; None if it is not there."""
    if name == "tiny-imagenet":
        folder = tiny_imagenet.find(root)
        return tiny_imagenet.load(folder, config, progress, shared) if folder else None
    found = cifar.find(root, name)
    return cifar.load(*found, config, progress, shared) if found else None


def _load_recognized(path: Path, config: ImagesConfig, progress: bool, shared: bool) -> ImageDataset | None:
    """A published layout at a path."""
    folder, layout = find_published(path)
    if isinstance(layout, cifar.Layout):
        return cifar.load(folder, layout, config, progress, shared)
    return tiny_imagenet.load(folder, config, progress, shared) if layout == "tiny-imagenet" else None


def find_published(path: Path) -> tuple[Path, cifar.Layout | str | None]:
    """The folder and the published layout at a path, unless it has other folders too and could mean any of them.

    The layout is one of CIFAR's, ``tiny-imagenet`` or None.
    """
    folders = subfolders(path)
    for folder in (path, *(path / name for name in folders if len(folders) == 1)):
        found = cifar.find(folder)
        if found and found[0] == folder:
            return found
        if tiny_imagenet.find(folder) == folder:
            return folder, "tiny-imagenet"
    return path, None


def _load_shapes(config: ImagesConfig, progress: bool, shared: bool) -> ImageDataset:
    size = config.side(shapes.SIZE)
    counts = {"train": min(config.limit or shapes.TRAIN, shapes.MOST), "test": shapes.TEST}
    sources = [
        PixelSource("drawing shapes", count, size, shapes.fingerprint(split, count, size), shapes.reader(split, size))
        for split, count in counts.items()
    ]
    train, test = (
        ImageStore(result.held(size), torch.from_numpy(shapes.labels(len(result.pixels))))
        for result in materialize(sources, config, progress, shared)
    )
    return ImageDataset("shapes", train, test, tuple(shapes.CLASSES))


def _not_found(name: str, path: Path) -> str:
    """Why a name or path cannot be loaded."""
    if path.exists():
        kinds = ", ".join(file_list.SUFFIXES)
        return f"data={name} is a file; give the folder that holds the images, or a list of files ending in {kinds}."
    if len(path.parts) > 1 or name.startswith(("~", ".")):
        here = "" if path.is_absolute() else f" in {Path.cwd()}"
        return (
            f"data={name} does not exist (any more){here}: it was deleted, moved or misspelled; give with data= the "
            "folder where the images are."
        )
    hint = did_you_mean(name.lower(), NAMES)
    return f"data={name} is neither a folder nor one of {', '.join(NAMES)}{hint}; give one of these or a path."
