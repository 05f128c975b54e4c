"""The order in which images are seen, as a pure function of the seed and the step."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from psm.data import ImageStore
from psm.utils.devices import held_images, to_device
from psm.utils.seeding import generator


class Batch(NamedTuple):
    """This process's share of one step's images."""

    step: int
    ids: Tensor  # (B,)
    images: Tensor  # uint8 (B, 3, H, W)


def share(batch_size: int, rank: int, world: int) -> slice:
    """The rows of the global batch that a process takes."""
    each = batch_size // world
    return slice(rank * each, (rank + 1) * each)


class Batches:
    """Full batches of a shuffled epoch, starting wherever ``step()`` says that training stands.

    Images that fit on the device are held there. The batch size is global and a process takes its slice, so the
    order does not depend on how many share it. An epoch leaves out the images that do not fill its last batch, other
    ones each time.
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
    ):
        if batch_size % world:
            raise ValueError(f"a global batch of {batch_size} cannot be shared out evenly over {world} processes")
        self.images, self.batch_size, self.seed = images, batch_size, seed
        self.step, self.device = step, torch.device(device)
        self.mine = share(batch_size, rank, world)
        self.held = held_images(images, self.device)

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        step = self.step()
        epoch, offset = divmod(step, len(self))
        order = torch.randperm(len(self.images), generator=generator(self.seed, "order", epoch))
        if self.held is not None:
            order = to_device(order, self.device)
        for index in range(offset, len(self)):
            ids = order[index * self.batch_size : (index + 1) * self.batch_size][self.mine]
            yield Batch(step, *self._take(ids))
            step += 1

    def _take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and images on the device, or pinned for the copy to it."""
        if self.held is not None:
            return ids, self.held.index_select(0, ids)
        images = self.images.take(ids)
        return (ids.pin_memory(), images.pin_memory()) if self.device.type == "cuda" else (ids, images)

    def state_dict(self) -> dict:
        """Nothing: where an iteration starts follows from the step alone. Tells Lightning that it may resume midway."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass
