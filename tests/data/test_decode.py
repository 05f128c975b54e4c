"""One file to one image: formats, modes, orientation, odd sizes, and files that hold no image."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from psm.data import decode

GRADIENT = np.linspace(0, 255, 40 * 24 * 3).reshape(40, 24, 3).astype(np.uint8)


def color(path: Any, size: Any = 8) -> Any:
    """The image's one color, which must be the same everywhere."""
    pixels = decode.decode(path, size)
    assert pixels.shape == (3, size, size)
    assert pixels.dtype == np.uint8
    assert np.ptp(pixels.reshape(3, -1).astype(int), axis=1).max() <= 4  # lossy formats speckle
    return pixels[:, 0, 0].tolist()


@pytest.mark.parametrize("ending", ["jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"])
def test_formats(tmp_path: Path, ending: Any) -> None:
    path = tmp_path / f"x.{ending}"
    assert path.suffix in decode.EXTENSIONS
    Image.new("RGB", (20, 30), (200, 100, 50)).save(path)
    assert np.abs(np.array(color(path)) - (200, 100, 50)).max() <= 4


MODES = [
    ("1", 1, (255, 255, 255)),
    ("L", 77, (77, 77, 77)),
    ("LA", (0, 0), (255, 255, 255)),
    ("LA", (100, 255), (100, 100, 100)),
    ("RGBA", (255, 0, 0, 0), (255, 255, 255)),
    ("RGBA", (255, 0, 0, 128), (255, 127, 127)),
    ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
    ("I;16", 257 * 90, (90, 90, 90)),
    ("I", 257 * 90, (90, 90, 90)),
    ("F", 0.5, (128, 128, 128)),
    ("F", 200.0, (200, 200, 200)),
]


@pytest.mark.parametrize(("mode", "value", "expected"), MODES)
def test_modes(tmp_path: Path, mode: Any, value: Any, expected: Any) -> None:
    path = tmp_path / "x.tif"
    Image.new(mode, (12, 12), value).save(path)
    with Image.open(path) as saved:
        assert saved.mode == mode
    assert np.abs(np.array(color(path)) - expected).max() <= 1


def test_sixteen_bit_png_keeps_its_range(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "x.png")
    expected = np.round(values / 257)
    assert np.array_equal(decode.decode(tmp_path / "x.png", 8)[0], expected)


def test_wide_integers_and_floats_use_their_own_range(tmp_path: Path) -> None:
    Image.fromarray(np.array([[-1000, 3000], [1000, 9000]], dtype=np.int32)).save(tmp_path / "i.tif")
    Image.fromarray(np.array([[-10, np.nan], [500, 1000]], dtype=np.float32)).save(tmp_path / "f.tif")
    for name, expected in (("i.tif", [0, 102, 51, 255]), ("f.tif", [0, 3, 129, 255])):
        with Image.open(tmp_path / name) as image:
            assert decode._eight_bits(image).flatten().tolist() == expected


def test_palette_with_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (10, 10), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    image.save(tmp_path / "opaque.png")
    image.save(tmp_path / "clear.png", transparency=1)
    assert color(tmp_path / "opaque.png") == [10, 200, 30]
    assert color(tmp_path / "clear.png") == [255, 255, 255]


def test_transparent_color_of_an_rgb_image(tmp_path: Path) -> None:
    Image.new("RGB", (10, 10), (1, 2, 3)).save(tmp_path / "x.png", transparency=(1, 2, 3))
    assert color(tmp_path / "x.png") == [255, 255, 255]


def test_hidden_colors_do_not_bleed_into_the_edge(tmp_path: Path) -> None:
    """White over alpha 0 and alpha 1: what the transparent half would show must not appear when resized."""
    pixels = np.zeros((64, 64, 4), dtype=np.uint8)
    pixels[:, :32] = (255, 255, 255, 255)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    assert decode.decode(tmp_path / "x.png", 8).min() == 255


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (10, 10), value) for value in ((250, 0, 0), (0, 250, 0))]
    frames[0].save(tmp_path / "x.gif", save_all=True, append_images=frames[1:])
    assert color(tmp_path / "x.gif")[0] > 240


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["png", "tif"])
def test_orientation_is_applied(tmp_path: Path, orientation: Any, ending: Any) -> None:
    """Against Pillow's own transposition of the whole image before it is cut and resized."""
    path = tmp_path / f"x.{ending}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(GRADIENT).save(path, exif=exif)
    methods = [None, 0, 3, 1, 5, 4, 6, 2]
    upright = Image.fromarray(GRADIENT)
    if orientation > 1:
        upright = upright.transpose(Image.Transpose(methods[orientation - 1]))
    expected = np.asarray(decode.center_square(upright, 16)).transpose(2, 0, 1)
    assert np.array_equal(decode.decode(path, 16), expected)


def test_orientation_of_a_jpeg(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((32, 32), dtype=np.uint8)
    pixels[:16] = 255  # bright above, so bright at the right once turned
    Image.fromarray(pixels).save(tmp_path / "x.jpg", exif=exif, quality=95)
    upright = decode.decode(tmp_path / "x.jpg", 32)[0].astype(int)
    assert upright[:, 20:].min() > 240
    assert upright[:, :12].max() < 15


@pytest.mark.parametrize(("width", "height"), [(64, 64), (96, 64), (64, 128), (8, 8), (1, 1), (4, 256)])
def test_fit_against_resizing_the_whole_and_cropping(width: Any, height: Any) -> None:
    # Middle values only: beyond them Pillow clips between its two passes, whose order depends on the sizes.
    pixels = np.random.default_rng(1).integers(96, 160, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    scale = 16 / min(width, height)
    whole = image.resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
    left, top = (whole.width - 16) // 2, (whole.height - 16) // 2
    expected = np.asarray(whole.crop((left, top, left + 16, top + 16))).astype(int)
    assert np.abs(np.asarray(decode.center_square(image, 16)).astype(int) - expected).max() <= 1


def test_a_long_thin_image_needs_little_memory(tmp_path: Path) -> None:
    """Resized as a whole it would have 256 x 12,800,000 pixels."""
    Image.new("L", (50_000, 1), 9).save(tmp_path / "x.png")
    assert color(tmp_path / "x.png", size=256) == [9, 9, 9]


def test_jpeg_draft_stays_close_to_the_full_decode(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 512)
    Image.fromarray(np.stack([np.add.outer(ramp, ramp) / 2] * 3, -1).astype(np.uint8)).save(
        tmp_path / "x.jpg", quality=95
    )
    with Image.open(tmp_path / "x.jpg") as image:
        full = np.asarray(decode.center_square(image.convert("RGB"), 32)).transpose(2, 0, 1)
    assert np.abs(decode.decode(tmp_path / "x.jpg", 32).astype(int) - full).max() <= 3


def png_claiming(width: Any, height: Any) -> Any:
    """A PNG of a few bytes whose header claims any size."""

    def chunk(kind: Any, data: Any) -> Any:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def test_files_that_hold_no_image(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    Image.fromarray(GRADIENT).save(tmp_path / "whole.jpg")
    Image.fromarray(GRADIENT).save(tmp_path / "whole.png")
    bad = {
        "empty.jpg": (b"", "empty"),
        "text.jpg": (b"hello, not an image", "not an image"),
        "cut.jpg": ((tmp_path / "whole.jpg").read_bytes()[:-400], "[Tt]runcated"),
        "cut.png": ((tmp_path / "whole.png").read_bytes()[:-400], "."),
        "bomb.png": (png_claiming(30_000, 30_000), "pixels"),
        "large.png": (png_claiming(11_000, 10_000), "11000 x 10000 pixels"),
        "page.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    }
    with decode.quiet_pillow():
        for name, (content, reason) in bad.items():
            (tmp_path / name).write_bytes(content)
            with pytest.raises(decode.Unreadable, match=reason):
                decode.decode(tmp_path / name, 32)
        with pytest.raises(decode.Unreadable, match="No such file"):
            decode.decode(tmp_path / "missing.jpg", 32)
    assert not [str(w.message) for w in recwarn.list]
