"""Settings of the augmentations: presets of the literature, and the user's values over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psm.config.schema import ViewsConfig
from psm.config.values import check_values
from psm.utils.errors import UserError

LARGE_FROM = 64  # pixels of a view from which preset=auto takes the large preset
SMALL: dict[str, Any] = {
    "crop_scale": [0.2, 1.0],
    "crop_ratio": [3 / 4, 4 / 3],
    "flip": 0.5,
    "color_jitter": 0.8,
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.4,
    "hue": 0.1,
    "grayscale": 0.2,
    "blur": 0.0,
    "blur_sigma": [0.1, 2.0],
    "solarize": 0.0,
}
PRESETS = {"small": SMALL, "large": SMALL | {"blur": 0.5}, "simclr": SMALL | {"crop_scale": [0.08, 1.0]}}


@dataclass(frozen=True)
class ViewSettings:
    """``ViewsConfig`` with every value set: what ``Views`` samples from."""

    preset: str
    size: int
    crop_scale: Sequence[float]
    crop_ratio: Sequence[float]
    flip: float
    color_jitter: float
    brightness: float
    contrast: float
    saturation: float
    hue: float
    grayscale: float
    blur: float
    blur_sigma: Sequence[float]
    solarize: float


def resolve_views(config: ViewsConfig, image_size: int) -> ViewSettings:
    """The settings for images of this size: every None replaced by the preset's value, and all values checked."""
    check_values(config, "views.")
    size = image_size if config.size is None else config.size
    if size < 1:
        raise UserError(f"views.size={size} is too small: give 1 or more.")
    preset = config.preset
    if preset == "auto":
        preset = "small" if size < LARGE_FROM else "large"
    values = {name: default if getattr(config, name) is None else getattr(config, name)
              for name, default in PRESETS[preset].items()}  # fmt: skip
    return ViewSettings(preset=preset, size=size, **values)
