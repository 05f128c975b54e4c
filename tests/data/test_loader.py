"""Batches: their order follows from seed and step, and they are taken where the images are."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from psm.data import ImageStore
from psm.data.loader import BatchLoader
from psm.utils import devices


def images(count: Any = 20) -> Any:
    return ImageStore(
        torch.randint(0, 256, (count, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    )


def test_batches_cover_the_epoch_and_follow_the_step() -> None:
    images = ImageStore(torch.arange(11, dtype=torch.uint8).view(11, 1, 1, 1).expand(11, 3, 2, 2).clone())
    batches = BatchLoader(images, 3, seed=5)
    epoch = list(batches)
    ids = torch.cat([b.ids for b in epoch])
    assert len(epoch) == len(batches) == 3
    assert len(ids.unique()) == 9
    assert all(torch.equal(b.images[:, 0, 0, 0].long(), b.ids) for b in epoch)
    later = list(BatchLoader(images, 3, seed=5, step=lambda: 1))
    assert [b.step for b in later] == [1, 2]
    assert torch.equal(later[0].ids, epoch[1].ids)
    following = list(BatchLoader(images, 3, seed=5, step=lambda: 3))
    assert following[0].step == 3
    assert not torch.equal(torch.cat([b.ids for b in following]), ids)


def test_rank_slices_of_a_batch_join_to_the_batch() -> None:
    images = ImageStore(torch.randint(0, 255, (20, 3, 2, 2), dtype=torch.uint8))
    whole = list(BatchLoader(images, 6, seed=5))
    parts = [list(BatchLoader(images, 6, seed=5, rank=rank, world=2)) for rank in range(2)]
    for step, batch in enumerate(whole):
        assert torch.equal(batch.ids, torch.cat([part[step].ids for part in parts]))
    with pytest.raises(ValueError, match="evenly"):
        BatchLoader(images, 5, seed=0, world=2)


@pytest.mark.parametrize("free", [20 * 48 * 2, 20 * 48 * 2 - 1])
def test_images_live_on_the_device_when_they_fit_in_half_of_it(free: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_bytes", lambda device: free)
    kept = BatchLoader(images(), 8, seed=3, device="cpu")
    assert (kept.on_device is not None) == (free == 20 * 48 * 2)
    monkeypatch.undo()
    plain = BatchLoader(images(), 8, seed=3)
    assert plain.on_device is None
    for one, other in zip(kept, plain, strict=True):
        assert one.step == other.step
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.images, other.images)


class OnDisk:
    """Pixels that are read by index, and notes who reads them."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels, self.shape, self.dtype = pixels, pixels.shape, pixels.dtype
        self.readers: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> np.ndarray:
        self.readers.append(threading.current_thread())
        return self.pixels[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_stay_on_disk_are_read_ahead_by_threads(workers: int) -> None:
    pixels = OnDisk(np.asarray(images(40).take(torch.arange(40))))
    mapped = BatchLoader(ImageStore(pixels), 8, seed=3, step=lambda: 1, workers=workers)
    held = BatchLoader(ImageStore(pixels.pixels), 8, seed=3, step=lambda: 1)
    for one, other in zip(mapped, held, strict=True):
        assert one.step == other.step
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.images, other.images)
    assert (threading.main_thread() in pixels.readers) == (workers == 0)
