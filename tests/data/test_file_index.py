"""The index of a large folder: used while nothing changed, and never trusted beyond that."""

import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from psm.config.schema import ImagesConfig
from psm.data import decode, file_index, load_dataset, materialize
from psm.data.file_index import list_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Twelve images in three folders, last changed long ago; so few are indexed here."""
    monkeypatch.setattr(file_index, "INDEXED_FROM", 3)
    monkeypatch.setattr(materialize, "KEPT_FROM", 3)
    root = tmp_path / "photos"
    for number in range(12):
        path = root / f"{number % 3}" / f"{number}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
    age(root)
    return root


def age(root: Any) -> None:
    for path in [root, *root.rglob("*")]:
        os.utime(path, (1e9, 1e9))


def settings(root: Any) -> Any:
    return ImagesConfig(cache=str(root.parent / "cache"), size=8)


def walks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts how often a folder is listed."""
    walked, walk = [], file_index._walk
    monkeypatch.setattr(file_index, "_walk", lambda root, below: walked.append(root) or walk(root, below))
    return walked


def test_the_second_start_lists_and_decodes_nothing(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_dataset(str(folder), settings(folder), progress=False)
    walked, decoded = walks(monkeypatch), []
    monkeypatch.setattr(decode, "decode", lambda *given: decoded.append(given))
    second = load_dataset(str(folder), settings(folder), progress=False)
    assert (walked, decoded) == ([], [])
    assert list(second.train.names) == list(first.train.names)
    assert second.train.labels.tolist() == first.train.labels.tolist()
    assert (second.train._pixels == first.train._pixels).all()
    assert not second.train.mapped


def replace_content(root: Any) -> None:
    Image.new("RGB", (9, 9), (99, 0, 0)).save(root / "0" / "0.bmp")


def touch(root: Any) -> None:
    os.utime(root / "1" / "1.bmp", (2e9, 2e9))


def add(root: Any) -> None:
    Image.new("RGB", (8, 8)).save(root / "2" / "new.bmp")


def remove(root: Any) -> None:
    (root / "2" / "11.bmp").unlink()


def rename(root: Any) -> None:
    (root / "2" / "11.bmp").rename(root / "2" / "10.bmp")


def add_folder(root: Any) -> None:
    (root / "3").mkdir()
    Image.new("RGB", (8, 8)).save(root / "3" / "new.bmp")


@pytest.mark.parametrize("change", [replace_content, touch, add, remove, rename, add_folder])
def test_a_change_is_seen(folder: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    list_files(folder, "", settings(folder))
    change(folder)
    walked = walks(monkeypatch)
    files = list_files(folder, "", settings(folder))
    fresh = list_files(folder)
    assert len(walked) == 2
    assert list(files.paths) == list(fresh.paths)
    assert (files.changed == fresh.changed).all()
    assert (files.bytes == fresh.bytes).all()


def test_a_folder_that_may_still_change_is_not_indexed(folder: Any) -> None:
    add(folder)
    list_files(folder, "", settings(folder))
    assert not list((folder.parent / "cache").glob("files-*")) if (folder.parent / "cache").exists() else True


def test_a_damaged_index_is_written_anew(folder: Any) -> None:
    expected = list_files(folder, "", settings(folder))
    (index,) = (folder.parent / "cache").glob("files-*")
    whole = index.read_bytes()
    for damaged in (b"", whole[:100], whole.replace(b"11.bmp", b"00.bmp")):
        index.write_bytes(damaged)
        assert list(list_files(folder, "", settings(folder)).paths) == list(expected.paths)
        assert index.read_bytes() == whole


def test_small_folders_leave_nothing_behind(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_index, "INDEXED_FROM", 100)
    monkeypatch.setattr(materialize, "KEPT_FROM", 100)
    load_dataset(str(folder), settings(folder), progress=False)
    assert not (folder.parent / "cache").exists()


def test_processes_of_one_machine_decode_once(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``shared`` even a small set is decoded by the first process alone, and all map the same file."""
    monkeypatch.setattr(materialize, "KEPT_FROM", 100)
    first = load_dataset(str(folder), settings(folder), progress=False, shared=True)
    monkeypatch.setattr(decode, "decode", None)
    second = load_dataset(str(folder), settings(folder), progress=False, shared=True)
    assert first.train._pixels.base.filename == second.train._pixels.base.filename


def test_a_cache_that_cannot_be_written_is_no_obstacle(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    (folder.parent / "cache").write_text("a file stands in the way")
    data = load_dataset(str(folder), settings(folder), progress=False)
    assert len(data.train) + len(data.test) == 12
    assert "decoded at every start" in caplog.text
