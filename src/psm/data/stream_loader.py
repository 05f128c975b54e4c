"""Batches of crops of whole images, made ahead of time: from shards by worker processes, from the cache by threads."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from psm.data.crops import CropDraws
from psm.data.loader import AHEAD, Batch, rank_slice
from psm.data.shard_order import ShardOrder
from psm.data.streamed import Failures, StreamedImages
from psm.data.whole_images import RandomOrder, WholeImages
from psm.utils.ahead import ahead
from psm.utils.devices import num_cores
from psm.utils.errors import UserError

CropSource = StreamedImages | WholeImages
Order = ShardOrder | RandomOrder

CHUNK = 32  # images that a worker process decodes at a time


def decode_workers(workers: int | None, processes: int) -> int:
    """Workers of one training process: as asked, or its share of this machine's cores."""
    return max(1, num_cores() // max(1, processes)) if workers is None else workers


@dataclass(frozen=True)
class _Task:
    """Some images of a batch, for one worker."""

    ids: np.ndarray
    draws: CropDraws
    shards: np.ndarray  # whose images may stand in for unreadable ones


_Decoded = tuple[Tensor, Tensor, Failures] | str  # crops (V, B, 3, S, S), ids (B,), failures; or a user's error


class _Decoder(Dataset):
    """What worker processes do. A user's error is returned, not raised: the pipe would hide its sentence."""

    def __init__(self, images: CropSource, size: int):
        self.images, self.size = images, size

    def __getitem__(self, task: _Task) -> _Decoded:
        try:
            crops, ids, failures = self.images.crops(task.ids, task.draws, self.size, task.shards)
        except UserError as error:
            return str(error)
        return torch.from_numpy(crops), torch.from_numpy(ids), failures


class StreamLoader:
    """Full batches of an epoch's order over shards, starting at the step that ``step()`` returns.

    The counterpart of ``BatchLoader`` for images from which crops are taken when they are read. The order does not
    depend on the number of processes, each of which reads its rows of the global batch. A batch's images are crops
    (V, B, 3, size, size).
    """

    def __init__(
        self,
        images: CropSource,
        batch_size: int,
        seed: int,
        draws: Callable[[int], CropDraws],
        size: int,
        step: Callable[[], int] = lambda: 0,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        workers: int = 0,
    ):
        """Prepare batches of a set.

        Args:
            images: the training images.
            batch_size: of all processes together; a multiple of ``world``.
            seed: the order is a function of it, of the epoch and of the shards.
            draws: gives the crops of this process's images at a step.
            size: side of the crops in pixels.
            step: returns the step at which an iteration starts.
            rank: this process.
            world: number of processes.
            device: where the batches are used.
            workers: processes that decode, or threads that crop what is decoded; 0: this one does.
        """
        if batch_size % world:
            raise ValueError(f"a global batch of {batch_size} cannot be split evenly over {world} processes")
        self.images, self.batch_size, self.seed, self.draws, self.size = images, batch_size, seed, draws, size
        self.step, self.device, self.workers = step, torch.device(device), workers
        self.rows = rank_slice(batch_size, rank, world)
        self._ahead = (AHEAD + 1) * batch_size  # images that workers may be ahead
        images.check_ahead(self._ahead)

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        step = self.step()
        epoch, offset = divmod(step, len(self))
        order = self.images.order(self.seed, epoch)
        chunks = self._chunks()
        tasks = (
            task
            for index in range(offset, len(self))
            for task in self._tasks(order, index, step - offset + index, chunks)
        )
        decoded = iter(self._decoded(tasks, len(chunks)))
        entered = -1
        try:
            for index in range(offset, len(self)):
                window = order.window_of(index * self.batch_size)
                if window != entered:
                    entered = window
                    self.images.fetch(order, window, self._ahead)  # type: ignore[arg-type]
                yield self._batch(step - offset + index, chunks, [next(decoded) for _ in chunks])
        finally:
            self.images.close()

    def _decoded(self, tasks: Iterator[_Task], chunks: int) -> Iterable[_Decoded]:
        """The results of tasks in their order, some batches ahead of who takes them."""
        decoder = _Decoder(self.images, self.size)
        if self.images.decoded:  # cropping releases the interpreter's lock, and nothing has to be sent
            return ahead(decoder.__getitem__, tasks, self.workers, max(AHEAD, self.workers))
        options: dict[str, Any] = {"generator": torch.Generator()}  # so that nothing is drawn from torch's own
        if self.workers:
            options |= {"num_workers": self.workers, "prefetch_factor": max(2, -(-AHEAD * chunks // self.workers))}
        return DataLoader(decoder, batch_size=None, sampler=tasks, **options)

    def _chunks(self) -> list[slice]:
        """Slices of this process's rows that one worker decodes: all of them where workers are threads."""
        count = self.rows.stop - self.rows.start
        size = count if self.images.decoded else min(CHUNK, -(-count // max(1, self.workers)))
        return [slice(first, min(first + size, count)) for first in range(0, count, size)]

    def _tasks(self, order: Order, index: int, step: int, chunks: Sequence[slice]) -> Iterator[_Task]:
        first, last = index * self.batch_size, (index + 1) * self.batch_size
        ids = order.ids(first, last)[self.rows]
        shards = order.shards(first, last)
        draws = self.draws(step)
        for chunk in chunks:
            yield _Task(ids[chunk], draws[chunk], shards)

    def _batch(self, step: int, chunks: Sequence[slice], parts: Sequence[_Decoded]) -> Batch:
        """A batch from what workers made of its chunks; in pinned memory where it is to be copied to a GPU."""
        failures = Failures()
        pinned = self.device.type == "cuda"
        decoded: list[tuple[Tensor, Tensor]] = []
        for part in parts:
            if isinstance(part, str):
                raise UserError(part)
            *tensors, failed = part
            decoded.append((tensors[0], tensors[1]))
            failures.images.update(failed.images)
            failures.shards.update(failed.shards)
        self.images.report(failures)
        if len(decoded) == 1 and not pinned:
            ((crops, ids),) = decoded
            return Batch(step, ids, crops)
        views, _, *shape = decoded[0][0].shape
        crops = torch.empty((views, chunks[-1].stop, *shape), dtype=torch.uint8, pin_memory=pinned)
        ids = torch.empty(chunks[-1].stop, dtype=torch.int64, pin_memory=pinned)
        for chunk, (some_crops, some_ids) in zip(chunks, decoded, strict=True):
            crops[:, chunk], ids[chunk] = some_crops, some_ids
        return Batch(step, ids, crops)

    def state_dict(self) -> dict[str, Any]:
        """Empty: the step determines where an iteration starts. Lightning requires it to resume within an epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
