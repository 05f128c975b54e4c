"""Names, paths, settings, and the registry."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from psm.config.schema import ImagesConfig
from psm.data import load_dataset
from psm.data.registry import ARCHIVES, NAMES, list_datasets
from psm.utils.errors import UserError


def refusal(data: Any) -> Any:
    with pytest.raises(UserError) as caught:
        load_dataset(str(data))
    return str(caught.value)


def test_an_unknown_name_suggests_the_nearest_and_only_a_near_one() -> None:
    for given, nearest in (("cifr10", "cifar10"), ("TinyImageNet", "tiny-imagenet")):
        message = refusal(given)
        assert "shapes, cifar10, cifar100, tiny-imagenet" in message
        assert f"(did you mean {nearest!r}?)" in message
    message = refusal("photographs")
    assert "neither a folder nor one of" in message
    assert "did you mean" not in message


def test_a_deleted_folder_is_said_to_be_missing(tmp_path: Path) -> None:
    """A path is not taken for a misspelled name, however near it is to one."""
    folder = tmp_path / "cifar1"
    folder.mkdir()
    folder.rmdir()
    for path in (folder, "~/no such folder", "./cifar1"):
        message = refusal(path)
        assert f"data={path} does not exist (any more)" in message
        assert "did you mean" not in message


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_a_link_to_itself_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "does not exist" in refusal(tmp_path / "loop")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(b"x")
    with pytest.raises(UserError, match="is a file"):
        load_dataset(str(tmp_path / "x.jpg"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", 7),
        ("size", -1),
        ("limit", 1),
        ("limit", 0),
        ("split", "papper"),
        ("labels", "maybe"),
        ("test_share", 0.0),
        ("test_share", 1.0),
        ("test_share", float("nan")),
        ("max_unreadable", -0.1),
        ("max_unreadable", 1.1),
        ("memory", 0.0),
        ("memory", float("nan")),
    ],
)
def test_settings_that_mean_nothing(key: Any, value: Any) -> None:
    with pytest.raises(UserError, match=rf"images\.{key}={value} .*(: give|: choose|not finite)"):
        load_dataset("shapes", ImagesConfig(**{key: value}))


def test_the_registry_lists_every_name() -> None:
    rows = list_datasets()
    assert tuple(row.name for row in rows) == NAMES
    assert {row.name: row.url for row in rows if row.url} == {name: archive.url for name, archive in ARCHIVES.items()}
    shapes = load_dataset("shapes", progress=False)
    assert rows[0][:4] == ("shapes", len(shapes.train) + len(shapes.test), len(shapes.classes), shapes.size)


def test_the_registry_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, psm.data.registry; print({'torch', 'numpy', 'PIL', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
