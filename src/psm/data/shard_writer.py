"""Write a data set as shards: tar files in WebDataset's layout.

Files keep their content; images without files become PNG. The images are shuffled by a fixed seed, so that any few
shards are a fair sample of the set. Everything is written into a hidden folder beside the shards and renamed when it is
complete.
"""

import io
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from psm.config.schema import ImagesConfig
from psm.data import cifar, decode, file_list, hugging_face, image_folder, tiny_imagenet
from psm.data.dataset import ImageStore
from psm.data.factory import is_list, joined_files, load_dataset
from psm.data.file_index import Files
from psm.data.image_files import FileSet
from psm.data.names import printable
from psm.data.registry import NAMES
from psm.data.shard_files import is_shards
from psm.data.shards import CLASSES_FILE
from psm.data.unreadable import too_many_unreadable
from psm.utils.errors import UserError
from psm.utils.files import TEMPORARY_PREFIX
from psm.utils.progress import counting
from psm.utils.resources import write_error

_SEED = 4_711


@dataclass(frozen=True)
class WrittenShards:
    """What was written."""

    files: list[Path]
    test_files: list[Path]
    images: int
    bytes: int
    unreadable: list[tuple[str, str]]


@dataclass(frozen=True)
class _Images:
    """Images of one split to write: the name, content and label of each by its index."""

    count: int
    get: Callable[[int], tuple[str, bytes, int | None]]


def write_shards(
    data: str | list[str], pattern: str, config: ImagesConfig, shard_bytes: float, progress: bool = True
) -> WrittenShards:
    """Write the images of a data set as shards.

    Args:
        data: as in ``load_dataset``, but for shards.
        pattern: path of the shards with their number as ``%06d``. A test split that the data has of its own goes to
            files of the same name with ``test-`` before it.
        config: how the data is found.
        shard_bytes: size at which a new shard is begun.
        progress: whether to show a bar.
    """
    folder, name = _checked_pattern(pattern)
    train, test, classes = _splits(data, config)
    # The folders that this call makes, so that a failure leaves none behind.
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    part = folder / f"{TEMPORARY_PREFIX}shards"
    shutil.rmtree(part, ignore_errors=True)
    unreadable: list[tuple[str, str]] = []
    try:
        part.mkdir(parents=True)
        written = [
            _write_split(images, part, f"{prefix}{name}", shard_bytes, unreadable, progress)
            for images, prefix in ((train, ""), *(((test, "test-"),) if test else ()))
        ]
        count = train.count + (test.count if test else 0)
        if len(unreadable) > config.max_unreadable * count or len(unreadable) == count:
            raise UserError(too_many_unreadable(unreadable, count, f"data={data}", config))
        if classes:
            (part / CLASSES_FILE).write_text("".join(f"{printable(word)}\n" for word in classes), encoding="utf-8")
        for file in sorted(part.iterdir()):
            file.replace(folder / file.name)
        part.rmdir()
    except OSError as error:
        _remove(part, made)
        raise write_error(f"shards={pattern}", error) from None
    except BaseException:
        _remove(part, made)
        raise
    files = [[folder / file for file in names] for names in written]
    total = sum(file.stat().st_size for group in files for file in group)
    return WrittenShards(files[0], files[1] if test else [], count - len(unreadable), total, unreadable)


def _remove(part: Path, made: list[Path]) -> None:
    shutil.rmtree(part, ignore_errors=True)
    for path in made:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _checked_pattern(pattern: str) -> tuple[Path, str]:
    """The folder and the name of the shards; refused if it is no pattern, or if there are shards already."""
    path = Path(pattern).expanduser()
    if len(re.findall(r"%0?\d*d", path.name)) != 1 or path.name.count("%") != 1 or path.suffix != ".tar":
        raise UserError(f"shards={pattern} must end in a file name with a number and .tar, for example out/%06d.tar.")
    if path.parent.exists() and not path.parent.is_dir():
        raise UserError(f"shards={pattern} cannot be written: {path.parent} is a file.")
    like = re.sub(r"%0?\d*d", "*", path.name)
    there = [file for word in (like, f"test-{like}") for file in path.parent.glob(word)] if path.parent.exists() else []
    if there:
        raise UserError(
            f"shards={pattern}: {sorted(there)[0]} exists; remove the shards there, or name another folder."
        )
    return path.parent, path.name


def _splits(data: str | list[str], config: ImagesConfig) -> tuple[_Images, _Images | None, tuple[str, ...]]:
    sources = [data] if isinstance(data, str) else list(data)
    if any(source not in NAMES and is_shards(source) for source in sources):
        raise UserError(f"data={sources[0]} is shards already: give a folder, a list of files or the name of a set.")
    if len(sources) == 1 and sources[0].startswith(hugging_face.PREFIX):
        train, test, classes = hugging_face.scan(sources[0], config)
        return _of_rows(train), _of_rows(test) if test else None, classes
    files = _file_set(sources, config)
    if files is not None:
        splits = [_of_files(split.files, split.labels) for split in (files.train, files.test) if split is not None]
        return splits[0], splits[1] if files.test is not None else None, files.classes
    loaded = load_dataset(data, config)
    stores = [_of_store(store) if store is not None else None for store in (loaded.train, loaded.test)]
    assert stores[0] is not None
    return stores[0], stores[1], loaded.classes


def _file_set(sources: list[str], config: ImagesConfig) -> FileSet | None:
    """The files of the sources; None for a set that does not consist of image files."""
    if len(sources) > 1:
        return joined_files(sources, config)
    path = Path(sources[0]).expanduser()
    if sources[0] in NAMES:
        root = tiny_imagenet.find(Path(config.root).expanduser()) if sources[0] == "tiny-imagenet" else None
        return tiny_imagenet.scan(root, config) if root else None
    if is_list(path):
        return file_list.scan(path, config)
    if not path.is_dir():
        return None
    tiny = tiny_imagenet.find(path)
    if tiny == path:
        return tiny_imagenet.scan(tiny, config)
    return None if cifar.find(path) else image_folder.scan(path, config)


def _of_files(files: Files, labels: np.ndarray | None) -> _Images:
    def get(index: int) -> tuple[str, bytes, int | None]:
        content = files.location(index).read_bytes()
        return files.name(index), content, None if labels is None else int(labels[index])

    return _Images(len(files), get)


def _of_rows(split: hugging_face.HfSplit) -> _Images:
    def get(index: int) -> tuple[str, bytes, int | None]:
        (content,) = split.contents(index, index + 1)
        return split.name(index), content, None if split.labels is None else int(split.labels[index])

    return _Images(len(split.rows), get)


def _of_store(store: ImageStore) -> _Images:
    def get(index: int) -> tuple[str, bytes, int | None]:
        pixels = store.take(torch.tensor([index]))[0].permute(1, 2, 0)
        buffer = io.BytesIO()
        Image.fromarray(pixels.contiguous().numpy()).save(buffer, "PNG")
        labels = store.labels
        name = store.name(index).replace(" ", "-")
        return f"{name}.png", buffer.getvalue(), None if labels is None else int(labels[index])

    return _Images(len(store), get)


def _write_split(
    images: _Images, part: Path, name: str, shard_bytes: float, unreadable: list[tuple[str, str]], progress: bool
) -> list[str]:
    """Write the shards of one split into a folder; returns their names."""
    written: list[str] = []
    keys: dict[str, int] = {}
    archive: tarfile.TarFile | None = None
    filled = 0
    try:
        with decode.quiet_pillow(), counting("writing shards", images.count, progress) as done:
            for position, (path, content, label) in enumerate(_readable(images, unreadable)):
                if archive is None or filled >= shard_bytes:
                    if archive is not None:
                        archive.close()
                    written.append(name % len(written))
                    archive, filled = tarfile.open(part / written[-1], "w"), 0  # noqa: SIM115
                key = _unique_key(path, keys)
                filled += _add(archive, f"{key}.{_extension(path, content)}", content)
                if label is not None:
                    filled += _add(archive, f"{key}.cls", str(label).encode())
                done(position + 1)
    finally:
        if archive is not None:
            archive.close()
    return written


def _readable(images: _Images, unreadable: list[tuple[str, str]]) -> Iterator[tuple[str, bytes, int | None]]:
    """The images in shuffled order, without those whose file cannot be read or has no header of an image."""
    for index in np.random.default_rng(_SEED).permutation(images.count).tolist():
        try:
            path, content, label = images.get(index)
        except OSError as error:
            unreadable.append((printable(error.filename or f"image {index}"), error.strerror or str(error)))
            continue
        try:
            decode.shorter_side(content)
        except decode.Unreadable as error:
            unreadable.append((printable(path), printable(str(error))))
            continue
        yield path, content, label


def _unique_key(path: str, keys: dict[str, int]) -> str:
    """The name that the files of a sample share: without extension, further dots and what leads out of a folder."""
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    stem = parts[-1].rpartition(".")[0] or parts[-1]
    key = "/".join([*parts[:-1], stem.replace(".", "_") or "_"])
    count = keys[key] = keys.get(key, -1) + 1
    return _unique_key(f"{key}-{count}.", keys) if count else key


def _extension(path: str, content: bytes) -> str:
    """The extension of an image's file, by its content where it has none that is known."""
    extension = path[path.rfind(".") :].lower() if "." in path.rpartition("/")[2] else ""
    if extension in decode.EXTENSIONS:
        return "jpg" if extension in (".jpeg", ".jpe", ".jfif") else extension[1:]
    return "jpg" if content[:2] == b"\xff\xd8" else "png" if content[:4] == b"\x89PNG" else "tif"


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> int:
    """Add a file, the same on every machine; returns the bytes it takes."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    archive.addfile(member, io.BytesIO(content))
    return tarfile.BLOCKSIZE * (1 + -(-len(content) // tarfile.BLOCKSIZE))
