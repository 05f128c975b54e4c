"""Augmentations of a batch as pure functions of pixels and sampled parameters, each image with its own parameters.

Crop, resize and flip are two products with resampling matrices, the five color changes are one 3x3 matrix and one
offset, the blur is two products with a banded matrix. Everything is computed in float32, whatever the default dtype.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from psm.utils.devices import cached_constant

LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in the luma (ITU-R BT.601)
GRAYSCALE = (LUMA, LUMA, LUMA)  # the matrix that replaces each channel by the luma
GRAY_AXIS_CROSS = ((0.0, -1.0, 1.0), (1.0, 0.0, -1.0), (-1.0, 1.0, 0.0))  # cross product with (1, 1, 1)
IDENTITY = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
MIN_SIGMA = 1e-3  # the neighbors' weights vanish, and nothing is divided by zero

Box = tuple[Tensor, Tensor, Tensor, Tensor]  # top, left, height, width


def crop_boxes(
    scale: Tensor, ratio: Tensor, position: Tensor, height: int, width: int, ratio_range: Sequence[float]
) -> Box:
    """Boxes of a random resized crop, by torchvision's rule: the first proposal that fits in the image.

    Where no proposal fits, the largest central box of an allowed ratio is taken.

    Args:
        scale: (..., proposals) fraction of the image's area.
        ratio: (..., proposals) width over height.
        position: (..., 2) vertical and horizontal position, from 0 (top, left) to 1 (bottom, right).
        height: of the images.
        width: of the images.
        ratio_range: smallest and largest ratio, for the central box.

    Returns:
        Top, left, height and width (...), in whole pixels, as float32.
    """
    area = scale * (height * width)
    proposed_heights = (area / ratio).sqrt().round()
    proposed_widths = (area * ratio).sqrt().round()
    fits = (proposed_heights >= 1) & (proposed_heights <= height) & (proposed_widths >= 1) & (proposed_widths <= width)
    # argmax may return any of several equal values, so earlier proposals get larger ones.
    first = (fits * torch.arange(scale.shape[-1], 0, -1, device=fits.device)).argmax(-1, keepdim=True)
    found = fits.any(-1)
    central_height = min(height, max(1, round(width / ratio_range[0])))
    central_width = min(width, max(1, round(height * ratio_range[1])))
    heights = torch.where(found, proposed_heights.gather(-1, first).squeeze(-1), central_height)
    widths = torch.where(found, proposed_widths.gather(-1, first).squeeze(-1), central_width)

    def start(fraction: Tensor, largest: Tensor, central: int) -> Tensor:
        # A fraction just below 1 may round up to one pixel more than the largest start, hence the minimum.
        return torch.where(found, torch.minimum((fraction * (largest + 1)).floor(), largest), central)

    tops = start(position[..., 0], height - heights, round((height - central_height) / 2))
    lefts = start(position[..., 1], width - widths, round((width - central_width) / 2))
    return tops, lefts, heights, widths


def color_matrix(
    brightness: Tensor, contrast: Tensor, saturation: Tensor, hue: Tensor, grayscale: Tensor
) -> tuple[Tensor, Tensor]:
    """Brightness, contrast, saturation, hue and grayscale as one affine map of colors.

    Brightness, contrast and saturation commute as long as nothing is clipped in between, so no order is sampled.
    Contrast scales about the image's mean luma. Hue is a rotation about the gray axis (as in StyleGAN2-ADA), which is
    linear, rather than a shift in HSV.

    Args:
        brightness: (...) factor.
        contrast: (...) factor.
        saturation: (...) factor.
        hue: (...) angle, in turns of the color circle.
        grayscale: (...) bool.

    Returns:
        The matrices (..., 3, 3), and the factor (...) of the mean luma in the offset.
    """
    gray, identity = constant(GRAYSCALE, brightness.device), constant(IDENTITY, brightness.device)
    saturated = _matrix(saturation) * identity + _matrix(1 - saturation) * gray
    matrix = _matrix(brightness * contrast) * (hue_rotation(hue) @ saturated)
    matrix = torch.where(_matrix(grayscale), gray @ matrix, matrix)
    return matrix, brightness * (1 - contrast)


def hue_rotation(hue: Tensor) -> Tensor:
    """Rotation matrices (..., 3, 3) about the gray axis, by an angle in turns (Rodrigues' formula)."""
    cross, identity = constant(GRAY_AXIS_CROSS, hue.device), constant(IDENTITY, hue.device)
    angle = _matrix(hue) * (2 * math.pi)
    return angle.cos() * identity + (1 - angle.cos()) / 3 + angle.sin() / math.sqrt(3) * cross


def gaussian_blur(pixels: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Blur square images (B, 3, S, S), each with its own standard deviation.

    Beyond an edge the image is mirrored, edge pixel included, which keeps the mean.

    Args:
        pixels: (B, 3, S, S).
        sigma: (B,) standard deviations in pixels; where it is 0 the image is unchanged.
        radius: pixels at which the kernel is cut off.
    """
    distance = torch.arange(-radius, radius + 1, device=pixels.device)
    kernel = (distance / sigma.clamp(min=MIN_SIGMA)[:, None]).square().mul(-0.5).exp()
    kernel = kernel / kernel.sum(-1, keepdim=True)
    size = pixels.shape[-1]
    band = (kernel @ mirrored_shifts(radius, size, pixels.device).flatten(1)).unflatten(1, (size, size))
    # Channels and rows as one dimension, as in the crop; the band is symmetric.
    blurred_rows = pixels.flatten(1, 2) @ band
    return band.unsqueeze(1) @ blurred_rows.view_as(pixels)


@cached_constant
def mirrored_shifts(radius: int, size: int, device: torch.device) -> Tensor:
    """0/1 matrices (2 * radius + 1, size, size): for each shift, row i reads pixel i + shift of the mirrored image."""
    source = torch.arange(size, device=device) + torch.arange(-radius, radius + 1, device=device)[:, None]
    source = torch.where(source < 0, -1 - source, source)
    source = torch.where(source >= size, 2 * size - 1 - source, source)
    return (source[..., None] == torch.arange(size, device=device)).to(torch.float32)


def solarize(pixels: Tensor, chosen: Tensor) -> Tensor:
    """Invert the values from 0.5 up of the chosen (B,) images (B, 3, H, W)."""
    return torch.where(chosen[:, None, None, None] & (pixels >= 0.5), 1 - pixels, pixels)


@cached_constant
def constant(values: tuple, device: torch.device) -> Tensor:
    """A float32 tensor of fixed values on a device, copied there once: a copy in every step would stall the device."""
    return torch.tensor(values, dtype=torch.float32).to(device)


def _matrix(values: Tensor) -> Tensor:
    """Values (...) as (..., 1, 1), to scale matrices."""
    return values[..., None, None]
