"""Sprite sheets: many small images packed into a few JPEG files."""

import base64
import io
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from psm.data import ImageStore

COLUMNS = 32
ROWS = 32
BLOCK = 8  # JPEG codes blocks of 8 x 8 pixels: tiles that fill whole blocks do not bleed into one another
SIDES = (64, 48, 32, 24, 16)  # of a tile in pixels; the largest that fits is used
QUALITY = 85


class Sprites(NamedTuple):
    """Sheets as JPEG data URLs. Image i is on sheet i // (columns * rows), its tiles in row-major order."""

    sheets: list[str]
    side: int  # of an image in pixels
    pitch: int  # distance of tiles: the side rounded up to whole blocks
    columns: int = COLUMNS
    rows: int = ROWS

    @property
    def characters(self) -> int:
        return sum(map(len, self.sheets))


def pack(images: ImageStore, ids: Tensor, max_characters: int) -> Sprites:
    """The images at ``ids`` on sheets of at most ``max_characters`` in all, downscaled where needed.

    Small images keep their size. The smallest tiles are returned even if they do not fit.
    """
    size = images.shape[-1]
    sides = [size, *(side for side in SIDES if side < size)] if size <= SIDES[0] else list(SIDES)
    for side in sides:
        sprites = _packed(images, ids, side)
        if sprites.characters <= max_characters:
            break
    return sprites


def _packed(images: ImageStore, ids: Tensor, side: int) -> Sprites:
    pitch = -(-side // BLOCK) * BLOCK
    return Sprites([_sheet(images, some, side, pitch) for some in ids.split(COLUMNS * ROWS)], side, pitch)


def _sheet(images: ImageStore, ids: Tensor, side: int, pitch: int) -> str:
    sheet = np.full((ROWS * pitch, COLUMNS * pitch, 3), 255, dtype=np.uint8)
    for start in range(0, len(ids), COLUMNS):
        row = _resized(images.take(ids[start : start + COLUMNS]), side).permute(0, 2, 3, 1).numpy()
        top = start // COLUMNS * pitch
        for column, tile in enumerate(row):
            sheet[top : top + side, column * pitch : column * pitch + side] = tile
    stream = io.BytesIO()
    Image.fromarray(sheet).save(stream, "JPEG", quality=QUALITY, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()


def _resized(pixels: Tensor, side: int) -> Tensor:
    if pixels.shape[-1] == side:
        return pixels
    smaller = interpolate(pixels.float(), (side, side), mode="bilinear", antialias=True)
    return smaller.round().clamp(0, 255).to(torch.uint8)
