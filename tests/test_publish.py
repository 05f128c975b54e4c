"""release/publish.py: a finished run becomes an encoder with a card, a checksum and a name."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import psm
from psm.models import pretrained, published
from psm.models.init_weights import read_initial_weights
from psm.models.published import read_table
from psm.utils.errors import UserError
from psm.utils.files import append_line
from psm.utils.run_folder import RunFolder

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "release" / "publish.py"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    small: Any = {"images": {"limit": 64, "size": 16}, "bank": {"size": 32}, "monitor": {"knn": False}}
    psm.pretrain(folder, data="shapes", encoder="tiny", epochs=1, batch_size=32, progress=False, **small)
    psm.evaluate(folder, progress=False, scores=["knn"], images={"limit": 64, "size": 16})
    return folder


def test_a_run_is_published_and_loaded_by_name(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, table = tmp_path / "encoders", tmp_path / "published.json"
    table.write_text('[{"name": "other", "sha256": "0", "about": "stays"}]')
    for about in ("first", "again"):
        SCRIPT["publish"](run, "psm-tiny", about, shelf, table)
    rows = read_table(table)
    assert [(row.name, row.about) for row in rows] == [("other", "stays"), ("psm-tiny", "again")]
    for module in (published, pretrained):
        monkeypatch.setattr(module, "PUBLISHED", tuple(rows))
    monkeypatch.setenv("PSM_ENCODERS", str(shelf))
    images = torch.rand(4, 3, 16, 16)
    assert torch.equal(psm.load_encoder("psm-tiny")(images), psm.load_encoder(run)(images))
    card = (shelf / "psm-tiny" / "README.md").read_text()
    assert "# psm-tiny\n" in card
    assert "(`psm`)" in card
    assert "95 % intervals" in card
    assert "Weights: MIT" in card
    assert str(run) not in card
    assert read_initial_weights("psm-tiny").info.epoch == 1  # init=psm-tiny


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("Psm Tiny", "", "small letters"),
        ("psm-tiny", "encoder", "give the folder of a finished run"),
        ("psm-tiny", "scores", "has no scores for the model card"),
    ],
)
def test_what_cannot_be_published_is_refused(name: str, damage: str, says: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.folder.mkdir()
    run.encoder.touch()
    append_line(run.scores, {"of": "psm", "score": "knn", "top1": 20.0})
    if damage:
        getattr(run, damage).unlink()
    with pytest.raises(UserError, match=says):
        SCRIPT["publish"](run.folder, name, "about", tmp_path / "shelf", tmp_path / "table.json")
    assert not (tmp_path / "shelf").exists()


def test_the_script_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert SCRIPT["main"]([]) == 2
    assert "python release/publish.py RUN NAME" in capsys.readouterr().out
    assert SCRIPT["main"](["nowhere", "a", "b"]) == 2
    assert "has no encoder" in capsys.readouterr().err
