"""The memory-mapped cache: equal to memory, built once, and whole whatever happens while it is built."""

import multiprocessing
import pickle
import shutil
import signal
import time
import zlib
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from psm.config.schema import ImagesConfig
from psm.data import decode, load_dataset
from psm.data.cache import CacheEntry
from psm.utils.errors import ResourceError, UserError

FORK = multiprocessing.get_context("fork") if "fork" in multiprocessing.get_all_start_methods() else None
needs_fork = pytest.mark.skipif(FORK is None, reason="child processes are forked")
SMALL = 1e-7  # GB: everything goes through the cache


@pytest.fixture
def root(tmp_path: Path) -> Any:
    generator = np.random.default_rng(0)
    for kind in ("a", "b"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        for number in range(30):
            pixels = generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / kind / f"{number:02}.png")
    (tmp_path / "images" / "b" / "05.png").write_bytes(b"")
    return tmp_path / "images"


def read(root: Any, cache: Any, **settings: Any) -> Any:
    settings = {"memory": SMALL, "size": 8} | settings
    return load_dataset(str(root), ImagesConfig(cache=str(cache), **settings), progress=False)


def entries(cache: Any) -> Any:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def assert_same(one: Any, other: Any) -> None:
    for part, expected in ((one.train, other.train), (one.test, other.test)):
        everything = torch.arange(len(expected))
        assert len(part) == len(expected)
        assert torch.equal(part.take(everything), expected.take(everything))
        assert torch.equal(part.labels, expected.labels)
    assert (one.classes, one.unreadable) == (other.classes, other.unreadable)


def test_equal_to_memory_and_built_once(root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    in_memory = read(root, cache, memory=1.0)
    assert not cache.exists()
    mapped = read(root, cache)
    assert (mapped.train.mapped, in_memory.train.mapped) == (True, False)
    assert_same(mapped, in_memory)
    assert len(mapped.unreadable) == 1
    monkeypatch.setattr(decode, "decode", None)  # a second decoding would fail
    assert_same(read(root, cache), in_memory)
    assert len(entries(cache)) == 2


@pytest.mark.parametrize("name", ["shapes", "cifar"])
def test_other_sources_use_it_too(tmp_path: Path, name: str) -> None:
    if name == "cifar":
        folder = tmp_path / "cifar-10-batches-bin"
        folder.mkdir()
        rows = np.random.default_rng(1).integers(0, 10, (4, 3073), dtype=np.uint8)
        for file in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
            rows.tofile(folder / f"{file}.bin")
        (folder / "batches.meta.txt").write_text("\n".join("abcdefghij"))
        name = str(folder)
    settings = {"limit": 20, "size": 16}
    mapped = load_dataset(name, ImagesConfig(memory=SMALL, cache=str(tmp_path / "cache"), **settings), progress=False)
    assert mapped.train.mapped
    assert_same(mapped, load_dataset(name, ImagesConfig(**settings), progress=False))


def test_changed_files_and_sizes_are_rebuilt(root: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = read(root, cache)
    Image.new("RGB", (12, 12), (9, 9, 9)).save(root / "a" / "00.png")
    after = read(root, cache)
    assert_same(after, read(root, cache, memory=1.0))
    everything = torch.arange(len(before.train))
    whole_before = torch.cat([before.train.take(everything), before.test.take(torch.arange(len(before.test)))])
    whole_after = torch.cat([after.train.take(everything), after.test.take(torch.arange(len(after.test)))])
    assert (whole_before != whole_after).flatten(1).any(dim=1).sum() == 1
    assert read(root, cache, size=10).size == 10


HARMS = ["shorten", "no manifest", "bad manifest", "changed manifest", "no checksums", "changed checksums"]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_entry_is_rebuilt(root: Any, tmp_path: Path, harm: Any) -> None:
    cache = tmp_path / "cache"
    read(root, cache)
    for name in entries(cache):
        if harm == "shorten":
            with (cache / name / "pixels.bin").open("r+b") as file:
                file.truncate(100)
        elif harm == "no manifest":
            (cache / name / "manifest.json").unlink()
        elif harm == "bad manifest":
            (cache / name / "manifest.json").write_text("{")
        elif harm == "changed manifest":
            manifest = (cache / name / "manifest.json").read_text()
            (cache / name / "manifest.json").write_text(manifest.replace("[]", '[[1, "x"]]').replace("empty", "full"))
        elif harm == "no checksums":
            (cache / name / "checksums.bin").unlink()
        else:
            overwrite(cache / name / "checksums.bin", 4, b"\0\0\0\0")
    assert_same(read(root, cache), read(root, cache, memory=1.0))


def overwrite(file: Any, offset: Any, content: Any) -> None:
    with file.open("r+b") as handle:
        handle.seek(offset)
        handle.write(content)


@pytest.mark.parametrize("harm", ["zeros", "one bit"])
def test_damaged_pixels_are_refused_when_first_read(root: Any, tmp_path: Path, harm: Any) -> None:
    """Only the damaged image is: verifying reads nothing that is not asked for."""
    cache = tmp_path / "cache"
    before = read(root, cache)
    whole = before.train.take(torch.arange(len(before.train)))
    entry = next(
        cache / name for name in entries(cache) if (cache / name / "pixels.bin").stat().st_size == whole.numel()
    )
    damaged = 7
    image = whole[damaged].numpy().tobytes()
    changed = bytes(len(image)) if harm == "zeros" else bytes([image[0] ^ 1])
    overwrite(entry / "pixels.bin", damaged * len(image), changed)
    data = read(root, cache)
    others = torch.tensor([i for i in range(len(data.train)) if i != damaged])
    assert torch.equal(data.train.take(others), whole[others])
    name = data.train.name(damaged)
    assert name.endswith(".png")
    with pytest.raises(UserError, match=rf"{entry}/pixels.bin is damaged: {name} differs .*Remove the folder {entry} "):
        data.train.take(torch.tensor([3, damaged]))
    shutil.rmtree(entry)
    assert_same(read(root, cache), read(root, cache, memory=1.0))


def test_each_image_is_verified_once(root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(root, tmp_path / "cache")
    verified = []
    crc32 = zlib.crc32
    data = read(root, tmp_path / "cache")
    monkeypatch.setattr(zlib, "crc32", lambda content: verified.append(content) or crc32(content))
    for _ in range(2):
        data.train.take(torch.tensor([0, 5, 5]))
    assert len(verified) == 2


def test_a_mapped_store_is_pickled_by_the_name_of_its_file(root: Any, tmp_path: Path) -> None:
    """Another process maps the file, rather than receiving all of its pixels."""
    train = read(root, tmp_path / "cache").train
    sent = pickle.dumps(train)
    assert len(sent) < train.take(torch.arange(len(train))).numel()
    again = pickle.loads(sent)
    assert again.mapped
    assert torch.equal(again.take(torch.arange(len(train))), train.take(torch.arange(len(train))))


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> Any:
        yield np.zeros((3, 3, 8, 8), dtype=np.uint8), []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CacheEntry(tmp_path, "name", 8).open(chunks, 1000)
    assert entries(tmp_path) == []


def test_a_full_disk_is_refused_before_any_work(root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(decode, "decode", None)
    with pytest.raises(ResourceError, match=r"need .* GB .* 0.0 GB are free; set images.cache"):
        read(root, tmp_path / "cache")
    assert entries(tmp_path / "cache") == []


def test_a_disk_that_fills_up_on_the_way(tmp_path: Path) -> None:
    def chunks() -> Any:
        raise OSError(28, "No space left on device")
        yield

    with pytest.raises(ResourceError, match=r"No space left.*images.cache"):
        CacheEntry(tmp_path, "name", 8).open(chunks, 1000)
    assert entries(tmp_path) == []


def test_a_cache_folder_that_cannot_be_made(root: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot be made.*images.cache"):
        read(root, tmp_path / "file" / "cache")


def build(root: Any, cache: Any, slow: Any) -> None:
    quick = decode.decode

    def dawdle(path: Any, size: Any) -> Any:
        time.sleep(slow)
        return quick(path, size)

    decode.decode = dawdle  # in the child process alone
    read(root, cache)


def start_build(root: Any, cache: Any, slow: Any) -> Any:
    process = FORK.Process(target=build, args=(root, cache, slow), daemon=True)
    process.start()
    return process


def finish(process: Any) -> Any:
    process.join(timeout=60)
    return process.exitcode


def wait_for(condition: Any) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def parts(cache: Path) -> Any:
    return list(cache.glob("*.part"))


@needs_fork
def test_a_killed_build_is_repeated_from_scratch(root: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    process = start_build(root, cache, slow=1.0)
    wait_for(lambda: parts(cache))
    process.kill()
    assert finish(process) == -signal.SIGKILL
    assert parts(cache), "the kill came too late to test anything"
    (cache / "stranger.part").mkdir()  # as a killed build of another set would leave
    assert_same(read(root, cache), read(root, cache, memory=1.0))
    assert not parts(cache)


@needs_fork
def test_two_processes_at_once_build_one_entry(root: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    processes = [start_build(root, cache, slow=0.01) for _ in range(2)]
    for process in processes:
        assert finish(process) == 0
    assert len(entries(cache)) == 2
    assert_same(read(root, cache), read(root, cache, memory=1.0))


@needs_fork
def test_a_build_under_way_is_not_taken_for_a_leftover(root: Any, tmp_path: Path) -> None:
    """Another set, built meanwhile, cleans up after dead builds but spares the living."""
    cache = tmp_path / "cache"
    process = start_build(root, cache, slow=0.05)
    wait_for(lambda: parts(cache))
    running = parts(cache)[0]
    read(root, cache, size=10)
    assert running.exists() or running.with_suffix("").exists()
    assert finish(process) == 0
