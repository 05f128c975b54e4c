"""A map-style `torch.utils.data.Dataset` of images as an `ImageDataset`: each item is read once."""

import logging
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from psm.config.schema import ImagesConfig
from psm.data import splits
from psm.data.dataset import ImageDataset, ImageStore
from psm.data.decode import center_square, to_rgb
from psm.data.holdout import hold_out
from psm.utils import progress as bars
from psm.utils.errors import UserError

log = logging.getLogger("psm")

_SAMPLE = 50  # items whose size is looked at where images.size is not given


def from_torch(dataset: Dataset, config: ImagesConfig | None = None, progress: bool = True) -> ImageDataset:
    """Read every item of a dataset into one store of uint8 images.

    Args:
        dataset: its items are an image or a pair (image, label). An image is a PIL image, a tensor (C, H, W) or
            (H, W), or an array (H, W), (H, W, C) or (C, H, W), with 1, 3 or 4 channels, uint8 or float in [0, 1].
        config: ``size`` (by default the median shorter side, as for folders), ``max_size``, ``limit``,
            ``test_share`` and ``labels`` (none: ignore them) count.
        progress: show a progress bar.

    Returns:
        Square images of one size, center-cropped as folders are. Where every label is a whole number, a share of each
        class is held out for testing.
    """
    config = config or ImagesConfig()
    name = type(dataset).__name__
    indices = splits.limit_indices(None, _length(dataset, name), config.limit)
    reader = _Reader(dataset, name)
    size = config.size or config.side(reader.typical_size(indices))
    _check_memory(name, len(indices), size, config)
    pixels = np.empty((len(indices), 3, size, size), dtype=np.uint8)
    labels: list[Any] = []
    with bars.counting(f"reading {name}", len(indices), progress) as done:
        for row, index in enumerate(indices.tolist()):
            image, label = reader.read(index)
            pixels[row] = np.asarray(center_square(image, size)).transpose(2, 0, 1)
            labels.append(label)
            done(row + 1)
    class_ids = None if config.labels == "none" else _class_ids(labels, name)
    return hold_out(_dataset(name, pixels, class_ids, dataset, config), config.holdout)


def _length(dataset: Dataset, name: str) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UserError(f"data={name} can only be iterated: give a map-style dataset, with __len__ and __getitem__.")
    try:
        count = len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        raise UserError(f"data={name} has no length: give a map-style dataset, with __len__ and __getitem__.") from None
    if count == 0:
        raise UserError(f"data={name} is empty: give a dataset with images.")
    return count


def _check_memory(name: str, count: int, size: int, config: ImagesConfig) -> None:
    need = count * 3 * size * size / 1e9
    if need > config.memory:
        raise UserError(
            f"data={name} needs {need:,.1f} GB in memory at {size} pixels, more than images.memory={config.memory:g}: "
            "give a smaller images.size or images.limit, raise images.memory, or write the images to a folder."
        )


class _Reader:
    """Reads items as (RGB image, label) and refuses a mixture of kinds."""

    def __init__(self, dataset: Dataset, name: str):
        self.dataset, self.name = dataset, name
        self.kind: str | None = None

    def read(self, index: int) -> tuple[Image.Image, Any]:
        """The item's image, and its label (None if it has none)."""
        try:
            item = self.dataset[index]
        except Exception as error:
            raise UserError(f"data={self.name}: item {index} raises {type(error).__name__}: {error}") from None
        pair = isinstance(item, (tuple, list))
        if pair and len(item) != 2:
            raise UserError(
                f"data={self.name}: item {index} is a {type(item).__name__} of {len(item)}: items are an image, or a "
                "pair (image, label)."
            )
        image, label = item if pair else (item, None)
        self._check_kind(index, ("a pair with " if pair else "") + _kind(image))
        try:
            return rgb_image(image), label
        except ValueError as error:
            raise UserError(f"data={self.name}: item {index} is {error}.") from None

    def _check_kind(self, index: int, kind: str) -> None:
        self.kind = self.kind or kind
        if kind != self.kind:
            raise UserError(f"data={self.name}: item {index} is {kind}, where others are {self.kind}: give one kind.")

    def typical_size(self, indices: np.ndarray) -> int:
        """The median shorter side of some items, from 32 to 224, a multiple of 8."""
        places = np.unique(np.linspace(0, len(indices) - 1, min(_SAMPLE, len(indices))).round().astype(int))
        median = int(np.median([min(self.read(int(indices[place]))[0].size) for place in places]))
        return min(max(median, 32), 224) // 8 * 8


def _kind(image: Any) -> str:
    for kind, name in ((Image.Image, "a PIL image"), (torch.Tensor, "a tensor"), (np.ndarray, "an array")):
        if isinstance(image, kind):
            return name
    return f"a {type(image).__name__}"


def rgb_image(image: Any) -> Image.Image:
    """An RGB image, or ValueError with what the item is instead."""
    if isinstance(image, Image.Image):
        return to_rgb(image)
    if isinstance(image, torch.Tensor):
        values = image.detach().cpu().numpy()
        return _from_array(values.transpose(1, 2, 0) if values.ndim == 3 else values, image.shape)
    if isinstance(image, np.ndarray):
        channels_first = image.ndim == 3 and image.shape[2] not in (1, 3, 4) and image.shape[0] in (1, 3, 4)
        return _from_array(image.transpose(1, 2, 0) if channels_first else image, image.shape)
    raise ValueError(f"{_kind(image)}, no image: give tensors, arrays or PIL images")


def _from_array(values: np.ndarray, shape: tuple[int, ...]) -> Image.Image:
    """An image from (H, W) or (H, W, C); ``shape`` is the item's own, for the error."""
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (1, 3, 4)) or 0 in values.shape:
        raise ValueError(f"of shape {tuple(shape)}, no image of 1, 3 or 4 channels")
    if values.dtype.kind == "f":
        low, high = float(values.min()), float(values.max())
        if not (low >= 0 and high <= 1):  # also where it is NaN
            raise ValueError(
                f"of float values from {low:.3g} to {high:.3g}, where 0 to 1 is needed: leave out Normalize, psm "
                "normalizes by itself"
            )
        values = np.round(values * 255).astype(np.uint8)
    if values.dtype != np.uint8:
        raise ValueError(f"of type {values.dtype}: give uint8, or float from 0 to 1")
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    return to_rgb(Image.fromarray(np.ascontiguousarray(values)))


def _class_ids(labels: list[Any], name: str) -> np.ndarray | None:
    """Labels int64 (N,), or None where some item has no whole number of 0 or more."""
    if all(label is None for label in labels):
        return None
    try:
        ids = [_class_id(label) for label in labels]
    except ValueError as error:
        log.warning("data=%s is taken as unlabeled: %s.", name, error)
        return None
    return np.array(ids, dtype=np.int64)


def _class_id(label: Any) -> int:
    single = isinstance(label, (torch.Tensor, np.generic, np.ndarray)) and np.prod(label.shape) == 1
    value = label.item() if single else label
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"its labels are not whole numbers of 0 or more (one is {label!r})")
    return value


def _dataset(
    name: str, pixels: np.ndarray, labels: np.ndarray | None, dataset: Dataset, config: ImagesConfig
) -> ImageDataset:
    if labels is None or len(np.unique(labels)) < 2:
        return ImageDataset(name, ImageStore(pixels), None, ())
    held = splits.held_out_mask(labels, config.test_share)
    train, test = (ImageStore(pixels[part], torch.from_numpy(labels[part])) for part in (~held, held))
    return ImageDataset(name, train, test if held.any() else None, _class_names(dataset, int(labels.max()) + 1))


def _class_names(dataset: Dataset, count: int) -> tuple[str, ...]:
    """Names from ``dataset.classes`` (as torchvision has them) where they fit, else numbers."""
    names = getattr(dataset, "classes", None)
    if isinstance(names, (list, tuple)) and len(names) >= count:
        return tuple(str(name) for name in names)
    return tuple(str(number) for number in range(count))
