"""Batches in an order that is a function of the seed and the epoch alone."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psm.data.dataset import ImageStore
from psm.utils import devices
from psm.utils.ahead import ahead
from psm.utils.seeding import generator

DEVICE_MEMORY_FRACTION = 0.5  # of the device's free memory that a data set may take
AHEAD = 2  # batches that are read ahead
MAPPED_ROWS = 4096  # images of a mapped set that are copied to a device at a time


class Batch(NamedTuple):
    """The images of one step that this process computes."""

    step: int
    ids: Tensor  # (B,)
    images: Tensor  # uint8 (B, 3, H, W)


def rank_slice(batch_size: int, rank: int, world: int) -> slice:
    """The rows of the global batch that a process takes."""
    each = batch_size // world
    return slice(rank * each, (rank + 1) * each)


def images_on_device(images: ImageStore, device: torch.device) -> Tensor | None:
    """All images, uint8 (N, 3, H, W), on the device if they fit in half of its free memory; None otherwise."""
    height, width = images.shape[1:]
    available = DEVICE_MEMORY_FRACTION * devices.free_bytes(device)
    if images.streamed is not None or len(images) * 3 * height * width > available:
        return None
    if not images.mapped:
        return images.take(torch.arange(len(images))).to(device)
    held = torch.empty((len(images), 3, height, width), dtype=torch.uint8, device=device)
    for rows in torch.arange(len(images)).split(MAPPED_ROWS):  # the host never holds all of them
        held[rows[0] : rows[-1] + 1] = images.take(rows).to(device)
    return held


class BatchLoader:
    """Full batches of shuffled epochs, starting at the step that ``step()`` returns.

    The batch size is global and each process takes its slice, so the order does not depend on the number of
    processes. An epoch leaves out the images that do not fill its last batch, different ones each time. Images that
    fit on the device are kept there; mapped ones that do not are read some batches ahead by threads.
    """

    def __init__(
        self,
        images: ImageStore,
        batch_size: int,
        seed: int,
        step: Callable[[], int] = lambda: 0,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        workers: int = 0,
    ):
        """Prepare batches of a store.

        Args:
            images: the training images.
            batch_size: of all processes together; a multiple of ``world``.
            seed: the order is a function of it and of the epoch.
            step: returns the step at which an iteration starts.
            rank: this process.
            world: number of processes.
            device: where the batches are used.
            workers: threads that read images which stay on disk; 0: who takes the batches reads them.
        """
        if batch_size % world:
            raise ValueError(f"a global batch of {batch_size} cannot be split evenly over {world} processes")
        self.images, self.batch_size, self.seed = images, batch_size, seed
        self.workers = workers if images.mapped else 0
        self.step, self.device = step, torch.device(device)
        self.rows = rank_slice(batch_size, rank, world)
        self.on_device = images_on_device(images, self.device)
        self.with_images = True

    def without_images(self) -> "BatchLoader":
        """The same batches without their images, whose place takes an empty tensor: for features computed before."""
        self.on_device, self.with_images = None, False
        return self

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        step = self.step()
        epoch, offset = divmod(step, len(self))
        order = torch.randperm(len(self.images), generator=generator(self.seed, "order", epoch))
        if self.on_device is not None:
            order = devices.to_device(order, self.device)
        batches = (
            order[index * self.batch_size : (index + 1) * self.batch_size][self.rows]
            for index in range(offset, len(self))
        )
        workers = self.workers if self.on_device is None and self.with_images else 0
        for ids, images in ahead(self._take, batches, workers, max(AHEAD, workers)):
            yield Batch(step, ids, images)
            step += 1

    def _take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and images on the device, or in pinned memory to be copied there."""
        if not self.with_images:
            return devices.to_device(ids, self.device), ids.new_empty(len(ids), 0)
        if self.on_device is not None:
            return ids, self.on_device.index_select(0, ids)
        images = self.images.take(ids)
        return (ids.pin_memory(), images.pin_memory()) if self.device.type == "cuda" else (ids, images)

    def state_dict(self) -> dict[str, Any]:
        """Empty: the step determines where an iteration starts. Lightning requires it to resume within an epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
