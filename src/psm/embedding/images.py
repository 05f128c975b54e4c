"""The images of a file of embeddings, read again at another size, from where they are now."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import interpolate

from psm.config.embed import EveryImageConfig
from psm.data import ImageDataset
from psm.data.decode import quiet_pillow
from psm.data.file_index import make_files
from psm.data.image_files import ImageDecoder, decode_files
from psm.data.stream import image_stream
from psm.embedding.table import Table
from psm.utils.devices import num_cores
from psm.utils.errors import UserError


class ReadImages(Protocol):
    """Reads images by their rows at a side in pixels: row -> uint8 (3, size, size). Unreadable ones are left out."""

    def __call__(self, rows: Sequence[int], size: int) -> dict[int, np.ndarray]: ...


@contextmanager
def table_images(table: Table, data: str | list[str] | ImageDataset | None = None) -> Iterator[ReadImages]:
    """Open the images of a table.

    Args:
        table: its description says where the images were.
        data: the folder or data set where they are now, or a loaded data set; None: where they were.

    Raises:
        UserError: They are not there any more, or were given as an object.
    """
    root = table.about.get("root")
    if root is not None and (data is None or isinstance(data, str)):
        folder = Path(data or root).expanduser()
        if not folder.is_dir():
            raise UserError(f"the images are not in {folder} any more: give data= to say where they are now.")
        with ThreadPoolExecutor(num_cores()) as pool, quiet_pillow():
            yield _from_files(table, folder, pool)
        return
    name = data or table.about.get("data")
    if name is None:
        raise UserError("the images were given as an object of Python, which a file cannot name.")
    with image_stream(name, EveryImageConfig(**table.about["images"]), progress=False) as stream:
        place = {stream.path(index): index for index in range(len(stream))}

        def read(rows: Sequence[int], size: int) -> dict[int, np.ndarray]:
            known = [row for row in rows if table.paths[row] in place]
            pixels, failures = stream.read(np.array([place[table.paths[row]] for row in known], dtype=np.int64))
            missing = {index for index, _ in failures}
            readable = [row for row in known if place[table.paths[row]] not in missing]
            return dict(zip(readable, _resized(pixels, size), strict=True))

        yield read


def _resized(pixels: np.ndarray, size: int) -> np.ndarray:
    if pixels.shape[-1] == size:
        return pixels
    images = torch.from_numpy(pixels).float()
    resized = interpolate(images, (size, size), mode="bilinear", antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8).numpy()


def _from_files(table: Table, root: Path, pool: ThreadPoolExecutor) -> ReadImages:
    def read(rows: Sequence[int], size: int) -> dict[int, np.ndarray]:
        files = make_files(root, [table.paths[row] for row in rows], np.zeros((len(rows), 2), dtype=np.int64))
        pixels, failures = decode_files(files, range(len(rows)), ImageDecoder(size, whole=False), pool)
        missing = {place for place, _ in failures}
        return dict(zip((row for place, row in enumerate(rows) if place not in missing), pixels, strict=True))

    return read
