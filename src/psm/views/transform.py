"""Random views of a batch of images, on the batch's device (SimCLR / MoCo v2 augmentations).

The parameters of a whole batch are sampled first (``Views.sample_params``) and applied after (``Views.apply``), so that
processes that split a batch apply the same parameters. The augmentations are the pure functions of ``functional``; crop
and color are ``psm.ops.crop_color``, on some CPUs one pass.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from psm.config.schema import ViewsConfig
from psm.data.crops import CropDraws
from psm.ops import CHUNK_PIXELS, adjust_color, crop_color, normalize_channels_, resized_crop
from psm.utils.devices import to_device, without_autocast
from psm.utils.errors import UserError
from psm.views.functional import (
    LUMA,
    color_matrix,
    constant,
    crop_boxes,
    gaussian_blur,
    solarize,
)
from psm.views.presets import resolve_views

CROP_PROPOSALS = 10  # boxes sampled for a crop, before the central one is taken
NUMBERS_PER_VIEW = 2 * CROP_PROPOSALS + 12


@dataclass(frozen=True)
class AugmentParams:
    """Sampled parameters of each view of each image, (views, B) each; what is not applied has its neutral value.

    ``params[first:last]`` are those of some of the images.
    """

    crop_scale: Tensor  # (views, B, proposals): fraction of the image's area
    crop_ratio: Tensor  # (views, B, proposals): width over height
    crop_position: Tensor  # (views, B, 2): vertical and horizontal, from 0 (top, left) to 1 (bottom, right)
    flip: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor  # angle, in turns of the color circle
    grayscale: Tensor
    blur_sigma: Tensor  # in pixels of the view; 0: no blur
    solarize: Tensor

    def __len__(self) -> int:
        return self.flip.shape[-1]

    def __getitem__(self, images: slice | Tensor) -> "AugmentParams":
        return self._map(lambda values: values[:, images])

    def flatten(self) -> "AugmentParams":
        """The parameters of all views as those of one view of (views * B) images."""
        return self._map(lambda values: values.flatten(0, 1).unsqueeze(0))

    def without_crop(self) -> "AugmentParams":
        """The same but for the crop, which is the whole image."""
        whole = torch.ones_like(self.crop_scale)
        return replace(self, crop_scale=whole, crop_ratio=whole, crop_position=torch.zeros_like(self.crop_position))

    def views(self) -> list["AugmentParams"]:
        """The parameters of each view, (B,) each."""
        return [self._map(lambda values, view=view: values[view]) for view in range(len(self.flip))]  # type: ignore[misc]

    def weak(self) -> "AugmentParams":
        """The same crops and flips without color changes, blur and solarization."""
        one, zero = torch.ones_like(self.brightness), torch.zeros_like(self.hue)
        off = torch.zeros_like(self.grayscale)
        return replace(
            self, brightness=one, contrast=one, saturation=one, hue=zero, grayscale=off, blur_sigma=zero, solarize=off
        )

    def boxes(self, height: int, width: int, ratio_range: Sequence[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, height and width of the crops of images of this size."""
        return crop_boxes(self.crop_scale, self.crop_ratio, self.crop_position, height, width, ratio_range)

    def crop_draws(self, ratio_range: Sequence[float]) -> CropDraws:
        """The crops alone, for whoever decodes the images (on the CPU)."""
        columns = (self.crop_scale.numpy(), self.crop_ratio.numpy(), self.crop_position.numpy())
        return CropDraws(*columns, (ratio_range[0], ratio_range[1]))

    def colors(self) -> tuple[Tensor, Tensor]:
        """The affine maps of colors, as ``color_matrix`` gives them."""
        return color_matrix(self.brightness, self.contrast, self.saturation, self.hue, self.grayscale)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "AugmentParams":
        return AugmentParams(*(function(getattr(self, field.name)) for field in fields(self)))


class Views:
    """Random views of batches of uint8 images (B, 3, H, W)."""

    def __init__(self, config: ViewsConfig, image_size: int, mean: Sequence[float], std: Sequence[float]):
        """Set up views of one data set.

        Args:
            config: the user's settings; None values are filled in by the preset.
            image_size: side of the images in pixels, and of the views unless the config has another.
            mean: of each channel, on a scale of 0 to 1.
            std: standard deviation of each channel.
        """
        self.settings = resolve_views(config, image_size)
        self.size = self.settings.size
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        usable = all(map(math.isfinite, self.mean)) and all(0 < deviation < math.inf for deviation in self.std)
        if len(self.mean) != 3 or len(self.std) != 3 or not usable:
            raise UserError(
                f"the channel mean {self.mean} and standard deviation {self.std} cannot normalize images; "
                "give three numbers each, the deviations above 0."
            )

    def sample_params(
        self,
        count: int,
        generator: torch.Generator,
        views: int = 2,
        rows: slice = slice(None),
        device: torch.device | str = "cpu",
    ) -> AugmentParams:
        """Sample the parameters of ``views`` views of ``count`` images.

        Random numbers are drawn on the CPU, so they are the same for every device, and always as many, so that a
        setting changes no other augmentation's parameters. They go to the device in one asynchronous copy.

        Args:
            count: images of the global batch.
            generator: a CPU generator.
            views: views of each image.
            rows: the images of the global batch to return parameters for (a process's ``rank_slice``).
            device: where to put them.
        """
        uniform = torch.rand(views, count, NUMBERS_PER_VIEW, generator=generator, dtype=torch.float32)[:, rows]
        return self._params(to_device(uniform, torch.device(device)))

    def _params(self, uniform: Tensor) -> AugmentParams:
        """Parameters from numbers (views, B, NUMBERS_PER_VIEW) uniform in [0, 1)."""
        settings = self.settings
        split = [CROP_PROPOSALS, CROP_PROPOSALS, 2, 5, 5]
        scale, log_ratio, position, chances, amounts = uniform.split(split, dim=-1)
        probabilities = (settings.flip, settings.color_jitter, settings.grayscale, settings.blur, settings.solarize)
        flip, jitter, grayscale, blur, solarized = (chances < constant(probabilities, uniform.device)).unbind(-1)
        brightness, contrast, saturation, hue, sigma = amounts.unbind(-1)

        def factor(amount: Tensor, strength: float) -> Tensor:
            return torch.where(jitter, _between(amount, max(0.0, 1 - strength), 1 + strength), 1.0)

        smallest_ratio, largest_ratio = map(math.log, settings.crop_ratio)
        return AugmentParams(
            crop_scale=_between(scale, *settings.crop_scale),
            crop_ratio=_between(log_ratio, smallest_ratio, largest_ratio).exp(),
            crop_position=position,
            flip=flip,
            brightness=factor(brightness, settings.brightness),
            contrast=factor(contrast, settings.contrast),
            saturation=factor(saturation, settings.saturation),
            hue=torch.where(jitter, _between(hue, -settings.hue, settings.hue), 0.0),
            grayscale=grayscale,
            blur_sigma=torch.where(blur, _between(sigma, *settings.blur_sigma), 0.0),
            solarize=solarized,
        )

    @torch.no_grad()
    def apply(self, images: Tensor, params: AugmentParams, channels_last: bool = False, weak: bool = False) -> Tensor:
        """Views of images, normalized.

        Args:
            images: uint8 (B, 3, H, W); or crops (views, B, 3, size, size) that were taken by ``params`` already.
            params: of as many images.
            channels_last: give the views, flattened to (views * B, 3, size, size), channels-last strides.
            weak: crop and flip alone.

        Returns:
            float32 (views, B, 3, size, size).
        """
        if images.ndim == 5:
            return self._apply_to_crops(images, params, channels_last, weak)
        _check_images(images)
        if len(params) != len(images):
            raise UserError(
                f"{len(images)} images were given with the parameters of {len(params)}; sample as many as there are "
                "images."
            )
        params = params.weak() if weak else params
        if images.device.type != "cpu":
            with without_autocast(images.device):
                return self.apply_at_once(images, self.pack(params, images), channels_last, filters=not weak)
        views = self._empty(images, len(params.flip), channels_last)
        with without_autocast(images.device):
            if weak or not self._has_filters:
                self._crop_color(images, params, views, normalize=True)
                return views
            for rows in self._chunks(images):
                colored = self._empty(images[rows], len(params.flip), channels_last=False)
                self._crop_color(images[rows], params[rows], colored, normalize=False)
                for view, cropped, view_params in zip(views[:, rows], colored, params[rows].views(), strict=True):
                    filtered = self._filter(cropped, view_params.blur_sigma, view_params.solarize)
                    view.copy_(self._normalize_(filtered))
        return views

    def pack(self, params: AugmentParams, images: Tensor) -> Tensor:
        """What ``apply_at_once`` needs of the parameters, (views, B, 17) on the images' device: one copy.

        The rest is computed where the parameters are, on the CPU: many small operations that a device would launch.
        """
        boxes = params.boxes(images.shape[2], images.shape[3], self.settings.crop_ratio)
        matrix, luma_factor = params.colors()
        single = (*boxes, params.flip.float(), luma_factor, params.blur_sigma, params.solarize.float())
        packed = torch.cat([torch.stack(single, -1), matrix.flatten(-2)], -1)
        return packed if packed.device == images.device else to_device(packed, images.device)

    def apply_at_once(
        self, images: Tensor, packed: Tensor, channels_last: bool = False, filters: bool = True
    ) -> Tensor:
        """``apply`` for an accelerator: the views of all images as one batch, in few operations.

        Args:
            images: uint8 (B, 3, H, W).
            packed: (views, B, 17), as ``pack`` gives them.
            channels_last: memory layout of the views.
            filters: blur and solarize.
        """
        views = len(packed)
        packed = packed.flatten(0, 1)
        *box, flip, luma_factor, sigma, solarized = packed[:, :8].unbind(1)
        matrix = packed[:, 8:].unflatten(1, (3, 3))
        luma, mean, std = constant((LUMA, self.mean, self.std), images.device)
        pixels = images.repeat(views, 1, 1, 1) / 255
        colored = adjust_color(resized_crop(pixels, box, flip.bool(), self.size), matrix, luma_factor, luma)
        if filters and self._has_filters:
            colored = self._filter(colored, sigma, solarized.bool())
        normalized = normalize_channels_(colored, mean, std)
        if channels_last:
            normalized = normalized.contiguous(memory_format=torch.channels_last)
        return normalized.unflatten(0, (views, -1))

    def _apply_to_crops(self, crops: Tensor, params: AugmentParams, channels_last: bool, weak: bool) -> Tensor:
        """Views of crops (views, B, 3, size, size) that were taken by the boxes of ``params`` already."""
        if crops.shape[:2] != params.flip.shape or crops.shape[3:] != (self.size, self.size):
            raise UserError(
                f"crops of shape {tuple(crops.shape)} were given for {tuple(params.flip.shape)} views of {self.size} "
                "pixels; give as many of that size."
            )
        flat = params.flatten().without_crop()
        return self.apply(crops.flatten(0, 1), flat, channels_last, weak).view(*crops.shape)

    @torch.no_grad()
    def plain(self, images: Tensor) -> Tensor:
        """uint8 images without augmentation: resized where their size differs, normalized, (B, 3, size, size)."""
        _check_images(images)
        with without_autocast(images.device):
            pixels = images.float().div_(255)
            if pixels.shape[2:] != (self.size, self.size):
                pixels = interpolate(pixels, (self.size, self.size), mode="bilinear", antialias=True)
            return self._normalize_(pixels)

    def _empty(self, images: Tensor, views: int, channels_last: bool) -> Tensor:
        """Memory for the views, (views, B, 3, size, size)."""
        if channels_last:
            shape = (views, len(images), self.size, self.size, 3)
            return images.new_empty(shape, dtype=torch.float32).movedim(-1, 2)
        return images.new_empty((views, len(images), 3, self.size, self.size), dtype=torch.float32)

    def _chunks(self, images: Tensor) -> Iterable[slice]:
        """Slices of the images to compute at a time: all of them on an accelerator."""
        step = max(1, CHUNK_PIXELS // self.size**2) if images.device.type == "cpu" else max(1, len(images))
        return (slice(first, first + step) for first in range(0, len(images), step))

    def _crop_color(self, images: Tensor, params: AugmentParams, out: Tensor, normalize: bool) -> None:
        """Write cropped and colored views (views, B, 3, size, size), normalized or with values in [0, 1]."""
        boxes = params.boxes(images.shape[2], images.shape[3], self.settings.crop_ratio)
        luma, mean, std = constant((LUMA, self.mean, self.std), images.device)
        matrix, luma_factor = params.colors()
        if normalize:
            crop_color(images, boxes, params.flip, matrix, luma_factor, luma, mean, std, out)
        else:
            crop_color(images, boxes, params.flip, matrix, luma_factor, luma, None, None, out)

    @property
    def _has_filters(self) -> bool:
        """True if blur or solarization can follow crop and color."""
        return self.settings.blur > 0 or self.settings.solarize > 0

    def _filter(self, view: Tensor, sigma: Tensor, solarized: Tensor) -> Tensor:
        """Blur and solarize one view (B, 3, size, size), by parameters (B,)."""
        settings = self.settings
        if settings.blur > 0:
            radius = min(math.ceil(3 * settings.blur_sigma[1]), self.size)
            view = gaussian_blur(view, sigma, radius)
        if settings.solarize > 0:
            view = solarize(view, solarized)
        return view

    def _normalize_(self, pixels: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation of each channel, in place."""
        return normalize_channels_(pixels, *constant((self.mean, self.std), pixels.device))


def _check_images(images: Tensor) -> None:
    """Refuse what is not a batch of uint8 color images."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        given = f"{str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}"
        raise UserError(f"the images given are {given}; views are made of uint8 of shape (B, 3, H, W).")


def _between(uniform: Tensor, low: float, high: float) -> Tensor:
    """Numbers uniform in [0, 1) scaled to [low, high)."""
    return low + (high - low) * uniform
