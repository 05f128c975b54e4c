"""Checking an exported file: its features, where it will be used, against those of psm's encoder and preparation."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from psm.config.schema import ImagesConfig
from psm.data import load_dataset
from psm.data import synthetic_shapes as shapes
from psm.data.decode import Unreadable, center_square, open_rgb, quiet_pillow
from psm.data.file_index import list_files
from psm.exporting.formats import Features
from psm.models.preprocess import preprocess as psm_preprocess
from psm.models.pretrained import EncoderInfo
from psm.utils.errors import UserError
from psm.utils.indices import evenly_spaced

IMAGES = 8
# Resizing in the graph and in Pillow round in other places, and Pillow chooses the order of its two passes by the shape
# of the image: up to a few per cent of the largest feature. A preparation that is wrong differs by tens of per cent.
RESIZE_TOLERANCE = 0.1


@dataclass(frozen=True)
class Check:
    """Largest differences between the features of a file and psm's, as shares of the largest feature."""

    images: int
    difference: float  # images of the encoder's own size
    resize_difference: float | None  # images of other sizes; None: the file does not resize


def check_images(info: EncoderInfo, data: str | None) -> list[Image.Image]:
    """Images of several heights and widths to check with: of the data given, else drawn."""
    if data is None:
        return _drawn(info.size)
    folder = Path(data).expanduser()
    images = _files(folder) if folder.is_dir() else []
    return images or _loaded(data)


def _drawn(size: int) -> list[Image.Image]:
    """Shapes, wide, square and tall, larger and smaller than the encoder's inputs."""
    pixels, _ = shapes.reader("test", 64)(0, IMAGES)
    images = [Image.fromarray(image.transpose(1, 2, 0)) for image in pixels]
    widths = [size, size + 1, 2 * size, 3 * size + 1, size + size // 2, size, max(8, size // 2), max(8, size - 3)]
    heights = [size, size, size + size // 2, 2 * size, 2 * size + 1, 2 * size, max(8, size // 2), size]
    return [
        image.resize((width, height), Image.Resampling.BICUBIC)
        for image, width, height in zip(images, widths, heights, strict=True)
    ]


def _files(folder: Path) -> list[Image.Image]:
    """Some images of a folder, at their own size; [] where there are none."""
    files = list_files(folder)
    images = []
    with quiet_pillow():
        for index in evenly_spaced(len(files), IMAGES).tolist() if len(files) else []:
            try:
                images.append(open_rgb(files.location(index)))
            except Unreadable:
                continue
    return images


def _loaded(data: str) -> list[Image.Image]:
    """Some images of a data set by name."""
    store = load_dataset(data, ImagesConfig(limit=IMAGES), progress=False).train
    pixels = store.take(evenly_spaced(len(store), IMAGES))
    return [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]


@torch.no_grad()
def check(
    features: Features,
    encoder: nn.Module,
    info: EncoderInfo,
    images: list[Image.Image],
    *,
    preprocess: bool,
    layout: str = "nchw",
    unit_length: bool = False,
) -> Check:
    """Compare the features of a loaded file with psm's.

    Args:
        features: the file as its users load it.
        encoder: psm's own, in evaluation mode.
        info: size and statistics that images are prepared with.
        images: of any size.
        preprocess: the file prepares images itself.
        layout: of its input.
        unit_length: it scales features to length 1.
    """
    prepared = psm_preprocess(images, info)
    squares = torch.stack([_pixels(center_square(image, info.size)) for image in images])
    expected = encoder(prepared)
    if unit_length:
        expected = nn.functional.normalize(expected, dim=1)
    inputs = squares if preprocess else prepared

    def run(batch: Tensor) -> Tensor:
        given = batch.permute(0, 2, 3, 1) if layout == "nhwc" else batch
        return features(given.contiguous())

    # A batch of one and a batch of several: their number must be free.
    difference = max(_difference(run(inputs[:1]), expected[:1]), _difference(run(inputs), expected))
    resized = None
    if preprocess:
        rows = zip(images, expected.unsqueeze(1), strict=True)
        resized = max(_difference(run(_pixels(image)[None]), row) for image, row in rows)
    return Check(len(images), difference, resized)


def _pixels(image: Image.Image) -> Tensor:
    """An RGB image as uint8 (3, H, W)."""
    return torch.from_numpy(np.array(image).transpose(2, 0, 1))


def _difference(given: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest expected value; infinite for another shape or NaN."""
    if given.shape != expected.shape or not given.isfinite().all():
        return float("inf")
    largest = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((given.float() - expected).abs().max() / largest)


def refuse_difference(result: Check, tolerance: float, source: str) -> None:
    """Raise if a file's features are not psm's."""
    if not result.difference <= tolerance:
        raise UserError(
            f"{source} gives other features than psm: the largest difference on {result.images} images is "
            f"{result.difference:.2g} of the largest feature, and tolerance={tolerance:g} is allowed; nothing was "
            "written."
        )
    if result.resize_difference is not None and not result.resize_difference <= RESIZE_TOLERANCE:
        raise UserError(
            f"{source} prepares images otherwise than psm: the largest difference on {result.images} images of other "
            f"sizes is {result.resize_difference:.2g} of the largest feature, and {RESIZE_TOLERANCE:g} is allowed; "
            "nothing was written."
        )
