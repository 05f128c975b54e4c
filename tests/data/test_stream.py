"""Images one after another: the same ones as a loaded data set, whatever their split, without holding them."""

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import linux_threads, native_threads, save_images, using
from psm.config.schema import ImagesConfig
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.data.stream import ImageStream, image_stream
from psm.utils.errors import UserError


def opened(data: object, **keys: object) -> tuple[ImageStream, np.ndarray]:
    """A stream and all its images."""
    with image_stream(data, ImagesConfig(**keys), progress=False) as stream:
        pixels, failures = stream.read(np.arange(len(stream)))
        assert not failures
    return stream, pixels


def test_a_labeled_folder_has_every_image_once_with_the_label_of_its_folder(tmp_path: Path) -> None:
    names = [f"{kind}/{i}.png" for kind in ("ant", "bee") for i in range(6)]
    save_images(tmp_path, names)
    stream, pixels = opened(tmp_path, size=16)
    assert list(stream.names) == sorted(names)
    assert [stream.classes[i] for i in stream.labels] == [name[:3] for name in sorted(names)]
    data = load_dataset(str(tmp_path), ImagesConfig(size=16), progress=False)
    for store in (data.train, data.test):
        for row, name in enumerate(store.names):
            place = list(stream.names).index(name)
            assert torch.equal(store.take(torch.tensor([row]))[0], torch.from_numpy(pixels[place]))
            assert stream.labels[place] == store.labels[row]


def test_test_folders_are_read_too_and_images_outside_the_layout_have_no_label(tmp_path: Path) -> None:
    save_images(tmp_path, ["train/a/1.png", "train/a/2.png", "train/b/1.png", "test/b/9.png", "test/loose.png"])
    save_images(tmp_path, ["extra/a/1.png", "test/unknown/1.png"])
    stream, _ = opened(tmp_path, size=16)
    labels = dict(zip(stream.names, stream.labels.tolist(), strict=True))
    assert labels == {
        "train/a/1.png": 0,
        "train/a/2.png": 0,
        "train/b/1.png": 1,
        "test/b/9.png": 1,
        "test/loose.png": -1,
        "test/unknown/1.png": -1,
        "extra/a/1.png": -1,
    }


def test_folders_without_classes_have_no_labels(tmp_path: Path) -> None:
    save_images(tmp_path / "flat", ["1.png", "2.png"])
    save_images(tmp_path / "albums", ["a/1.png", "b/2.png", "c/3.png"])
    for folder in ("flat", "albums"):
        stream, _ = opened(tmp_path / folder, size=16)
        assert (stream.labels, stream.classes) == (None, ())
    labeled, _ = opened(tmp_path / "albums", size=16, labels="none")
    assert labeled.labels is None


def test_tiny_imagenet_has_labels_of_train_and_val(tmp_path: Path) -> None:
    save_images(tmp_path, [f"train/{wnid}/images/{wnid}_{i}.png" for wnid in ("n1", "n2") for i in range(2)])
    save_images(tmp_path, ["val/images/v0.png", "val/images/v1.png", "test/images/t0.png"])
    (tmp_path / "val" / "val_annotations.txt").write_text("v0.png\tn2\t0\t0\t1\t1\nv1.png\tn3\t0\t0\t1\t1\n")
    (tmp_path / "words.txt").write_text("n1\tcat, pet\nn2\tdog\n")
    (tmp_path / "wnids.txt").write_text("n1\nn2\n")
    stream, _ = opened(tmp_path, size=16)
    labels = dict(zip(stream.names, stream.labels.tolist(), strict=True))
    assert stream.classes == ("cat", "dog")
    assert labels["train/n2/images/n2_0.png"] == labels["val/images/v0.png"] == 1
    assert labels["val/images/v1.png"] == labels["test/images/t0.png"] == -1


def test_a_loaded_data_set_is_read_train_first(tmp_path: Path) -> None:
    data = load_dataset("shapes", ImagesConfig(limit=40, size=16), progress=False)
    stream, _ = opened(data)
    assert len(stream) == 40 + len(data.test)
    assert (stream.names[0], stream.names[40]) == ("train/0", "test/0")
    indices = np.array([39, 40, 2, 41])
    pixels = stream.read(indices)[0]
    both = torch.cat([data.train.take(torch.tensor([39, 2])), data.test.take(torch.tensor([0, 1]))]).numpy()
    assert np.array_equal(pixels, both[[0, 2, 1, 3]])
    labels = [*data.train.labels.tolist(), *data.test.labels.tolist()]
    assert stream.labels.tolist() == labels
    named, _ = opened("shapes", size=16, limit=30)
    assert len(named) == 30


def test_unreadable_files_are_failures_by_their_index(tmp_path: Path) -> None:
    save_images(tmp_path, ["a.png", "c.png"])
    (tmp_path / "b.png").write_bytes(b"no image")
    with image_stream(tmp_path, ImagesConfig(size=8), progress=False) as stream:
        pixels, failures = stream.read(np.array([2, 1, 0]))
    assert pixels.shape == (2, 3, 8, 8)
    assert [index for index, _ in failures] == [1]


def test_the_fingerprint_follows_the_images_and_the_size(tmp_path: Path) -> None:
    save_images(tmp_path, ["a.png", "b.png"])
    first = opened(tmp_path, size=16)[0].fingerprint
    assert opened(tmp_path, size=16)[0].fingerprint == first
    assert opened(tmp_path, size=8)[0].fingerprint != first
    save_images(tmp_path, ["b.png"], seed=5, side=25)
    assert opened(tmp_path, size=16)[0].fingerprint != first
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    one, other = (ImageDataset("mine", ImageStore(x), None, ()) for x in (images, images.flip(3)))
    assert opened(one)[0].fingerprint != opened(other)[0].fingerprint


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no image"):
        opened(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        opened(tmp_path / "no" / "folder")


def test_lists_of_files_and_several_folders(tmp_path: Path) -> None:
    save_images(tmp_path / "a", ["x/1.png", "y/2.png"])
    save_images(tmp_path / "b", ["x/3.png"])
    listed = tmp_path / "list.csv"
    listed.write_text("path,label,split\na/x/1.png,cat,train\nb/x/3.png,dog,train\na/y/2.png,cat,test\n")
    stream, pixels = opened(listed, size=16)
    assert [Path(name).name for name in stream.names] == ["1.png", "3.png", "2.png"]
    assert [stream.classes[label] for label in stream.labels] == ["cat", "dog", "cat"]
    assert stream.root is None
    both, joined = opened([str(tmp_path / "a"), str(tmp_path / "b")], size=16, labels="none")
    assert [Path(name).name for name in both.names] == ["1.png", "2.png", "3.png"]
    assert np.array_equal(joined[[0, 2, 1]], pixels)


def test_images_of_shards_that_cannot_be_read_are_failures_and_not_replaced(tmp_path: Path) -> None:
    save_images(tmp_path / "images", [f"{i}.png" for i in range(6)])
    for number, members in enumerate((range(3), range(3, 6))):
        with tarfile.open(tmp_path / f"set-{number}.tar", "w") as shard:
            for i in members:
                content = b"no image" if i == 4 else (tmp_path / "images" / f"{i}.png").read_bytes()
                member = tarfile.TarInfo(f"{i}.png")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
    config = ImagesConfig(size=16, cache=str(tmp_path / "cache"), max_unreadable=1)
    with image_stream(str(tmp_path / "set-{0..1}.tar"), config, progress=False) as stream:
        pixels, failures = stream.read(np.array([5, 4, 0]))
    assert len(stream) == 6
    assert [index for index, _ in failures] == [4]
    _, expected = opened(tmp_path / "images", size=16)
    assert np.array_equal(pixels, expected[[5, 0]])


def test_hugging_face_datasets_are_decoded_as_they_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    save_images(tmp_path / "images", [f"{i}.png" for i in range(5)])
    contents = [{"bytes": (tmp_path / "images" / f"{i}.png").read_bytes(), "path": None} for i in range(5)]
    contents[3] = {"bytes": b"no image", "path": None}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = datasets.Dataset.from_dict({"image": contents, "label": [0, 1, 0, 1, 1]}, features=features)
    rows.save_to_disk(str(tmp_path / "saved"))
    with image_stream(f"hf:{tmp_path / 'saved'}", ImagesConfig(size=16), progress=False) as stream:
        pixels, failures = stream.read(np.arange(5))
    assert [stream.classes[label] for label in stream.labels] == ["cat", "dog", "cat", "dog", "dog"]
    assert [index for index, _ in failures] == [3]
    _, expected = opened(tmp_path / "images", size=16)
    assert np.array_equal(pixels, expected[[0, 1, 2, 4]])


@linux_threads
def test_a_reader_of_a_loaded_set_starts_no_team_of_openmp_threads() -> None:
    """Beside a second team the threads of the network would sleep between its operations."""
    loaded = ImageDataset("loaded", ImageStore(np.zeros((512, 3, 32, 32), dtype=np.uint8)), None, ())
    with (
        using(2),
        image_stream(loaded, ImagesConfig(), progress=False) as stream,
        ThreadPoolExecutor(1) as reader,
    ):
        torch.ones(2**17).sum()
        reader.submit(int).result()
        before = native_threads()
        reader.submit(stream.read, np.arange(512)).result()
        assert native_threads() <= before
