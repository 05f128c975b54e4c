"""A run finds its images from any folder, and is told by data= where they are after they were moved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import psm
from psm.data.location import absolute_data, data_name
from psm.reporting.run_page import write_page
from psm.utils.errors import UserError

FAST: dict[str, Any] = {"linear": {"enabled": False}, "progress": False}


def write_images(folder: Path, names: list[str]) -> None:
    """Images of two classes; each is decided by its place in the list."""
    for place, name in enumerate(names):
        path = folder / ("cat" if place % 2 else "dog") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(place).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images in it, where a run is started by their relative path."""
    home = tmp_path / "home"
    write_images(home / "images", [f"{number:02d}.png" for number in range(40)])
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def run(home: Path, small: dict[str, Any]) -> Path:
    settings = small | {"images": {"size": 16, "cache": "cache"}, "batch_size": 8, "epochs": 1, "bank": {"size": 16}}
    return psm.pretrain("runs/a", **settings | {"data": "images"}).out.absolute()


def test_a_moved_run_finds_its_images_from_any_folder(
    run: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    moved = run.rename(elsewhere / "moved")
    (elsewhere / "link").symlink_to(moved)
    for path in (Path("moved"), Path("link")):
        (score,) = psm.evaluate(path, **FAST)
        assert score.protocol["data"] == str(home / "images")
        assert score.protocol["images"]["cache"] == str(home / "cache")
    assert psm.inspect("link", queries=4, progress=False).page == Path("link/inspect.html")
    assert [record["epoch"] for record in psm.pretrain("link", resume=True, progress=False).metrics] == [1]
    page = write_page("link").read_text()
    assert "psm on images" in page
    assert "What was mined" in page


def test_images_that_were_moved_are_named_by_data(run: Path, home: Path, tmp_path: Path) -> None:
    (home / "images").rename(tmp_path / "new")
    for call in (psm.evaluate, psm.inspect):
        with pytest.raises(UserError, match=rf"data={home}/images does not exist .*; give with data= the folder"):
            call(run, progress=False)
    with pytest.raises(UserError, match="give with data= the folder where the images are"):
        psm.pretrain(run, resume=True, progress=False)
    psm.evaluate(run, data="../new", **FAST)
    psm.inspect(run, data="../new", queries=4, progress=False)
    assert psm.pretrain(run, data="../new", resume=True, progress=False).config.data == str(tmp_path / "new")
    psm.evaluate(run, **FAST)  # the run knows by now


def test_other_images_are_refused_on_resume(run: Path, home: Path) -> None:
    write_images(home / "fewer", [f"{number:02d}.png" for number in range(20)])
    write_images(home / "renamed", [f"_{number:02d}.png" for number in range(40)])
    for data, says in (("fewer", "training images instead of"), ("renamed", "its files have other names")):
        with pytest.raises(UserError, match=says):
            psm.pretrain(run, data=data, resume=True, progress=False)


def test_a_replaced_run_behind_a_link_keeps_the_link(run: Path, home: Path, small: dict[str, Any]) -> None:
    (home / "latest").symlink_to(run)
    psm.pretrain("latest", **small | {"epochs": 1, "overwrite": True})
    assert (home / "latest").is_symlink()
    assert (run / "encoder.safetensors").exists()
    assert (run.parent / "a.replaced-1" / "encoder.safetensors").exists()


def test_paths_are_absolute_and_names_are_not(home: Path) -> None:
    assert absolute_data("cifar10") == data_name("cifar10") == "cifar10"
    assert absolute_data("hf:user/set") == data_name("hf:user/set") == "hf:user/set"
    assert absolute_data("images") == str(home / "images")
    assert absolute_data("../home/./images") == str((home / "images").resolve())
    (home / "link").symlink_to(home / "images")
    assert absolute_data("link") == str(home / "link")
    assert data_name(str(home / "images")) == data_name("images") == "images"
