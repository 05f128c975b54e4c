"""Data given from Python instead of by a key."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from psm.config.schema import ImagesConfig
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.data.from_torch import from_torch
from psm.data.holdout import hold_out
from psm.training.distributed import shares_machine

# What may be given as data from Python, beside a name or a path.
DataLike = ImageDataset | ImageStore | torch.Tensor | np.ndarray | Dataset


class DataSettings(Protocol):
    """The settings that loading needs."""

    @property
    def data(self) -> str | list[str]: ...
    @property
    def images(self) -> ImagesConfig[None]: ...
    @property
    def devices(self) -> str: ...


def data_name(data: str | Path | Sequence[str | Path] | DataLike) -> str | list[str]:
    """What data given from Python is called in the configuration."""
    if isinstance(data, (str, Path)):
        return str(data)
    if isinstance(data, (list, tuple)):
        return [str(source) for source in data]
    if isinstance(data, ImageDataset):
        return data.name
    return type(data).__name__ if isinstance(data, Dataset) else "images"


def load_data(data: DataLike | None, config: DataSettings, progress: bool) -> ImageDataset:
    """The data given from Python, or what ``data=`` names."""
    if data is None:
        return load_dataset(config.data, config.images, progress, shares_machine(config.devices))
    if isinstance(data, Dataset):
        return from_torch(data, config.images, progress)
    if not isinstance(data, ImageDataset):
        data = ImageDataset("images", data if isinstance(data, ImageStore) else ImageStore(data), None, ())
    return hold_out(data, config.images.holdout)
