"""Encoders by name: fetched once, verified, and a sentence where they cannot be had."""

import hashlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

import psm
from psm.models import pretrained, published
from psm.models.pretrained import EncoderInfo, write_weights
from psm.models.published import FOLDER, PUBLISHED, PublishedEncoder, cache_folder
from psm.utils.errors import UserError

FILE = "some-encoder/model.safetensors"
ROOT = Path(__file__).parents[2]
INFO = {"encoder": "tiny", "stem": "cifar", "width": 256, "size": 32, "mean": [0.5] * 3, "std": [0.2] * 3}


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one encoder, which is published under the name some-encoder."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    file = folder / FILE
    file.parent.mkdir()
    encoder = psm.create_encoder("tiny")
    info = EncoderInfo(**{**INFO, "width": encoder.width}, method="psm", data="cifar10", epoch=1)
    write_weights(file, encoder.state_dict(), vars(info))
    rows = (PublishedEncoder("some-encoder", hashlib.sha256(file.read_bytes()).hexdigest(), "of a test"),)
    for module in (published, pretrained):
        monkeypatch.setattr(module, "PUBLISHED", rows)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PSM_ENCODERS", raising=False)
    return folder


@pytest.fixture
def address(shelf: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(shelf)))
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_name_is_fetched_once_and_works_without_the_server(
    shelf: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSM_ENCODERS", address)
    encoder = psm.load_encoder("some-encoder")
    assert encoder(torch.zeros(2, 3, 32, 32)).shape == (2, encoder.width)
    monkeypatch.delenv("PSM_ENCODERS")
    (shelf / FILE).unlink()
    psm.load_encoder("some-encoder")


def test_a_folder_needs_no_cache(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSM_ENCODERS", str(shelf))
    psm.load_encoder("some-encoder")
    assert not cache_folder().exists()


def test_a_clone_has_the_encoders(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clone" / "release").mkdir(parents=True)
    shelf.rename(tmp_path / "clone" / FOLDER)
    monkeypatch.setattr(published, "TABLE", tmp_path / "clone" / "src" / "psm" / "models" / "published.json")
    psm.load_encoder("some-encoder")
    assert not cache_folder().exists()


def test_a_file_that_arrives_damaged_is_not_kept(shelf: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSM_ENCODERS", address)
    file = shelf / FILE
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match="arrived damaged"):
        psm.load_encoder("some-encoder")
    assert [path.name for path in (cache_folder() / FILE).parent.iterdir()] == [".model.safetensors.lock"]


def test_a_file_of_that_name_with_other_contents_is_refused(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSM_ENCODERS", str(shelf))
    (shelf / FILE).write_bytes(b"something else")
    with pytest.raises(UserError, match="is not the published encoder some-encoder"):
        psm.load_encoder("some-encoder")


def test_without_an_address_or_network_it_says_where_to_put_the_file(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(cache_folder() / FILE)
    with pytest.raises(UserError, match="put release/encoders/some-encoder") as told:
        psm.load_encoder("some-encoder")
    assert f"of psm's repository as {place}" in str(told.value)
    monkeypatch.setenv("PSM_ENCODERS", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(UserError, match="cannot be downloaded") as told:
        psm.load_encoder("some-encoder")
    assert place in str(told.value)


def test_a_wrong_name_is_answered_with_the_right_one(shelf: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'some-encoder'"):
        psm.load_encoder("some-encodr")


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row.name)
def test_published_encoders_are_in_the_repository_with_card_and_scores(
    row: PublishedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSM_ENCODERS", str(ROOT / FOLDER))
    encoder = psm.load_encoder(row.name)
    card = (ROOT / FOLDER / row.name / "README.md").read_text()
    assert f"(`{encoder.info.method}`)" in card
    assert "95 % intervals" in card
