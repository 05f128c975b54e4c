"""Every setting as a typed dataclass: its name, type, default and meaning in one place. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Any


def key(default: Any, meaning: str) -> Any:
    """A configuration key with its default and its line of meaning (shown by ``--help``)."""
    if isinstance(default, (list, dict)) or (callable(default) and isinstance(default, type)):
        factory = default if callable(default) else lambda: type(default)(default)
        return field(default_factory=factory, metadata={"meaning": meaning})
    return field(default=default, metadata={"meaning": meaning})


@dataclass
class PicturesConfig:
    """Where pictures come from and how they are held. Labels serve evaluation and diagnostics only."""

    root: str = key("data", "folder that holds the published sets (cifar10, cifar100, tiny-imagenet) or receives them")
    download: bool = key(True, "download a published set that is not there")
    size: int | None = key(
        None, "side in pixels at which pictures are held; none: the set's own, for folders the usual one"
    )
    limit: int | None = key(None, "use only so many training pictures, drawn evenly over classes where labels exist")
    split: str = key("paper", "tiny-imagenet: paper (90 % / 10 % of the labelled pictures) or official (train / val)")
    labels: str = key("auto", "folders: auto, subfolder (the first level below the split names the class) or none")
    test_share: float = key(0.1, "labelled folders without a test, val or valid folder: share of each class held out")
    max_unreadable: float = key(0.1, "refuse a folder when more than this share of its files cannot be read")
    memory: float = key(4.0, "hold sets up to so many GB in memory; larger ones go through a memory-mapped cache")
    cache: str | None = key(None, "folder of that cache; none: psm below the user's cache folder")


@dataclass
class ViewsConfig:
    """How two views of each picture are drawn, each picture with its own draws. None: as the preset says."""

    preset: str = key("auto", "small (no blur), large (with blur) or auto: small below 64 pixels")
    size: int | None = key(None, "side of a view in pixels; none: that of the pictures held")
    crop: list[float] | None = key(None, "random resized crop: smallest and largest share of the area")
    ratio: list[float] | None = key(None, "random resized crop: smallest and largest aspect ratio")
    flip: float | None = key(None, "probability of a horizontal flip")
    jitter: float | None = key(None, "probability of colour jitter")
    brightness: float | None = key(None, "jitter: factor drawn from 1 - this to 1 + this")
    contrast: float | None = key(None, "jitter: factor drawn from 1 - this to 1 + this")
    saturation: float | None = key(None, "jitter: factor drawn from 1 - this to 1 + this")
    hue: float | None = key(None, "jitter: turn drawn from - this to this, in turns of the colour circle (at most 0.5)")
    grayscale: float | None = key(None, "probability of dropping colour")
    blur: float | None = key(None, "probability of a Gaussian blur")
    sigma: list[float] | None = key(
        None, "blur: smallest and largest standard deviation, in pixels of a 224-pixel view"
    )
    solarise: float | None = key(None, "probability of inverting the pixels brighter than the middle")
