"""The computation that is exported: preparation of images, encoder, and scaling of features, as plain modules.

Only basic operations (arithmetic, comparison, matrix products) are used, and no branch depends on a shape, so that the
same module is scripted by TorchScript, traced by torch.export with dynamic sizes, and understood by ONNX runtimes,
whose own resizing differs from Pillow's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from psm.models.pretrained import EncoderInfo


class ChannelsFirst(nn.Module):
    """Images (B, H, W, C) to (B, C, H, W)."""

    def forward(self, images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2)


class Preprocess(nn.Module):
    """uint8 images (B, 3, H, W) of any height and width to inputs (B, 3, size, size) of the encoder.

    As psm prepares images with Pillow: the center square, resized by Lanczos' filter in two passes, columns first,
    rounded to whole values after each; then normalized by the mean and standard deviation of each channel.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, size: int, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.size = size
        means, deviations = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)
        self.register_buffer("scale", 1 / (255 * deviations))
        self.register_buffer("shift", -means / deviations)

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[2], images.shape[3]
        side = min(height, width)
        pixels = images.to(torch.float32)
        pixels = round_to_byte(pixels @ lanczos_matrix(width, side, self.size, images.device).T)
        pixels = round_to_byte(lanczos_matrix(height, side, self.size, images.device) @ pixels)
        return pixels * self.scale + self.shift


class UnitLength(nn.Module):
    """Feature vectors (B, F) scaled to length 1."""

    def forward(self, features: Tensor) -> Tensor:
        return normalize(features, dim=1)


def round_to_byte(values: Tensor) -> Tensor:
    """Values as uint8 would hold them, still as floats."""
    return (values + 0.5).floor().clamp(0.0, 255.0)


def lanczos_matrix(length: int, side: int, size: int, device: torch.device, lobes: float = 3.0) -> Tensor:
    """Weights (size, length) that resize the central ``side`` of ``length`` pixels to ``size``; rows sum to 1.

    Where that shrinks, the filter is widened by the same factor. Pixels beyond the central ones count as far as the
    filter reaches, as with the ``box`` of Pillow's ``resize``; ``lobes``, on each side, is Pillow's number too.
    """
    # Twice the distance of each pixel's center from each center of the result, times size: exact whole numbers.
    pixels = 2 * torch.arange(length, device=device) + (1 - length + side)
    centers = 2 * torch.arange(size, device=device) + 1
    distance = (pixels * size).unsqueeze(0) - (centers * side).unsqueeze(1)
    distance = distance.to(torch.float32) / (2 * max(side, size))  # in lobes
    weights = torch.sinc(distance) * torch.sinc(distance / lobes) * (distance.abs() < lobes)
    return weights / weights.sum(1, keepdim=True)


def build_graph(
    encoder: nn.Module,
    info: EncoderInfo,
    preprocess: bool = True,
    layout: str = "nchw",
    unit_length: bool = False,
    head: nn.Module | None = None,
) -> nn.Sequential:
    """The module to export, in evaluation mode.

    Args:
        encoder: inputs (B, 3, size, size) to features (B, F).
        info: size and statistics that images are prepared with.
        preprocess: take uint8 images of any size; else the encoder's own inputs, float32.
        layout: of the images, ``nchw`` or ``nhwc``.
        unit_length: scale the features to length 1.
        head: takes the features (B, F), if not None.
    """
    steps: list[nn.Module] = [ChannelsFirst()] if layout == "nhwc" else []
    if preprocess:
        steps.append(Preprocess(info.size, info.mean, info.std))
    steps.append(encoder)
    if unit_length:
        steps.append(UnitLength())
    if head is not None:
        steps.append(head)
    return nn.Sequential(*steps).eval()
