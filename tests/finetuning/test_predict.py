"""`psm predict`: what stands in the file, what is left out, and what is known of its errors."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import psm
from helpers import save_images, save_untrained_encoder
from psm.evaluation.calibration import calibration_error
from psm.models.classifier import Classifier, ClassifierInfo, save_classifier
from psm.models.factory import create_encoder
from psm.models.pretrained import EncoderInfo
from psm.utils.errors import UserError

CLASSES = ["ant", "bee", "cow", "dog", "eel", "fox", "gnu"]
INFO = EncoderInfo("tiny", "cifar", 256, 16, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3], "psm", "shapes", 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("clf") / "classifier.safetensors"
    classifier = Classifier(create_encoder("tiny", image_size=16), nn.Linear(256, len(CLASSES)))
    save_classifier(file, classifier, ClassifierInfo(INFO, CLASSES, temperature=0.5))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    names = [f"{kind}/{index}.png" for kind in ("ant", "dog", "unknown") for index in range(6)]
    return save_images(tmp_path_factory.mktemp("images"), names)


@torch.inference_mode()
def by_hand(checkpoint: Any, folder: Any, names: Any) -> torch.Tensor:
    """Probabilities of image files, one at a time in plain PyTorch."""
    classifier = psm.load_classifier(checkpoint)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (INFO.mean, INFO.std))
    shares = []
    for name in names:
        image = Image.open(folder / name).convert("RGB").resize((16, 16), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
        logits = classifier.head(classifier.encoder(((pixels - mean) / std)[None]))[0]
        shares.append((logits / 0.5).softmax(0))
    return torch.stack(shares)


def test_the_file_has_the_most_probable_classes_of_every_image(tmp_path: Path, checkpoint: Any, folder: Any) -> None:
    out = tmp_path / "labels.csv"
    found = psm.predict(checkpoint, folder, out, batch_size=5, progress=False)
    rows = list(csv.DictReader(out.open()))
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    assert [row["image"] for row in rows] == names
    shares = by_hand(checkpoint, folder, names)
    for row, expected in zip(rows, shares, strict=True):
        order = expected.argsort(descending=True)[:5].tolist()
        columns = ["", "_2", "_3", "_4", "_5"]
        assert [row[f"class{c}"] for c in columns] == [CLASSES[place] for place in order]
        assert [float(row[f"probability{c}"]) for c in columns] == pytest.approx(expected[order].tolist(), abs=2e-5)
        assert row["label"] == row["image"].split("/")[0]
    # Labels of the classifier's own names are scored; "unknown" is none of them.
    known = [i for i, name in enumerate(names) if not name.startswith("unknown")]
    labels = torch.tensor([CLASSES.index(names[i].split("/")[0]) for i in known])
    assert found.known.images == 12
    assert found.known.top1 == pytest.approx(100 * (shares[known].argmax(1) == labels).double().mean().item())
    assert found.known.ece == pytest.approx(calibration_error(shares[known], labels).ece, abs=1e-3)
    assert sum(found.counts) == found.images == 18
    assert not list(tmp_path.glob(".writing-*"))


def test_unreadable_images_are_listed_and_left_out(tmp_path: Path, checkpoint: Any) -> None:
    folder = save_images(tmp_path / "images", ["a.png", "b.png", "c.png"])
    (folder / "b.png").write_bytes(b"no image")
    out = tmp_path / "labels.csv"
    found = psm.predict(checkpoint, folder, out, progress=False, batch_size=2)
    assert [name for name, _ in found.unreadable] == ["b.png"]
    assert [row["image"] for row in csv.DictReader(out.open())] == ["a.png", "c.png"]
    assert (tmp_path / "labels.csv.unreadable.txt").read_text().startswith("b.png\t")
    assert found.known is None
    assert "label" not in out.read_text().splitlines()[0]
    for name in ("a.png", "c.png"):
        (folder / name).write_bytes(b"")
    with pytest.raises(UserError, match="None of the 3 images"):
        psm.predict(checkpoint, folder, tmp_path / "none.csv", progress=False)
    assert not (tmp_path / "none.csv").exists()
    assert not list(tmp_path.glob(".writing-*"))


def test_python_gets_arrays_of_files_and_of_tensors(checkpoint: Any, folder: Any) -> None:
    one = psm.predict(checkpoint, folder / "ant/0.png", top=3, progress=False)
    assert (one.names, one.top.shape) == (["0.png"], (1, 3))
    assert torch.allclose(one.probabilities, by_hand(checkpoint, folder, ["ant/0.png"]).topk(3).values, atol=2e-5)
    pixels = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    many = psm.predict(checkpoint, pixels, top=99, progress=False)
    assert many.top.shape == (4, len(CLASSES))
    assert torch.allclose(many.probabilities.sum(1), torch.ones(4))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"out": "labels.parquet"}, r"must end in \.csv"),
        ({"out": ""}, "out= is missing"),
        ({"data": ""}, "data= is missing"),
        ({"data": "nowhere/at/all"}, "does not exist"),
        ({"checkpoint": "nowhere"}, "checkpoint=nowhere does not exist"),
        ({"top": 0}, "top=0 is too small"),
    ],
)
def test_wrong_input_is_answered_in_a_sentence(
    tmp_path: Path, checkpoint: Any, folder: Any, keys: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"checkpoint": checkpoint, "data": folder, "out": "labels.csv", "progress": False, **keys}
    with pytest.raises(UserError, match=says):
        psm.predict(**given)
    assert not list(tmp_path.iterdir())


def test_an_encoder_without_classes_is_refused(tmp_path: Path, folder: Any) -> None:
    with pytest.raises(UserError, match="holds no classifier"):
        psm.predict(save_untrained_encoder(tmp_path / "a"), folder, tmp_path / "labels.csv", progress=False)
