"""Shards: index, order, crops, interchange with webdataset, damage."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from psm.config.schema import ImagesConfig, ViewsConfig
from psm.data import load_dataset, shard_index
from psm.data.shard_files import expand_braces, is_shards, shard_addresses
from psm.data.shard_order import ShardOrder
from psm.data.shard_writer import write_shards
from psm.data.stream_loader import StreamLoader
from psm.utils.errors import UserError
from psm.utils.seeding import generator
from psm.views.functional import crop_boxes
from psm.views.transform import Views

webdataset = pytest.importorskip("webdataset")


def jpeg(value: Any, size: Any = (20, 16)) -> Any:
    """A gray image that tells its number."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (value, value, value)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def write(
    folder: Any, count: Any = 40, each: Any = 5, labels: Any = True, name: Any = "%06d.tar", start: Any = 0
) -> Any:
    """Shards as webdataset's own writer makes them."""
    folder.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(str(folder / name), maxcount=each, verbose=0) as writer:
        for number in range(start, start + count):
            sample = {"__key__": f"sample{number:03}", "jpg": jpeg(number)}
            writer.write(sample | ({"cls": number % 2} if labels else {}))
    return folder


def settings(tmp_path: Any, **more: Any) -> Any:
    return ImagesConfig(cache=str(tmp_path / "cache"), size=16, **more)


def read(tmp_path: Any, data: Any, **more: Any) -> Any:
    return load_dataset(data if isinstance(data, list) else str(data), settings(tmp_path, **more), progress=False)


def values(images: Any, ids: Any = None) -> Any:
    ids = torch.arange(len(images)) if ids is None else ids
    return [round(v) for v in images.take(ids).float().mean((1, 2, 3)).tolist()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{08..10}.tar", ["a-08.tar", "a-09.tar", "a-10.tar"]),
        ("{9..11}", ["9", "10", "11"]),
        ("{b,a}-{1..2}", ["b-1", "b-2", "a-1", "a-2"]),
        ("{2..1}{x}", ["2{x}", "1{x}"]),
    ],
)
def test_braces_expand_as_in_a_shell(text: Any, expected: Any) -> None:
    assert expand_braces(text) == expected


def test_what_is_taken_for_shards(tmp_path: Path) -> None:
    write(tmp_path / "s", 4, 2)
    (tmp_path / "s" / "classes.txt").touch()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.tar").touch()
    (tmp_path / "mixed" / "b.png").touch()
    assert [is_shards(str(tmp_path / name)) for name in ("s", "mixed", "x-{0..2}.tar")] == [True, False, True]
    assert is_shards("https://host/a.tar")
    names = [[Path(path).name for path in shard_addresses(str(tmp_path / "s" / text))] for text in (".", "*1.tar")]
    assert names == [["000000.tar", "000001.tar"], ["000001.tar"]]
    with pytest.raises(UserError, match="uncompressed"):
        shard_addresses("a.tar.gz")
    with pytest.raises(UserError, match="matches no shard"):
        shard_addresses(str(tmp_path / "nothing-*.tar"))


def test_what_webdataset_writes_is_read(tmp_path: Path) -> None:
    write(tmp_path / "s")
    data = read(tmp_path, tmp_path / "s" / "{000000..000007}.tar")
    numbers = [int(name[6:9]) for name in (*data.train.names, *data.test.names)]
    assert sorted(numbers) == list(range(40))
    assert values(data.train) + values(data.test) == numbers
    assert data.train.labels.tolist() == [int(name[6:9]) % 2 for name in data.train.names]
    assert (data.classes, data.name, data.size, len(data.test)) == (("0", "1"), "s", 16, 4)
    assert values(data.train, torch.tensor([3, 1, 3])) == [numbers[3], numbers[1], numbers[3]]


def test_what_is_written_here_webdataset_reads(tmp_path: Path) -> None:
    originals = {}
    for number in range(30):
        path = tmp_path / "photos" / ("cat" if number % 3 else "dog") / f"a.b {number}.jpeg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
        originals[f"{path.parent.name}/a_b {number}"] = (path.read_bytes(), int(path.parent.name == "dog"))
    written = write_shards(str(tmp_path / "photos"), str(tmp_path / "out" / "%06d.tar"), settings(tmp_path), 10_000)
    assert len(written.files) > 2
    assert written.images == 30
    stream = webdataset.WebDataset([str(file) for file in written.files], shardshuffle=False)
    found = {sample["__key__"]: (sample["jpg"], int(sample["cls"])) for sample in stream}
    assert found == originals
    data = read(tmp_path, tmp_path / "out")
    assert data.classes == ("cat", "dog")
    assert {name.rpartition(".")[0] for name in (*data.train.names, *data.test.names)} == set(originals)
    folder = read(tmp_path, tmp_path / "photos")
    assert torch.bincount(data.test.labels).tolist() == torch.bincount(folder.test.labels).tolist()


def test_a_test_split_is_written_and_read_as_one(tmp_path: Path) -> None:
    written = write_shards("shapes", str(tmp_path / "%06d.tar"), settings(tmp_path, limit=60), 1e9)
    assert [file.name for file in written.test_files] == ["test-000000.tar"]
    data = read(tmp_path, [str(file) for file in (*written.files, *written.test_files)])
    whole = read(tmp_path, "shapes", limit=60)
    assert (len(data.train), len(data.test), data.classes) == (60, 2000, whole.classes)
    by_name = {name: index for index, name in enumerate(data.train.names)}
    order = torch.tensor([by_name[f"image-{index}.png"] for index in range(60)])
    assert torch.equal(data.train.take(order), whole.train.take(torch.arange(60)))


def test_shards_are_never_overwritten_nor_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(4):
        (tmp_path / "photos" / f"{number}.jpg").write_bytes(jpeg(number))
    out = tmp_path / "new" / "out"
    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "addfile", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_shards(str(tmp_path / "photos"), str(out / "%06d.tar"), settings(tmp_path), 1e6)
    assert not (tmp_path / "new").exists()
    (tmp_path / "photos" / "bad.jpg").write_text("no image")
    with pytest.raises(UserError, match=r"1 of 5 images.*bad.jpg"):
        write_shards(str(tmp_path / "photos"), str(out / "%06d.tar"), settings(tmp_path), 1e6)
    assert not (tmp_path / "new").exists()
    allowed = settings(tmp_path, max_unreadable=0.5)
    assert write_shards(str(tmp_path / "photos"), str(out / "%06d.tar"), allowed, 1e6).images == 4
    for pattern, said in ((out / "%06d.tar", "exists"), (out / "a.tar", "must end"), (out / "%d.zip", "must end")):
        with pytest.raises(UserError, match=said):
            write_shards(str(tmp_path / "photos"), str(pattern), allowed, 1e6)
    with pytest.raises(UserError, match="shards already"):
        write_shards(str(out), str(tmp_path / "%06d.tar"), allowed, 1e6)


def test_the_index_is_built_once_and_follows_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "s", labels=False)
    indexed, read_tar = [], shard_index.read_tar
    monkeypatch.setattr(shard_index, "read_tar", lambda path: indexed.append(path.name) or read_tar(path))
    first = read(tmp_path, tmp_path / "s")
    assert sorted(indexed) == [f"{number:06}.tar" for number in range(8)]
    indexed.clear()
    assert list(read(tmp_path, tmp_path / "s").train.names) == list(first.train.names)
    assert indexed == []
    write(tmp_path / "other", 3, 3, labels=False, start=90)
    (tmp_path / "other" / "000000.tar").replace(tmp_path / "s" / "000003.tar")
    data = read(tmp_path, tmp_path / "s")
    assert indexed == ["000003.tar"]
    assert values(data.train) == [*range(15), 90, 91, 92, *range(20, 40)]
    for damaged in (b"", b"PK\x03\x04"):
        file = next((tmp_path / "cache").glob("shard-*.npz"))
        file.write_bytes(damaged)
        indexed.clear()
        assert len(read(tmp_path, tmp_path / "s").train) == 38
        assert len(indexed) == 1


def test_labels_of_json_and_samples_without_images(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(20):
            writer.write(
                {"__key__": f"{number:02}", "png": np.full((8, 8, 3), number, np.uint8), "json": {"label": number % 2}}
            )
        writer.write({"__key__": "text", "txt": "no image"})
    data = read(tmp_path, tmp_path / "a.tar")
    assert len(data.train) + len(data.test) == 20
    assert data.train.labels.tolist() == [int(name[:2]) % 2 for name in data.train.names]


def test_an_epoch_permutes_shards_and_mixes_within_windows() -> None:
    starts = np.array([0, 3, 7, 7, 12, 20])
    orders = [ShardOrder(starts, 2, seed=1, epoch=epoch) for epoch in (0, 0, 1)]
    whole = [order.ids(0, 20).tolist() for order in orders]
    assert sorted(whole[0]) == list(range(20))
    assert whole[0] == whole[1] != whole[2]
    assert whole[0] == [int(id) for first in range(0, 20, 3) for id in orders[1].ids(first, min(20, first + 3))]
    shard_of = np.searchsorted(starts, whole[0], side="right") - 1
    begin = 0
    for window, end in zip(orders[0].windows, orders[0].ends.tolist(), strict=True):
        assert set(shard_of[begin:end]) <= set(window.tolist())
        begin = end
    assert ShardOrder(starts, 2, seed=2, epoch=0).ids(0, 20).tolist() != whole[0]


def loader(
    data: Any, batch_size: Any = 8, step: Any = 0, rank: Any = 0, world: Any = 1, workers: Any = 0, size: Any = 8
) -> Any:
    views = Views(ViewsConfig(size=size), data.size, (0.5,) * 3, (0.2,) * 3)
    rows = slice(rank * batch_size // world, (rank + 1) * batch_size // world)

    def draws(step: Any) -> Any:
        params = views.sample_params(batch_size, generator(0, "views", step), rows=rows)
        return params.crop_draws(views.settings.crop_ratio)

    return StreamLoader(
        data.train.streamed, batch_size, 5, draws, size, lambda: step, rank=rank, world=world, workers=workers
    )


def same(one: Any, other: Any) -> bool:
    return one.step == other.step and torch.equal(one.ids, other.ids) and torch.equal(one.images, other.images)


def test_batches_do_not_depend_on_ranks_workers_or_resuming(tmp_path: Path) -> None:
    write(tmp_path / "s", labels=False)
    data = read(tmp_path, tmp_path / "s", window=2)
    whole = list(loader(data))
    assert [batch.step for batch in whole] == list(range(5))
    assert whole[0].images.shape == (2, 8, 3, 8, 8)
    assert torch.cat([batch.ids for batch in whole]).sort().values.tolist() == list(range(40))
    for batch in whole:  # gray images: a crop has the value of its image
        assert (batch.images.float().mean((2, 3, 4)).round().long() == batch.ids).all()
    for rank in range(2):
        for batch, part in zip(whole, loader(data, rank=rank, world=2), strict=True):
            rows = slice(4 * rank, 4 * rank + 4)
            assert torch.equal(part.ids, batch.ids[rows])
            assert torch.equal(part.images, batch.images[:, rows])
    assert all(same(*pair) for pair in zip(whole[3:], loader(data, step=3), strict=True))
    assert all(same(*pair) for pair in zip(whole, loader(data, workers=2), strict=True))
    following = list(loader(data, step=5))
    assert following[0].step == 5
    assert torch.cat([b.ids for b in following]).tolist() != torch.cat([b.ids for b in whole]).tolist()


def test_crops_are_those_of_the_views_from_the_whole_image(tmp_path: Path) -> None:
    """What the views would crop from the decoded image, the loader crops while decoding."""
    random = np.random.default_rng(0)
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(8):
            pixels = random.integers(0, 256, (40 + 5 * number, 70 - 4 * number, 3), dtype=np.uint8)
            writer.write({"__key__": f"{number}", "png": pixels})
    data = read(tmp_path, tmp_path / "a.tar")
    (batch,) = loader(data, size=24)
    views = Views(ViewsConfig(size=24, flip=0.0), data.size, (0.5,) * 3, (0.2,) * 3)
    params = views.sample_params(8, generator(0, "views", 0))
    applied = views.apply(batch.images, params)
    for row, number in enumerate(batch.ids.tolist()):
        content = data.train.streamed._content(number)
        whole = torch.from_numpy(np.array(Image.open(io.BytesIO(content)))).permute(2, 0, 1)[None]
        expected = views.apply(whole, params[row : row + 1])[:, 0]
        assert (applied[:, row] - expected).abs().mean() < 0.02  # rounding to 8 bits between crop and color


def test_boxes_of_single_images_are_those_of_batches() -> None:
    views = Views(ViewsConfig(), 32, (0.5,) * 3, (0.2,) * 3)
    params = views.sample_params(300, torch.Generator().manual_seed(3))
    draws = params.crop_draws(views.settings.crop_ratio)
    for height, width in ((32, 32), (375, 500), (9, 2000), (1, 1), (1500, 3)):
        boxes = crop_boxes(params.crop_scale, params.crop_ratio, params.crop_position, height, width, draws.ratio_range)
        together = torch.stack(boxes, -1)
        alone = torch.tensor([draws.boxes(row, height, width) for row in range(300)]).transpose(0, 1)
        assert torch.equal(together.long(), alone)


def damage(path: Any, how: Any) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "cut at a file":
        path.write_bytes(content[: content.index(b"sample013")])
    elif how == "overwritten":
        middle = content.index(b"sample012")
        path.write_bytes(content[:middle] + b"\xff" * 700 + content[middle + 700 :])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "no tar":
        path.write_bytes(b"hello" * 500)
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("cut", "damaged at byte|cut off"),
        ("cut at a file", "damaged at byte|cut off"),
        ("overwritten", "damaged at byte"),
        ("empty", "empty"),
        ("no tar", "not a tar file"),
        ("missing", "No such file"),
    ],
)
def test_damaged_shards_count_as_unreadable(tmp_path: Path, how: Any, reason: Any) -> None:
    write(tmp_path / "s", labels=False)
    damage(tmp_path / "s" / "000002.tar", how)
    data = str(tmp_path / "s" / "{000000..000007}.tar")
    with pytest.raises(UserError, match=rf"of 40 images in 8 shards cannot be read.*000002.tar \(.*({reason})"):
        read(tmp_path, data, max_unreadable=0.01)
    found = read(tmp_path, data, max_unreadable=0.2)
    assert 35 <= len(found.train) < 40
    assert [Path(file).name for file, _ in found.unreadable] == ["000002.tar"]
    damage(tmp_path / "s" / "000001.tar", "no tar")
    with pytest.raises(UserError, match="no shard can be read"):
        read(tmp_path, tmp_path / "s" / "000001.tar", max_unreadable=1.0)


def spoil(path: Any, number: Any) -> None:
    """Overwrite an image's content, not its header."""
    content = bytearray(path.read_bytes())
    start = content.index(b"sample%03d.jpg" % number) + 512
    content[start : start + 300] = bytes(300)
    path.write_bytes(bytes(content))


def test_an_unreadable_image_is_replaced_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "s", labels=False)
    spoil(tmp_path / "s" / "000001.tar", 7)
    data = read(tmp_path, tmp_path / "s", window=2)
    batches = list(loader(data))
    ids = torch.cat([batch.ids for batch in batches])
    assert sorted(ids.tolist()) == sorted([*range(7), *range(8, 40), 6])
    for batch in batches:
        assert (batch.images.float().mean((2, 3, 4)).round().long() == batch.ids).all()
    assert [Path(file).name for file, _ in data.train.streamed.unreadable] == ["sample007.jpg"]
    assert "sample007.jpg cannot be read" in caplog.text
    strict = read(tmp_path, tmp_path / "s", window=2, max_unreadable=0.01)
    for workers in (0, 1):
        with pytest.raises(UserError, match=r"1 of 40 images in the shards cannot be read.*sample007"):
            list(loader(strict, workers=workers))


def test_in_evaluation_an_image_of_the_same_class_stands_in(tmp_path: Path) -> None:
    write(tmp_path / "s")
    spoil(tmp_path / "s" / "000001.tar", 7)
    data = read(tmp_path, tmp_path / "s")
    every = values(data.train) + values(data.test)
    labels = data.train.labels.tolist() + data.test.labels.tolist()
    assert [value % 2 for value in every] == labels
    assert 7 not in every


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_changed_since_the_index(tmp_path: Path, workers: Any) -> None:
    write(tmp_path / "s", labels=False)
    allowed = read(tmp_path, tmp_path / "s", window=2, max_unreadable=0.2)
    strict = read(tmp_path, tmp_path / "s", window=2, max_unreadable=0.1)
    write(tmp_path / "t", 6, 6, labels=False, start=90)
    (tmp_path / "t" / "000000.tar").replace(tmp_path / "s" / "000002.tar")
    ids = torch.cat([batch.ids for batch in loader(allowed, workers=workers)])
    assert not set(ids.tolist()) & set(range(10, 15))
    assert "changed since it was indexed" in dict(allowed.train.streamed.unreadable)[str(tmp_path / "s" / "000002.tar")]
    with pytest.raises(UserError, match=r"5 of 40 images.*changed since it was indexed"):
        list(loader(strict, workers=workers))


def test_shards_and_folders_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "s", 4, 2)
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match=r"is shards and .*photos is not"):
        read(tmp_path, [str(tmp_path / "s"), str(tmp_path / "photos")])
    with pytest.raises(UserError, match="named twice"):
        read(tmp_path, [str(tmp_path / "s"), str(tmp_path / "s" / "000000.tar")])


def test_held_out_images_of_shards_are_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "s")
    whole = read(tmp_path, tmp_path / "s")
    data = read(tmp_path, tmp_path / "s", holdout=0.25, window=2)
    assert len(data.train) + len(data.test) == len(whole.train)
    assert set(data.train.names) | set(data.test.names) == set(whole.train.names)
    for batch in loader(data):
        numbers = torch.tensor([int(data.train.names[i][6:9]) for i in batch.ids.tolist()])
        assert (batch.images.float().mean((2, 3, 4)).round().long() == numbers).all()
    with pytest.raises(ValueError, match="ascending"):
        whole.train.select(torch.tensor([3, 1]))


def test_weak_views_of_crops_have_no_color_changes(tmp_path: Path) -> None:
    write(tmp_path / "s", labels=False)
    data = read(tmp_path, tmp_path / "s")
    (batch, *_) = loader(data)
    views = Views(ViewsConfig(size=8), data.size, (0.0,) * 3, (1.0,) * 3)
    params = views.sample_params(8, generator(0, "views", 0))
    weak = views.apply(batch.images, params, weak=True)
    mirrored = torch.where(params.flip[..., None, None, None], batch.images.flip(-1), batch.images)
    assert torch.allclose(weak, mirrored.float() / 255, atol=1e-6)
    assert not torch.allclose(views.apply(batch.images, params), weak, atol=1e-2)


def test_limit_and_sample_take_a_fair_part(tmp_path: Path) -> None:
    write(tmp_path / "s")
    data = read(tmp_path, tmp_path / "s", limit=10)
    assert torch.bincount(data.train.labels).tolist() == [5, 5]
    assert data.train.sample(4).tolist() == [0, 3, 6, 9]
