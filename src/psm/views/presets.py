"""Settings of the augmentations: presets of the literature, and the user's values over them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psm.config.schema import ViewsConfig
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
PRESETS = {"small": SMALL, "large": SMALL | {"blur": 0.5}}
PROBABILITIES = ("flip", "color_jitter", "grayscale", "blur", "solarize")
STRENGTHS = ("brightness", "contrast", "saturation")


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
    if config.preset not in (*PRESETS, "auto"):
        raise UserError(f"views.preset is {config.preset!r}; use small, large or auto.")
    size = image_size if config.size is None else config.size
    if not isinstance(size, int) or size < 1:
        raise UserError(f"views.size is {size!r}; it must be a whole number of pixels from 1 up.")
    preset = config.preset
    if preset == "auto":
        preset = "small" if size < LARGE_FROM else "large"
    values = {name: default if getattr(config, name) is None else getattr(config, name)
              for name, default in PRESETS[preset].items()}  # fmt: skip
    _check(values)
    return ViewSettings(preset=preset, size=size, **values)


def _check(values: dict[str, Any]) -> None:
    """Refuse values that no view can be sampled with."""
    for name in PROBABILITIES:
        _check_number(values, name, 1, "a probability from 0 to 1")
    for name in STRENGTHS:
        _check_number(values, name, math.inf, "a number from 0 up")
    _check_number(values, "hue", 0.5, "a fraction of a turn from 0 to 0.5")
    _check_range(values, "crop_scale", 1, "the smallest and the largest fraction of the area, above 0 and at most 1")
    _check_range(values, "crop_ratio", math.inf, "the smallest and the largest width over height, above 0")
    _check_range(values, "blur_sigma", math.inf, "the smallest and the largest blur in pixels, above 0")


def _check_number(values: dict[str, Any], name: str, largest: float, allowed: str) -> None:
    """Refuse what is not a finite number from 0 to ``largest``."""
    value = values[name]
    if not _is_number(value) or not 0 <= value <= largest:
        raise UserError(f"views.{name} is {value!r}; it must be {allowed}.")


def _check_range(values: dict[str, Any], name: str, largest: float, allowed: str) -> None:
    """Refuse what is not two finite numbers in ascending order, above 0 and at most ``largest``."""
    value = values[name]
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2 or not all(map(_is_number, pair)) or not 0 < pair[0] <= pair[1] <= largest:
        raise UserError(f"views.{name} is {value!r}; it must be two numbers, {allowed}.")


def _is_number(value: Any) -> bool:
    """True for a finite int or float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
