"""Images of one size in memory or memory-mapped, and the data set of a train and a test store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from psm.data.cache import DamagedImage
from psm.data.names import FileNames, SelectedNames, printable
from psm.utils.indices import evenly_spaced

if TYPE_CHECKING:
    from psm.data.streamed import StreamedImages
    from psm.data.whole_images import WholeImages


class Pixels(Protocol):
    """uint8 images (N, 3, H, W) read by index, in memory or on disk."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Streamed(Protocol):
    """Pixels that are read many at a time."""

    def take_batch(self, ids: np.ndarray, /) -> np.ndarray: ...

    def sample(self, most: int, /) -> np.ndarray: ...

    def select(self, rows: np.ndarray, /) -> Any: ...


class ImageStore:
    """uint8 images of one size. An image's id is its index. Labels, where known, serve evaluation only."""

    def __init__(
        self,
        pixels: Pixels | torch.Tensor,
        labels: torch.Tensor | None = None,
        names: Sequence[str] | None = None,
    ):
        """Wrap images.

        Args:
            pixels: uint8 (N, 3, H, W): an array, a tensor, a memory map or ``cache.CachedPixels``.
            labels: int64 (N,).
            names: paths of the images relative to the data folder; None where they come from no files.
        """
        if isinstance(pixels, torch.Tensor):
            pixels = pixels.cpu().numpy()
        if pixels.dtype != np.uint8 or len(pixels.shape) != 4 or pixels.shape[1] != 3:
            raise ValueError(f"images are uint8 (N, 3, H, W), not {pixels.dtype} {tuple(pixels.shape)}")
        for what, values in (("labels", labels), ("names", names)):
            if values is not None and len(values) != len(pixels):
                raise ValueError(f"{len(values)} {what} for {len(pixels)} images")
        self.labels = labels
        self.names = names
        self._pixels = pixels
        self._rows: torch.Tensor | None = None  # of the pixels, where this is a selection of them

    def __len__(self) -> int:
        return len(self._pixels) if self._rows is None else len(self._rows)

    def select(self, indices: torch.Tensor) -> "ImageStore":
        """The images at these indices (N,) as a store of their own, which shares the pixels with this one."""
        indices = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        if isinstance(self._pixels, Streamed):
            return self._select_streamed(self._pixels, indices)
        chosen = ImageStore(self._pixels)
        chosen.labels = None if self.labels is None else self.labels[indices]
        chosen.names = None if self.names is None else SelectedNames(self.names, indices.numpy())
        chosen._rows = indices if self._rows is None else self._rows[indices]
        return chosen

    def _select_streamed(self, images: "Streamed", indices: torch.Tensor) -> "ImageStore":
        """Some of the images that are read many at a time; their order is that of the shards."""
        if not bool((indices[1:] > indices[:-1]).all()):
            raise ValueError("images of shards are selected in ascending order")
        labels = None if self.labels is None else self.labels[indices]
        names = None if self.names is None else SelectedNames(self.names, indices.numpy())
        return ImageStore(images.select(indices.numpy()), labels, names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(3, H, W) of every image."""
        channels, height, width = self._pixels.shape[1:]
        return channels, height, width

    @property
    def streamed(self) -> "StreamedImages | WholeImages | None":
        """The images where views are cropped from whole ones as they are read: from shards, or from the cache."""
        return self._pixels if isinstance(self._pixels, Streamed) else None  # type: ignore[return-value]

    def sample(self, most: int) -> torch.Tensor:
        """At most so many ids, evenly spaced; of shards, from a few of them."""
        if self.streamed is not None:
            return torch.from_numpy(self.streamed.sample(most))
        return evenly_spaced(len(self), most)

    @property
    def mapped(self) -> bool:
        """True if the images stay on disk and are read when needed."""
        return not isinstance(self._pixels, np.ndarray) or isinstance(self._pixels, np.memmap)

    def name(self, index: int) -> str:
        """The image's path below the data folder, as printable text, or ``image 12`` where it has none."""
        return f"image {index}" if self.names is None else printable(self.names[index])

    @property
    def names_checksum(self) -> int | None:
        """A checksum of the files' names in their order; None where the images come from no files of their own."""
        return self.names.checksum if isinstance(self.names, FileNames) else None

    def take(self, indices: torch.Tensor) -> torch.Tensor:
        """A copy of the images at these indices, in their order, uint8 (B, 3, H, W)."""
        indices = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        if self._rows is not None:
            indices = self._rows[indices]
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self._pixels):
            raise IndexError(f"image ids run from 0 to {len(self._pixels) - 1}")
        if isinstance(self._pixels, np.ndarray) and not self.mapped:
            # By NumPy: in a reader's thread torch would start a second team of OpenMP threads, and with more threads
            # than cores those of the network sleep between its operations instead of waiting for the next.
            return torch.from_numpy(self._pixels.take(indices.numpy(), axis=0))
        if isinstance(self._pixels, Streamed):
            return torch.from_numpy(self._pixels.take_batch(indices.numpy()))
        batch = torch.empty((len(indices), *self.shape), dtype=torch.uint8)
        rows = batch.numpy()
        # In the order of the file, so that the disk reads forwards.
        ordered, order = indices.sort()
        for row, index in zip(order.tolist(), ordered.tolist(), strict=True):
            try:
                rows[row] = self._pixels[index]
            except DamagedImage as error:
                if self._rows is not None:
                    raise
                raise DamagedImage(error.file, self.name(index)) from None
        return batch

    def take_readable(self, indices: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, str]]]:
        """As ``take``, without images of shards that cannot be read, which ``take`` replaces by others.

        Returns:
            The images (n, 3, H, W), and of the others the place among the indices and the reason.
        """
        exact = getattr(self._pixels, "take_exact", None)
        if exact is None:
            return self.take(indices), []
        indices = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        pixels, failures = exact((indices if self._rows is None else self._rows[indices]).numpy())
        return torch.from_numpy(pixels), failures


@dataclass(frozen=True)
class ImageDataset:
    """A loaded data set: training images, test images, class names and the files that could not be read."""

    name: str
    train: ImageStore
    test: ImageStore | None
    classes: tuple[str, ...]
    unreadable: tuple[tuple[str, str], ...] = ()  # (file, reason)

    @property
    def size(self) -> int:
        """Side of the images in pixels."""
        return self.train.shape[-1]

    @property
    def labeled(self) -> bool:
        """True if the training images have labels."""
        return self.train.labels is not None
