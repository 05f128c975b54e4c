"""`psm embed`: read, compute and write side by side, in bounded memory; interrupted work is continued."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import Dataset

from psm.config import merge as settings
from psm.config.embed import EmbedConfig, EveryImageConfig
from psm.config.stored import training_config
from psm.data import ImageDataset
from psm.data.cache import Failure
from psm.data.from_torch import from_torch
from psm.data.names import FileNames, printable
from psm.data.stream import ImageStream, image_stream
from psm.embedding.encoder import LoadedEncoder, open_encoder
from psm.embedding.formats import find_format, read_table
from psm.embedding.overlap import read_ahead, write_behind
from psm.embedding.partial import PartialRows, partial_rows
from psm.embedding.table import Table, checksum
from psm.utils.errors import UserError
from psm.utils.files import output_file, replaced_atomically, write_text_atomically
from psm.utils.progress import counting_images
from psm.utils.resources import write_error

AHEAD = 3  # batches that are decoded while the encoder computes
UNREADABLE = ".unreadable.txt"  # added to the name of the file: the images that it leaves out
# Where images are and how they are read, as the run that trained the encoder had it.
INHERITED = ("root", "download", "split", "labels", "memory", "cache")


@dataclass(frozen=True)
class Embedding:
    """A file of embeddings that was written."""

    file: Path
    rows: int
    width: int
    unreadable: list[tuple[str, str]]  # (path, reason)


def embed(
    checkpoint: str | Path,
    data: str | Path | Sequence[str | Path] | ImageDataset | Dataset | None = None,
    out: str | Path = "",
    encoder: nn.Module | None = None,
    **keys: Any,
) -> Embedding:
    """Write the embedding of every image of a data set to a file.

    Examples:
        >>> psm.embed("runs/a", "photos", "features.parquet", dtype="float16")  # doctest: +SKIP

    Args:
        checkpoint: run folder, checkpoint (.ckpt) or encoder (.safetensors).
        data: name or folder of a data set, a loaded one, or a map-style `torch.utils.data.Dataset` of images; by
            default the data of the run.
        out: file to write; its suffix says how.
        encoder: receives the weights where the run was given a module instead of a name.
        keys: those of `psm embed`, nested ones as dictionaries.
    """
    given = {**keys, "checkpoint": str(checkpoint), "out": str(out)}
    if isinstance(data, (str, Path)):
        given["data"] = str(data)
    elif isinstance(data, (list, tuple)):
        given["data"] = [str(source) for source in data]
    loaded = data if isinstance(data, (ImageDataset, Dataset)) else None
    return run_embedding(given, data=loaded, encoder=encoder)


def run_embedding(
    *overrides: Mapping[str, Any],
    data: ImageDataset | Dataset | None = None,
    encoder: nn.Module | None = None,
    reuse: bool = False,
) -> Embedding:
    """Embed by the merged overrides.

    Args:
        overrides: keys of `psm embed` and their values, the later ones winning.
        data: replaces the data that its key names.
        encoder: receives the weights where the run was given a module instead of a name.
        reuse: leave the file as it is if it holds what would be computed.
    """
    first = settings.build(EmbedConfig, *overrides)
    out = check_out(first)
    loaded = open_encoder(first.checkpoint, encoder, first.accelerator, first.precision)
    config = settings.build(EmbedConfig, *overrides, base=EmbedConfig(images=images_config(loaded.file)))
    images = replace(config.images, size=config.images.size or loaded.info.size)
    if isinstance(data, Dataset):
        data = from_torch(data, images, config.progress)
    name = data.name if data is not None else config.data or loaded.info.data
    with image_stream(data or name, images, config.progress) as stream:
        identity = {
            "encoder": loaded.checksum,
            "data": stream.fingerprint,
            "precision": config.precision,
            "normalize": config.normalize,
            "dtype": config.dtype,
        }
        if reuse and (found := _same_file(out, identity, stream)) is not None:
            return found
        with partial_rows(out, identity, loaded.info.width, config.dtype, config.overwrite) as work:
            compute(loaded, stream, work, config)
            check_unreadable(stream, work, config.images.max_unreadable)
            about = describe(loaded, stream, config, None if data is not None else name, images)
            return write_file(out, stream, work, about)


def _same_file(out: Path, identity: Mapping[str, Any], stream: ImageStream) -> Embedding | None:
    """The file, if it is whole and holds the embeddings of these images by this encoder."""
    try:
        about = read_table(out).about if out.exists() else {}
    except UserError:  # damaged: it is written anew
        return None
    before = {
        "encoder": about.get("encoder", {}).get("checksum"),
        "data": about.get("fingerprint"),
        "precision": about.get("precision"),
        "normalize": about.get("normalized"),
        "dtype": about.get("dtype"),
    }
    if before != identity:
        return None
    listed = out.with_name(out.name + UNREADABLE)
    lines = listed.read_text().splitlines() if listed.exists() else []
    unreadable = [(path, reason) for path, _, reason in (line.partition("\t") for line in lines)]
    return Embedding(out, about["count"], about["encoder"]["width"], unreadable)


def images_config(encoder: Path) -> EveryImageConfig:
    """Where the images of an encoder's run are, as the defaults of a command that reads every image."""
    training = training_config(encoder)
    known = {name: getattr(training.images, name) for name in INHERITED} if training else {}
    return EveryImageConfig(**known)


def check_out(config: EmbedConfig) -> Path:
    """The file to write; refused before anything is computed if it cannot be written."""
    if not config.out:
        raise UserError("out= is missing: name the file to write, for example out=features.parquet.")
    out = output_file(config.out, Path("features.parquet"), config.overwrite)
    find_format(out, "out")
    return out


def compute(encoder: LoadedEncoder, stream: ImageStream, work: PartialRows, config: EmbedConfig) -> None:
    """Embed the images that are not done yet: while the encoder computes, later batches are decoded and the one before
    is written.
    """

    def write(embeddings: torch.Tensor, images: int, failures: list[Failure]) -> None:
        work.append(_as_type(embeddings, work.dtype), images, failures)
        done(work.images)

    starts = range(work.images, len(stream), config.batch_size)
    batches = (np.arange(start, min(start + config.batch_size, len(stream))) for start in starts)
    shown = counting_images("embedding", len(stream), config.progress, work.images)
    with shown as done, write_behind(write) as written:
        for indices, (pixels, failures) in read_ahead(stream.read, batches, AHEAD):
            embeddings = torch.empty(0, work.width)
            if len(pixels):
                embeddings = encoder.embed(torch.from_numpy(pixels), config.batch_size)
            if config.normalize:
                embeddings = normalize(embeddings, dim=1)
            written(embeddings, len(indices), failures)


def _as_type(embeddings: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    array = embeddings.numpy()
    if dtype == np.float16 and np.abs(array).max(initial=0) > np.finfo(np.float16).max:
        raise UserError("dtype=float16 cannot hold embeddings beyond 65504: give dtype=float32 or normalize=true.")
    return array.astype(dtype, copy=False)


def check_unreadable(stream: ImageStream, work: PartialRows, most: float) -> None:
    """Refuse data of which no image, or a larger share than allowed, could not be read."""
    failed = len(work.failures)
    if work.rows and failed <= most * len(stream):
        return
    examples = "; ".join(f"{stream.path(index)} ({reason})" for index, reason in work.failures[:3])
    if not work.rows:
        raise UserError(f"None of the {len(stream):,} images of {stream.name} can be read: {examples}.")
    raise UserError(
        f"{failed:,} of {len(stream):,} images of {stream.name} cannot be read, more than "
        f"images.max_unreadable={most:g} allows: {examples}. What was computed is kept: raise images.max_unreadable, "
        "and the same command finishes without them."
    )


def describe(
    encoder: LoadedEncoder,
    stream: ImageStream,
    config: EmbedConfig,
    data: str | list[str] | None,
    images: EveryImageConfig,
) -> dict[str, Any]:
    """What the file says of itself: enough to find encoder and images again, and to tell whether they are the same."""
    return {
        "psm": version("psm"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "encoder": encoder.describe(),
        "data": data,  # None: data that were given as an object
        "root": None if stream.root is None else str(stream.root.resolve()),
        "images": asdict(images),
        "fingerprint": stream.fingerprint,
        "normalized": config.normalize,
        "dtype": config.dtype,
        "precision": config.precision,
        "classes": list(stream.classes),
    }


def write_file(out: Path, stream: ImageStream, work: PartialRows, about: dict[str, Any]) -> Embedding:
    """Write the final file from the rows; it has its name only when it and the files beside it are complete."""
    readable = np.ones(len(stream), dtype=bool)
    readable[[index for index, _ in work.failures]] = False
    rows, embeddings = np.flatnonzero(readable), work.embeddings()
    paths = FileNames(stream.paths(rows))
    about = about | {
        "count": len(rows),
        "unreadable": len(work.failures) + len(stream.left_out),
        "crc32": checksum(embeddings),
    }
    labels = None if stream.labels is None else stream.labels[rows]
    table = Table(embeddings, paths, labels, stream.classes, about)
    unreadable = [*stream.left_out, *((stream.path(index), reason) for index, reason in work.failures)]
    form = find_format(out, "out")
    try:
        for suffix, write in form.beside.items():
            with replaced_atomically(out.with_name(out.name + suffix)) as path:
                write(path, table)
        _write_unreadable(out.with_name(out.name + UNREADABLE), unreadable)
        with replaced_atomically(out) as path:
            form.write(path, table)
    except OSError as error:
        kept = ". What was computed is kept: make room, and the same command finishes"
        raise write_error(f"out={out}", error, kept) from None
    return Embedding(out, len(rows), embeddings.shape[1], unreadable)


def _write_unreadable(path: Path, unreadable: list[tuple[str, str]]) -> None:
    if not unreadable:
        path.unlink(missing_ok=True)
        return
    write_text_atomically(path, "".join(f"{printable(file)}\t{reason}\n" for file, reason in unreadable))
