"""The one store of images that everything else reads, in memory or memory-mapped."""

from dataclasses import dataclass

import numpy as np
import torch


class ImageStore:
    """uint8 images of one size. An image's id is its index. Labels, where known, serve evaluation only."""

    def __init__(self, pixels: np.ndarray | torch.Tensor, labels: torch.Tensor | None = None):
        """``pixels`` is uint8 (N, 3, H, W), an array, a tensor or a memory map; ``labels`` is int64 (N,)."""
        if isinstance(pixels, torch.Tensor):
            pixels = pixels.cpu().numpy()
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1] != 3:
            raise ValueError(f"images are uint8 (N, 3, H, W), not {pixels.dtype} {tuple(pixels.shape)}")
        if labels is not None and len(labels) != len(pixels):
            raise ValueError(f"{len(labels)} labels for {len(pixels)} images")
        self.labels = labels
        self._pixels = pixels

    def __len__(self) -> int:
        return len(self._pixels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(3, H, W) of every image."""
        return self._pixels.shape[1:]

    @property
    def mapped(self) -> bool:
        """Whether the images stay on disk and are read as they are needed."""
        return isinstance(self._pixels, np.memmap)

    def take(self, indices: torch.Tensor) -> torch.Tensor:
        """A copy of some images in the order asked for, uint8 (B, 3, H, W)."""
        indices = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        if not self.mapped:
            return torch.from_numpy(self._pixels).index_select(0, indices)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"image ids run from 0 to {len(self) - 1}")
        batch = torch.empty((len(indices), *self.shape), dtype=torch.uint8)
        rows = batch.numpy()
        # In the order of the file, so that the disk reads forwards.
        for place in torch.argsort(indices).tolist():
            rows[place] = self._pixels[int(indices[place])]
        return batch


@dataclass(frozen=True)
class ImageDataset:
    """A loaded set: what trains, what tests, and what could not be read."""

    name: str
    train: ImageStore
    test: ImageStore | None
    classes: tuple[str, ...]
    unreadable: tuple[tuple[str, str], ...] = ()

    @property
    def size(self) -> int:
        """Side of the images in pixels."""
        return self.train.shape[-1]

    @property
    def labeled(self) -> bool:
        return self.train.labels is not None
