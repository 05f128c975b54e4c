"""Whole images from the cache, aspect ratio kept: crops are taken from all of an image, not from its center square."""

import numpy as np
import torch

from psm.config.schema import ImagesConfig
from psm.data.cache import CachedWhole
from psm.data.crops import CropDraws
from psm.data.decode import resized_box
from psm.data.streamed import Failures
from psm.utils.indices import evenly_spaced
from psm.utils.seeding import generator


def held_size(config: ImagesConfig, size: int) -> int:
    """The shorter side at which whole images are held: as asked, or a quarter more than the images' size."""
    return config.whole_size or -(-5 * size // 4)


class RandomOrder:
    """The images of one epoch in the order of ``BatchLoader``; there are no windows."""

    def __init__(self, count: int, seed: int, epoch: int):
        self._order = torch.randperm(count, generator=generator(seed, "order", epoch)).numpy()

    def window_of(self, position: int) -> int:
        """All of an epoch is one window."""
        return 0

    def shards(self, first: int, last: int) -> np.ndarray:
        """None."""
        return np.empty(0, dtype=np.int64)

    def ids(self, first: int, last: int) -> np.ndarray:
        """The ids of the images at some positions of the epoch."""
        return self._order[first:last]


class WholeImages:
    """Whole images as center squares uint8 (N, 3, size, size); ``crops`` gives parts of the whole images instead."""

    dtype = np.dtype(np.uint8)
    decoded = True

    def __init__(self, images: CachedWhole, size: int, rows: np.ndarray | None = None):
        """Wrap images.

        Args:
            images: the whole images.
            size: side of the squares.
            rows: (N,) which of them; None: all.
        """
        self.images, self.size = images, size
        self.rows = np.arange(len(images)) if rows is None else rows
        self.shape = (len(self.rows), 3, size, size)

    def __len__(self) -> int:
        return len(self.rows)

    def whole(self, index: int) -> np.ndarray:
        """A whole image, (H, W, 3)."""
        return self.images[int(self.rows[index])]

    def select(self, rows: np.ndarray) -> "WholeImages":
        """The images at these rows."""
        return WholeImages(self.images, self.size, self.rows[rows])

    def __getitem__(self, index: int) -> np.ndarray:
        image = self.whole(index)
        height, width = image.shape[:2]
        side = min(height, width)
        return resized_box(image, ((height - side) // 2, (width - side) // 2, side, side), self.size)

    def sample(self, most: int) -> np.ndarray:
        """At most so many evenly spaced ids."""
        return evenly_spaced(len(self), most).numpy()

    def take_batch(self, ids: np.ndarray) -> np.ndarray:
        """Center squares of images, (B, 3, size, size)."""
        batch = np.empty((len(ids), *self.shape[1:]), dtype=np.uint8)
        for row, index in enumerate(ids.tolist()):
            batch[row] = self[index]
        return batch

    def order(self, seed: int, epoch: int) -> RandomOrder:
        """The order of an epoch."""
        return RandomOrder(len(self), seed, epoch)

    def crops(
        self, ids: np.ndarray, draws: CropDraws, size: int, shards: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Failures]:
        """Crops uint8 (V, B, 3, size, size) of whole images, their ids, and no failures."""
        batch = np.empty((len(draws.scale), len(ids), 3, size, size), dtype=np.uint8)
        for row, index in enumerate(ids.tolist()):
            image = self.whole(index)
            for view, box in enumerate(draws.boxes(row, *image.shape[:2])):
                batch[view, row] = resized_box(image, box, size)
        return batch, ids, Failures()

    @property
    def unreadable(self) -> tuple[tuple[str, str], ...]:
        """Nothing: what could not be read was left out when the cache was built."""
        return ()

    def report(self, failures: Failures) -> None:
        """Nothing: what could not be read was left out when the cache was built."""

    def check_ahead(self, ahead: int) -> None:
        """Nothing: all images are here."""

    def fetch(self, order: RandomOrder, window: int, ahead: int) -> None:
        """Nothing: all images are here."""

    def close(self) -> None:
        """Nothing to end."""
