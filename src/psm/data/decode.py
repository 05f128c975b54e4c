"""Decode an image file of any format, mode and size to uint8 (3, size, size), or say why it cannot be read."""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.nn.functional import interpolate

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

VERSION = 1  # raise it when decoded pixels change, so that caches are rebuilt
EXTENSIONS = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# Only these readers are tried: Pillow has others (EPS) that start programs on a file's behalf.
Image.init()
_FORMATS = tuple(kind for kind in ("JPEG", "MPO", "PNG", "WEBP", "BMP", "GIF", "TIFF") if kind in Image.OPEN)
_MOST_PIXELS = 100_000_000
_ORIENTATION = 0x0112
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


Box = tuple[int, int, int, int]  # top, left, height, width


class Unreadable(Exception):
    """A file that cannot be decoded; the message is the reason."""


def decode(file: Path | bytes, size: int) -> np.ndarray:
    """The image in a file or in a file's content, uint8 (3, size, size).

    Upright as EXIF says, over white, resized by its shorter side, center-cropped.
    """
    with _opened(file) as image:
        image.draft(None, (2 * size, 2 * size))  # JPEG: decodes at a half, a quarter or an eighth where that is enough
        image.load()
        transpose = _TRANSPOSES.get(_orientation(image))
        square = center_square(to_rgb(image), size)
        if transpose is not None:  # after the crop: the square is smaller than the image
            square = square.transpose(transpose)
        return np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))


def decode_whole(file: Path | bytes, shorter: int) -> np.ndarray:
    """The whole image in a file, upright and over white, its shorter side at most so many pixels: uint8 (H, W, 3)."""
    with _opened(file) as image:
        image.draft(None, (2 * shorter, 2 * shorter))
        image.load()
        transpose = _TRANSPOSES.get(_orientation(image))
        whole = to_rgb(image)
        scale = shorter / min(whole.size)
        if scale < 1:
            width, height = (max(shorter, round(side * scale)) for side in whole.size)
            whole = whole.resize((width, height), Image.Resampling.LANCZOS)
        return np.array(whole if transpose is None else whole.transpose(transpose))


def open_rgb(file: Path | bytes) -> Image.Image:
    """The image in a file at its own size: upright as EXIF says, over white, 8-bit RGB."""
    with _opened(file) as image:
        image.load()
        transpose = _TRANSPOSES.get(_orientation(image))
        rgb = to_rgb(image)
        return rgb if transpose is None else rgb.transpose(transpose)


def shorter_side(file: Path | bytes) -> int:
    """The shorter side of a file's image in pixels, from its header alone."""
    with _opened(file) as image:
        return min(image.size)


def decode_crops(content: bytes, boxes: Callable[[int, int], Sequence[Box]], size: int) -> np.ndarray:
    """Crops of the whole image in a file's content, resized by bilinear antialiasing.

    A JPEG is decoded at a half, a quarter or an eighth where the smallest crop has enough pixels there. The pixels are
    the same with and without simplejpeg, which is faster.

    Args:
        content: of the file.
        boxes: gives top, left, height and width of each crop, from the height and the width of the upright image.
        size: side of the crops.

    Returns:
        uint8 (crops, 3, size, size).
    """
    with _opened(content) as image:
        turned = _orientation(image)
        width, height = image.size if turned < 5 else image.size[::-1]
        crops = boxes(height, width)
        smallest = min(min(box[2], box[3]) for box in crops)
        factor = next(factor for factor in (8, 4, 2, 1) if factor == 1 or smallest >= factor * size)
        pixels = _whole(image, content, factor if image.format in ("JPEG", "MPO") else 1)
    if turned in _TRANSPOSES:
        pixels = np.array(Image.fromarray(pixels).transpose(_TRANSPOSES[turned]))
    scales = pixels.shape[0] / height, pixels.shape[1] / width
    return np.stack([resized_box(pixels, _scaled(box, *scales, *pixels.shape[:2]), size) for box in crops])


def _whole(image: Image.Image, content: bytes, factor: int) -> np.ndarray:
    """All pixels of an opened image, (H, W, 3), decoded at one by ``factor`` of its size."""
    if simplejpeg is not None and image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L"):
        height, width = (-(-side // factor) for side in (image.height, image.width))
        return simplejpeg.decode_jpeg(content, "RGB", min_height=height, min_width=width)
    if factor > 1:
        image.draft(None, (image.width // factor, image.height // factor))
    image.load()
    return np.array(to_rgb(image))


def _scaled(box: Box, down: float, across: float, height: int, width: int) -> Box:
    """A box in an image that was decoded smaller, in whole pixels."""
    if down == across == 1:
        return box
    top, left = min(round(box[0] * down), height - 1), min(round(box[1] * across), width - 1)
    bottom, right = round((box[0] + box[2]) * down), round((box[1] + box[3]) * across)
    return top, left, min(max(bottom - top, 1), height - top), min(max(right - left, 1), width - left)


def resized_box(pixels: np.ndarray, box: Box, size: int) -> np.ndarray:
    """The box of an image (H, W, 3) as (3, size, size), by bilinear antialiasing."""
    top, left, height, width = box
    part = torch.from_numpy(pixels[top : top + height, left : left + width]).permute(2, 0, 1)[None]
    if (height, width) != (size, size):
        part = interpolate(part, (size, size), mode="bilinear", antialias=True)
    return part[0].numpy()


def center_square(image: Image.Image, size: int) -> Image.Image:
    """The center square at ``size``: resize of the shorter side and center crop in one step."""
    width, height = image.size
    if width == height == size:
        return image
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return image.resize((size, size), Image.Resampling.LANCZOS, box=(left, top, left + side, top + side))


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Silence Pillow's warnings about odd files: those that cannot be read are reported."""
    logger = logging.getLogger("PIL")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\b")
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _opened(file: Path | bytes) -> Iterator[Image.Image]:
    # A decoder may raise anything on hostile bytes; whatever it is, the file is unreadable.
    try:
        if (len(file) if isinstance(file, bytes) else file.stat().st_size) == 0:
            raise Unreadable("the file is empty")
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > _MOST_PIXELS:
                raise Unreadable(f"{width} x {height} pixels are more than {_MOST_PIXELS:,}")
            yield image
    except Unreadable:
        raise
    except UnidentifiedImageError:
        raise Unreadable("not an image of a known format") from None
    except Image.DecompressionBombError:
        raise Unreadable(f"more than {_MOST_PIXELS:,} pixels") from None
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None
    except MemoryError:
        raise Unreadable("not enough memory to decode it") from None
    except Exception as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # broken EXIF, sound pixels
        return 1


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as 8-bit RGB, transparent ones over white."""
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_eight_bits(image))
    if image.mode in ("LA", "PA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> np.ndarray:
    """Gray values of more than 8 bits as uint8: scaled by the full range of their type if evident, else by their own.

    Integers within 0..65535 count as 16-bit; floats within 0..1 as fractions of white, and within 0..255 as they are.
    """
    values = np.nan_to_num(np.asarray(image).astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    ranges = [(0.0, 1.0), (0.0, 255.0)] if image.mode == "F" else [(0.0, 65535.0)]
    start, end = next(((a, b) for a, b in ranges if a <= low and high <= b), (low, high))
    return np.round((values - start) * (255 / max(end - start, 1e-12))).astype(np.uint8)
