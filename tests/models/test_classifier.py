"""A classifier in a file: what it holds, what is refused, and that its head is the one that was trained."""

from pathlib import Path

import pytest
import torch
from torch import nn

import psm
from helpers import save_untrained_encoder
from psm.models.classifier import Classifier, ClassifierInfo, LinearHead, folded, save_classifier
from psm.models.factory import create_encoder
from psm.models.pretrained import EncoderInfo
from psm.utils.errors import UserError

INFO = EncoderInfo("tiny", "cifar", 256, 16, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3], "psm", "shapes", 1)


@pytest.fixture
def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier(create_encoder("tiny", image_size=16), nn.Linear(256, 3)).eval()


def test_a_classifier_comes_back_with_its_classes_and_temperature(tmp_path: Path, classifier: Classifier) -> None:
    file, inputs = tmp_path / "classifier.safetensors", torch.randn(4, 3, 16, 16)
    save_classifier(file, classifier, ClassifierInfo(INFO, ["a", "ä", "c"], 2.0))
    loaded = psm.load_classifier(file)
    assert (loaded.info.classes, loaded.info.temperature, loaded.info.encoder) == (["a", "ä", "c"], 2.0, INFO)
    with torch.inference_mode():
        assert torch.equal(loaded(inputs), classifier(inputs))
        assert torch.allclose(loaded.probabilities(inputs), (classifier(inputs) / 2).softmax(1))
        # Wherever an encoder is expected, that of the classifier is taken.
        assert torch.equal(psm.load_encoder(file)(inputs), classifier.encoder(inputs))


def test_a_damaged_classifier_is_noticed(tmp_path: Path, classifier: Classifier) -> None:
    file = tmp_path / "classifier.safetensors"
    save_classifier(file, classifier, ClassifierInfo(INFO, ["a", "b", "c"]))
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        psm.load_classifier(file)


def test_an_encoder_is_no_classifier_and_the_answer_says_how_to_make_one(tmp_path: Path) -> None:
    run = save_untrained_encoder(tmp_path / "a")
    for path in (run, run / "encoder.safetensors"):
        with pytest.raises(UserError, match=r"holds no classifier: train one with `psm finetune"):
            psm.load_classifier(path)
    with pytest.raises(UserError, match="does not exist"):
        psm.load_classifier(tmp_path / "none")


def test_the_encoder_of_a_classifier_is_answered_with_the_classifier_beside_it(
    tmp_path: Path, classifier: Classifier
) -> None:
    run = save_untrained_encoder(tmp_path / "clf")
    save_classifier(run / "classifier.safetensors", classifier, ClassifierInfo(INFO, ["a", "b", "c"], 1.0))
    with pytest.raises(UserError, match=r"encoder\.safetensors holds no classifier: give .*/classifier\.safetensors"):
        psm.load_classifier(run / "encoder.safetensors")


def test_the_folded_head_computes_what_the_trained_one_does() -> None:
    torch.manual_seed(0)
    features = 3 * torch.randn(50, 6).relu() + 1
    features[:, 2] = 0.5  # never varies: divided by a floor, not by zero
    head = LinearHead(6, 4, seed=0)
    assert not head.standardized
    head.standardize(features)
    assert head.standardized
    assert float(head.std[2]) > 0.05 * float(head.std.max())
    plain = nn.Linear(6, 4)
    plain.load_state_dict(folded(head.state_dict()))
    assert torch.allclose(plain(features), head(features), atol=1e-5)


def test_a_frozen_encoder_stays_in_evaluation_mode_and_gets_no_gradient() -> None:
    frozen = Classifier(create_encoder("tiny", image_size=16), nn.Linear(256, 3), frozen=True).train()
    assert frozen.head.training
    assert not any(part.training for part in frozen.encoder.modules())
    frozen(torch.randn(2, 3, 16, 16)).sum().backward()
    assert all(parameter.grad is None for parameter in frozen.encoder.parameters())
