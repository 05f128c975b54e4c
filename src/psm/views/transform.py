"""Views of a whole batch at once, on the device it is on, each image with its own draws (SimCLR / MoCo v2 recipe).

What makes it fast is that nearly every step is linear: the crop, its resize and the flip are two products with
resampling matrices, the five color changes are one 3x3 matrix and one offset, the blur is two products with a banded
matrix. Crop and colors are ``psm.ops.crop_color``, on some CPUs one pass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from psm.config.schema import ViewsConfig
from psm.ops import CHUNK_PIXELS, adjust_color, crop_color, normalize_channels_
from psm.utils.devices import to_device, without_autocast
from psm.utils.errors import UserError

TRIES = 10  # of a crop, before the central one is taken
LUMA = (0.299, 0.587, 0.114)
GRAY = (LUMA, LUMA, LUMA)  # the matrix that drops color
TWIST = ((0.0, -1.0, 1.0), (1.0, 0.0, -1.0), (-1.0, 1.0, 0.0))  # cross product with (1, 1, 1), the gray axis
IDENTITY = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))

SMALL_BELOW = 64  # pixels of a view: the preset that auto takes
SMALL = {
    "crop": [0.2, 1.0],
    "ratio": [3 / 4, 4 / 3],
    "flip": 0.5,
    "jitter": 0.8,
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.4,
    "hue": 0.1,
    "grayscale": 0.2,
    "blur": 0.0,
    "sigma": [0.1, 2.0],
    "solarize": 0.0,
}
PRESETS = {"small": SMALL, "large": SMALL | {"blur": 0.5}}


@dataclass(frozen=True)
class AugmentParams:
    """What was drawn for each view of each image, (views, B) each; a step that was not drawn has its neutral value.

    ``draws[first:last]`` is the share of some of the images, so that processes that share a batch share its draws.
    """

    area: Tensor  # (views, B, tries): share of the image's area that a tried crop covers
    ratio: Tensor  # (views, B, tries): its width over its height
    place: Tensor  # (views, B, 2): where it lies, from 0 (top, left) to 1 (bottom, right)
    flip: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    turn: Tensor  # hue, in turns of the color circle
    grayscale: Tensor
    sigma: Tensor  # of the blur, in pixels of the view; 0: none
    solarize: Tensor

    def __len__(self) -> int:
        return self.flip.shape[-1]

    def __getitem__(self, images: slice | Tensor) -> "AugmentParams":
        return self._each(lambda numbers: numbers[:, images])

    def views(self) -> list["AugmentParams"]:
        """The draws of each view alone, (B,) each."""
        return [self._each(lambda numbers, view=view: numbers[view]) for view in range(len(self.flip))]

    def _each(self, function: Callable[[Tensor], Tensor]) -> "AugmentParams":
        return AugmentParams(*(function(getattr(self, field.name)) for field in fields(self)))


def in_single_precision(function: Callable) -> Callable:
    """Runs a function with float32 as the default type: training in another precision changes it around a step."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return wrapped


class Views:
    """Two (or n) views of a batch of uint8 images."""

    def __init__(self, config: ViewsConfig, image_size: int, mean: Sequence[float], std: Sequence[float]):
        self.config = resolved(config, image_size)
        self.size: int = self.config.size
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        usable = all(map(math.isfinite, self.mean)) and all(0 < deviation < math.inf for deviation in self.std)
        if len(self.mean) != 3 or len(self.std) != 3 or not usable:
            raise UserError(
                f"the channel mean {self.mean} and standard deviation {self.std} cannot normalize images; "
                "give three numbers each, the deviations above 0."
            )

    @in_single_precision
    def sample_params(
        self,
        count: int,
        generator: torch.Generator,
        views: int = 2,
        share: slice = slice(None),
        device: torch.device | str = "cpu",
    ) -> AugmentParams:
        """Every random number of ``views`` views of ``count`` images, drawn on the CPU: the same for every device.

        ``share`` takes those of some of the images, so that processes that share a batch share its draws. They go to
        the ``device`` in one copy that waits for nothing. As many numbers are drawn whatever the configuration, so
        that one setting changed leaves the other draws alone.
        """
        config = self.config
        uniform = torch.rand(views, count, 2 * TRIES + 12, generator=generator)[:, share]
        uniform = to_device(uniform, torch.device(device))
        area, log_ratio, place, coins, amounts = uniform.split([TRIES, TRIES, 2, 5, 5], dim=-1)
        chances = (config.flip, config.jitter, config.grayscale, config.blur, config.solarize)
        flip, jitter, grayscale, blur, solarize = (coins < constant(chances, uniform.device)).unbind(-1)
        brightness, contrast, saturation, turn, sigma = amounts.unbind(-1)

        def factor(amount: Tensor, strength: float) -> Tensor:
            return torch.where(jitter, between(amount, max(0.0, 1 - strength), 1 + strength), 1.0)

        return AugmentParams(
            area=between(area, *config.crop),
            ratio=between(log_ratio, *map(math.log, config.ratio)).exp(),
            place=place,
            flip=flip,
            brightness=factor(brightness, config.brightness),
            contrast=factor(contrast, config.contrast),
            saturation=factor(saturation, config.saturation),
            turn=torch.where(jitter, between(turn, -config.hue, config.hue), 0.0),
            grayscale=grayscale,
            sigma=torch.where(blur, between(sigma, *config.sigma), 0.0),
            solarize=solarize,
        )

    @in_single_precision
    @torch.no_grad()
    def apply(self, images: Tensor, draws: AugmentParams, channels_last: bool = False) -> Tensor:
        """The views (views, B, 3, size, size) of uint8 images (B, 3, H, W), normalized, in float32.

        With ``channels_last`` the views, flattened to (views * B, 3, size, size), have channels-last strides.
        """
        check_images(images)
        if len(draws) != len(images):
            raise UserError(f"{len(images)} images cannot take the draws of {len(draws)}; draw for as many as given.")
        shape = (len(draws.flip), len(images), 3, self.size, self.size)
        if channels_last:
            views = images.new_empty((*shape[:2], *shape[3:], 3), dtype=torch.float32).movedim(-1, 2)
        else:
            views = images.new_empty(shape, dtype=torch.float32)
        with without_autocast(images.device):
            if not self._has_more:
                self._crop_color(images, draws, views, self.mean, self.std)
                return views
            step = max(1, CHUNK_PIXELS // self.size**2) if images.device.type == "cpu" else max(1, len(images))
            for first in range(0, len(images), step):
                part = slice(first, first + step)
                colored = views.new_empty((len(views), len(images[part]), *shape[2:]))
                self._crop_color(images[part], draws[part], colored)
                for view, begun, of_view in zip(views[:, part], colored, draws[part].views(), strict=True):
                    view.copy_(self._normalized(self._finished(begun, of_view)))
        return views

    def _crop_color(
        self,
        images: Tensor,
        draws: AugmentParams,
        out: Tensor,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
    ) -> None:
        """Crop, color and, with mean and std, normalize images into views ``out`` (views, B, 3, size, size)."""
        boxes = crop_boxes(draws, *images.shape[2:], self.config.ratio)
        fixed = [None if values is None else constant(values, images.device) for values in (LUMA, mean, std)]
        crop_color(images, boxes, draws.flip, *coloring(draws, images.device), *fixed, out)

    @in_single_precision
    @torch.no_grad()
    def plain(self, images: Tensor) -> Tensor:
        """The images as they are, (B, 3, size, size): resized where their size differs, and normalized."""
        check_images(images)
        with without_autocast(images.device):
            pixels = images.float().div_(255)
            if pixels.shape[2:] != (self.size, self.size):
                pixels = functional.interpolate(pixels, (self.size, self.size), mode="bilinear", antialias=True)
            return self._normalized(pixels)

    @property
    def _has_more(self) -> bool:
        """Whether anything comes after crop and colors."""
        return self.config.blur > 0 or self.config.solarize > 0

    def _finished(self, view: Tensor, draws: AugmentParams) -> Tensor:
        """What comes after them."""
        config = self.config
        if config.blur > 0:
            view = blurred(view, draws.sigma, radius=min(math.ceil(3 * config.sigma[1]), self.size))
        if config.solarize > 0:
            view = solarized(view, draws.solarize)
        return view

    def _normalized(self, pixels: Tensor) -> Tensor:
        """Zero mean and unit deviation over the data set, in place."""
        return normalize_channels_(pixels, *constant((self.mean, self.std), pixels.device))


def crop_boxes(draws: AugmentParams, height: int, width: int, ratio: Sequence[float]) -> tuple[Tensor, ...]:
    """Top, left, height and width of each crop, (B,) each, in whole pixels.

    The first tried box that fits in the image counts; where none fits, the largest central one of an allowed ratio.
    """
    area = draws.area * (height * width)
    tried_heights = (area / draws.ratio).sqrt().round()
    tried_widths = (area * draws.ratio).sqrt().round()
    fits = (tried_heights >= 1) & (tried_heights <= height) & (tried_widths >= 1) & (tried_widths <= width)
    # Of equal values argmax may return any, so earlier tries are made to count more.
    first = (fits * torch.arange(TRIES, 0, -1, device=fits.device)).argmax(-1, keepdim=True)
    found = fits.any(-1)
    central_height = min(height, max(1, round(width / ratio[0])))
    central_width = min(width, max(1, round(height * ratio[1])))
    heights = torch.where(found, tried_heights.gather(-1, first).squeeze(-1), central_height)
    widths = torch.where(found, tried_widths.gather(-1, first).squeeze(-1), central_width)

    def start(place: Tensor, room: Tensor, center: int) -> Tensor:
        # A number just below 1 may round up to one pixel more than there is room for, hence the minimum.
        return torch.where(found, torch.minimum((place * (room + 1)).floor(), room), center)

    tops = start(draws.place[..., 0], height - heights, round((height - central_height) / 2))
    lefts = start(draws.place[..., 1], width - widths, round((width - central_width) / 2))
    return tops, lefts, heights, widths


def recolored(views: Tensor, draws: AugmentParams) -> Tensor:
    """Brightness, contrast, saturation, hue and grayscale of (B, 3, H, W), all at once, held within [0, 1].

    All five are affine in color, so an image needs one 3x3 matrix and one gray offset. Values are cut off once, at
    the end; with no cut in between, brightness, contrast and saturation give the same in any order, so no order is
    drawn. Contrast pivots on the mean luma. Hue turns colors about the gray axis (the rotation of StyleGAN2-ADA):
    linear, not the shift in HSV.
    """
    return adjust_color(views, *coloring(draws, views.device), constant(LUMA, views.device))


def coloring(draws: AugmentParams, device: torch.device) -> tuple[Tensor, Tensor]:
    """The matrix (..., 3, 3) of each view, and what its mean luma counts for in the offset, (...)."""
    gray, twist, identity = constant((GRAY, TWIST, IDENTITY), device)
    contrast, saturation = draws.contrast, draws.saturation
    angle = _matrix(draws.turn) * (2 * math.pi)
    turned = angle.cos() * identity + (1 - angle.cos()) / 3 + angle.sin() / math.sqrt(3) * twist
    saturated = _matrix(saturation) * identity + _matrix(1 - saturation) * gray
    matrix = _matrix(draws.brightness * contrast) * (turned @ saturated)
    matrix = torch.where(_matrix(draws.grayscale), gray @ matrix, matrix)
    return matrix, draws.brightness * (1 - contrast)


def blurred(views: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """A Gaussian blur of (B, 3, S, S), cut off at ``radius`` pixels; where sigma is 0 the view stays as it is.

    Beyond an edge the image is taken as mirrored, edge pixel included, which keeps the mean.
    """
    distance = torch.arange(-radius, radius + 1, device=views.device)
    # Small enough for the neighbors' weight to vanish, large enough not to divide by zero.
    taps = (distance / sigma.clamp(min=1e-3)[:, None]).square().mul(-0.5).exp()
    taps = taps / taps.sum(-1, keepdim=True)
    size = views.shape[-1]
    band = (taps @ mirrored_shifts(radius, size, views.device).flatten(1)).unflatten(1, (size, size))
    # Channels and rows as one dimension, as in the crop; the band is symmetric.
    blurred_rows = views.flatten(1, 2) @ band
    return band.unsqueeze(1) @ blurred_rows.view_as(views)


@cache
def mirrored_shifts(radius: int, size: int, device: torch.device) -> Tensor:
    """For each shift from ``-radius`` to ``radius`` the 0/1 matrix (size, size) that reads pixel i + shift for i."""
    source = torch.arange(size) + torch.arange(-radius, radius + 1)[:, None]
    source = torch.where(source < 0, -1 - source, source)
    source = torch.where(source >= size, 2 * size - 1 - source, source)
    return functional.one_hot(source, size).float().to(device)


def solarized(views: Tensor, drawn: Tensor) -> Tensor:
    """Values from the middle up inverted, in those of the views (B, 3, H, W) that drew it."""
    return torch.where(_matrix(drawn).unsqueeze(-1) & (views >= 0.5), 1 - views, views)


def channel_statistics(images: Any, limit: int = 10_000) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, on a scale of 0 to 1, over at most ``limit`` evenly spaced images.

    A deviation is at least one step of uint8, so that images all of one color can be normalized too.
    """
    if len(images) == 0:
        raise UserError("there is no image to take the channel statistics of; give a source with at least one.")
    indices = torch.linspace(0, len(images) - 1, min(len(images), limit), dtype=torch.float64).round().long()
    total, squares, count = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0
    for chunk in indices.split(100):
        values = images.take(chunk).to("cpu", torch.float64).div_(255)
        total += values.sum((0, 2, 3))
        squares += values.square().sum((0, 2, 3))
        count += values[:, 0].numel()
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=1 / 255**2).sqrt()
    return tuple(mean.tolist()), tuple(std.tolist())


def resolved(config: ViewsConfig, image_size: int) -> ViewsConfig:
    """The configuration with every None replaced by what the preset says, checked."""
    if config.preset not in (*PRESETS, "auto"):
        raise UserError(f"views.preset is {config.preset!r}; use small, large or auto.")
    size = image_size if config.size is None else config.size
    if not isinstance(size, int) or size < 1:
        raise UserError(f"views.size is {size!r}; it must be a whole number of pixels from 1 up.")
    preset = config.preset
    if preset == "auto":
        preset = "small" if size < SMALL_BELOW else "large"
    unset = {name: value for name, value in PRESETS[preset].items() if getattr(config, name) is None}
    config = replace(config, preset=preset, size=size, **unset)

    for name in ("flip", "jitter", "grayscale", "blur", "solarize"):
        check_number(config, name, 0, 1, "a probability from 0 to 1")
    for name in ("brightness", "contrast", "saturation"):
        check_number(config, name, 0, math.inf, "a number from 0 up")
    check_number(config, "hue", 0, 0.5, "a share of a turn from 0 to 0.5")
    check_range(config, "crop", 1, "the smallest and the largest share of the area, above 0 and at most 1")
    check_range(config, "ratio", math.inf, "the smallest and the largest width over height, above 0")
    check_range(config, "sigma", math.inf, "the smallest and the largest blur in pixels, above 0")
    return config


def check_number(config: ViewsConfig, name: str, least: float, most: float, allowed: str) -> None:
    """Refuse what is not a finite number between the bounds."""
    value = getattr(config, name)
    if not is_number(value) or not least <= value <= most:
        raise UserError(f"views.{name} is {value!r}; it must be {allowed}.")


def check_range(config: ViewsConfig, name: str, most: float, allowed: str) -> None:
    """Refuse what is not two finite numbers in ascending order, above 0 and at most ``most``."""
    value = getattr(config, name)
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2 or not all(map(is_number, pair)) or not 0 < pair[0] <= pair[1] <= most:
        raise UserError(f"views.{name} is {value!r}; it must be two numbers, {allowed}.")


def check_images(images: Tensor) -> None:
    """Refuse what is not a batch of uint8 color images."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        given = f"{str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"
        raise UserError(f"the images given are {given}; views are made of uint8 of shape (B, 3, H, W).")


def is_number(value: Any) -> bool:
    """Whether a configured value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def between(uniform: Tensor, low: float, high: float) -> Tensor:
    """Numbers drawn from [0, 1) moved to [low, high)."""
    return low + (high - low) * uniform


@cache
def constant(values: tuple, device: torch.device) -> Tensor:
    """Fixed numbers on a device, copied there once: a copy in every step would make the device wait."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _matrix(numbers: Tensor) -> Tensor:
    """Numbers (B,) shaped to scale matrices (B, 3, 3)."""
    return numbers[..., None, None]
