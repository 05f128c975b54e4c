"""Whole images in the cache: aspect ratio kept, crops from all of an image, damage seen."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from psm.config.schema import ImagesConfig, ViewsConfig
from psm.data import decode, load_dataset, stream_loader
from psm.data.decode import decode_crops, decode_whole
from psm.data.loader import BatchLoader
from psm.data.stream_loader import StreamLoader
from psm.utils.errors import UserError
from psm.utils.seeding import generator
from psm.views.transform import Views

SIDES = [(60, 40), (40, 60), (200, 50), (30, 30), (20, 90)]  # width, height


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    random = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(20):
        width, height = SIDES[number % 5]
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number:02}.png")
    return tmp_path / "photos"


def read(folder: Any, **more: Any) -> Any:
    config = ImagesConfig(cache=str(folder.parent / "cache"), size=32, whole=True, **more)
    return load_dataset(str(folder), config, progress=False)


def test_aspect_ratio_and_resolution_are_kept(folder: Any) -> None:
    data = read(folder)
    shapes = [image.shape[:2] for image in (data.train.streamed.whole(i) for i in range(5))]
    assert shapes == [(40, 60), (60, 40), (40, 160), (30, 30), (90, 20)]  # shorter side 40 at most, never enlarged
    assert [data.train.streamed.whole(0).shape for data in (read(folder, whole_size=20),)] == [(20, 30, 3)]
    original = np.asarray(Image.open(folder / "00.png"))
    assert np.array_equal(data.train.streamed.whole(0), original)
    squares = data.train.take(torch.tensor([3, 0]))
    assert squares.shape == (2, 3, 32, 32)
    expected = decode.decode(folder / "00.png", 32)
    assert np.abs(squares[1].numpy().astype(int) - expected).mean() < 20  # another filter, the same square


def loader(data: Any, world: Any = 1, rank: Any = 0, step: Any = 0, workers: Any = 0) -> Any:
    views = Views(ViewsConfig(), 32, (0.5,) * 3, (0.2,) * 3)
    rows = slice(rank * 8 // world, (rank + 1) * 8 // world)

    def draws(step: Any) -> Any:
        params = views.sample_params(8, generator(0, "views", step), rows=rows)
        return params.crop_draws(views.settings.crop_ratio)

    return StreamLoader(data.train.streamed, 8, 5, draws, 32, lambda: step, rank=rank, world=world, workers=workers)


def test_crops_are_of_the_whole_image_in_the_order_of_squares(folder: Any) -> None:
    data = read(folder)
    batches = list(loader(data))
    squares = BatchLoader(load_dataset(str(folder), ImagesConfig(size=32), progress=False).train, 8, 5)
    assert [batch.ids.tolist() for batch in batches] == [batch.ids.tolist() for batch in squares]
    views = Views(ViewsConfig(), 32, (0.5,) * 3, (0.2,) * 3)
    for batch in batches:
        draws = views.sample_params(8, generator(0, "views", batch.step)).crop_draws(views.settings.crop_ratio)
        for row, number in enumerate(batch.ids.tolist()):
            buffer = io.BytesIO()
            Image.fromarray(data.train.streamed.whole(number)).save(buffer, "PNG")
            expected = decode_crops(buffer.getvalue(), lambda h, w, row=row, draws=draws: draws.boxes(row, h, w), 32)
            assert np.array_equal(batch.images[:, row].numpy(), expected)
    for rank in range(2):
        for batch, part in zip(batches, loader(data, world=2, rank=rank, workers=1), strict=True):
            assert torch.equal(part.images, batch.images[:, 4 * rank : 4 * rank + 4])
    assert torch.equal(next(iter(loader(data, step=1))).images, batches[1].images)


def test_what_is_decoded_is_cropped_by_threads_and_sent_to_no_process(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = read(folder)
    alone = list(loader(data))
    monkeypatch.setattr(stream_loader, "DataLoader", None)
    for batch, other in zip(loader(data, workers=2), alone, strict=True):
        assert torch.equal(batch.ids, other.ids)
        assert torch.equal(batch.images, other.images)


def test_a_selection_is_cropped_too(folder: Any) -> None:
    data = read(folder)
    chosen = data.train.select(torch.tensor([1, 4, 5, 7, 8, 9, 11, 12]))
    assert torch.equal(chosen.take(torch.tensor([2])), data.train.take(torch.tensor([5])))
    assert list(chosen.names) == [data.train.names[i] for i in (1, 4, 5, 7, 8, 9, 11, 12)]
    (batch,) = loader(SimpleNamespace(train=chosen))
    assert sorted(batch.ids.tolist()) == list(range(8))


def test_decoded_once_and_damage_is_refused(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(folder)
    with monkeypatch.context() as patch:
        patch.setattr(decode, "decode_whole", None)
        second = read(folder)
    assert np.array_equal(first.train.streamed.whole(7), second.train.streamed.whole(7))
    file = second.train.streamed.images.file
    content = bytearray(file.read_bytes())
    content[10] ^= 255
    file.write_bytes(content)
    third = read(folder)
    third.train.streamed.whole(1)
    with pytest.raises(UserError, match="damaged: image 0 differs from its checksum"):
        third.train.take(torch.tensor([0]))
    (file.parent / "shapes.bin").write_bytes(b"")
    assert np.array_equal(read(folder).train.streamed.whole(0), np.asarray(Image.open(folder / "00.png")))


def test_orientation_and_modes(tmp_path: Path) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    upright = np.asarray(image.transpose(Image.Transpose.ROTATE_270))
    assert np.array_equal(decode_whole(tmp_path / "turned.png", 100), upright)
    content = (tmp_path / "turned.png").read_bytes()
    whole = decode_crops(content, lambda height, width: [(0, 0, height, width)], 30)
    assert decode_whole(tmp_path / "turned.png", 15).shape == (25, 15, 3)
    assert np.abs(whole[0].mean((1, 2)) - upright.mean((0, 1))).max() < 1
    Image.new("L", (20, 10), 7).save(tmp_path / "gray.jpg")
    assert decode_crops((tmp_path / "gray.jpg").read_bytes(), lambda h, w: [(0, 0, h, w)], 8).shape == (1, 3, 8, 8)
    Image.new("CMYK", (20, 10)).save(tmp_path / "cmyk.jpg")
    assert (decode_crops((tmp_path / "cmyk.jpg").read_bytes(), lambda h, w: [(0, 0, h, w)], 8) == 255).all()


@pytest.mark.parametrize("sides", [(500, 375), (1601, 1203), (64, 64)])
def test_simplejpeg_changes_no_pixel(sides: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    smooth = np.linspace(0, 255, sides[0] * sides[1] * 3).reshape(sides[1], sides[0], 3).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(smooth).save(buffer, "JPEG", quality=90)
    boxes = lambda height, width: [(0, 0, height, width), (height // 8, width // 9, height // 2, width // 2)]  # noqa: E731
    fast = decode_crops(buffer.getvalue(), boxes, 64)
    monkeypatch.setattr(decode, "simplejpeg", None)
    assert np.array_equal(fast, decode_crops(buffer.getvalue(), boxes, 64))


def test_a_truncated_jpeg_is_unreadable_with_and_without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(buffer, "JPEG")
    content = buffer.getvalue()[:-2000]
    for module in (decode.simplejpeg, None):
        monkeypatch.setattr(decode, "simplejpeg", module)
        with pytest.raises(decode.Unreadable):
            decode_crops(content, lambda height, width: [(0, 0, height, width)], 32)
