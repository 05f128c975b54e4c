"""Data sets: every source is loaded as uint8 images of one size, with labels for evaluation only."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psm.data.dataset import ImageDataset, ImageStore
    from psm.data.factory import load_dataset

__all__ = ["ImageDataset", "ImageStore", "load_dataset"]

_MODULES = {"load_dataset": "psm.data.factory", "ImageDataset": "psm.data.dataset", "ImageStore": "psm.data.dataset"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that the registry can be read without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
