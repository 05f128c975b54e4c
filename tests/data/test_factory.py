"""Names, paths, settings, and the catalog."""

import subprocess
import sys

import pytest

from psm.config.schema import ImagesConfig
from psm.data import load_dataset
from psm.data.registry import ARCHIVES, NAMES, published
from psm.utils.errors import UserError


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UserError, match=r"shapes, cifar10, cifar100, tiny-imagenet.*did you mean 'cifar10'\?"):
        load_dataset("cifr10")
    with pytest.raises(UserError, match=r"did you mean 'tiny-imagenet'\?"):
        load_dataset("TinyImageNet")
    with pytest.raises(UserError) as caught:
        load_dataset("/no/such/folder")
    assert "Did you mean" not in str(caught.value)


def test_a_file_is_not_a_folder(tmp_path):
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
def test_settings_that_mean_nothing(key, value):
    with pytest.raises(UserError, match=rf"images\.{key}={value} .* must be"):
        load_dataset("shapes", ImagesConfig(**{key: value}))


def test_the_catalog_lists_every_name():
    rows = published()
    assert tuple(row.name for row in rows) == NAMES
    assert {row.name: row.url for row in rows if row.url} == {name: archive.url for name, archive in ARCHIVES.items()}
    shapes = load_dataset("shapes", progress=False)
    assert rows[0][:4] == ("shapes", len(shapes.train) + len(shapes.test), len(shapes.classes), shapes.size)


def test_the_catalog_needs_neither_torch_nor_numpy():
    code = "import sys, psm.data.registry; print({'torch', 'numpy', 'PIL', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
