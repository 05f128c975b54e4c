"""torchvision and timm: weights exchanged with strict=True, and encoders created, trained and evaluated."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psm
from helpers import SMALL
from psm.models.encoder import unwrapped
from psm.models.factory import create_encoder, list_encoders
from psm.models.libraries import LIBRARIES
from psm.models.torchvision_ops import _needs_cuda
from psm.utils.errors import UserError


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_weights_load_in_torchvision_and_back(name: str) -> None:
    ours = create_encoder(name, stem="imagenet").eval()
    theirs = LIBRARIES["torchvision"].create(name).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images))
    ours.load_state_dict(theirs.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("name", "width"),
    [("torchvision/resnet18", 512), ("torchvision/mobilenet_v3_small", 1024), ("timm/resnet18", 512)],
)
def test_library_encoders_lose_their_classifier(name: str, width: int) -> None:
    network = create_encoder(name, image_size=64)
    assert network.width == width
    assert network.eval()(torch.randn(2, 3, 64, 64)).shape == (2, width)
    assert name in list_encoders(name.partition("/")[0])
    with pytest.raises(UserError, match="did you mean"):
        create_encoder(name + "x")


@pytest.mark.parametrize("name", ["timm/test_resnet", "torchvision/resnet18"])
def test_a_library_encoder_trains_and_is_evaluated(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = SMALL | {
        "encoder": name,
        "epochs": 1,
        "images": {"limit": 40, "size": 32},
        "batch_size": 20,
    }
    result = psm.pretrain(tmp_path / "a", **settings)
    before = create_encoder(name)
    loaded = [psm.load_encoder(result.out), psm.load_encoder(result.out / "checkpoints" / "last.ckpt")]
    for encoder in loaded:
        state = unwrapped(encoder).state_dict()
        assert state.keys() == unwrapped(before).state_dict().keys(), "the names are the library's own"
        assert all(torch.equal(value, state[key]) for key, value in unwrapped(result.encoder).state_dict().items())
    scores = psm.evaluate(result.out, linear={"enabled": False}, progress=False)
    assert [score.score for score in scores] == ["knn"]


def test_lightning_is_imported_where_torchvision_is_a_cuda_build() -> None:
    """In a fresh process: nothing but psm prepares the import."""
    code = "import psm; psm.pretrain; psm.evaluate; import lightning, torchvision, timm"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_only_a_missing_cuda_library_counts(tmp_path: Path) -> None:
    assert not _needs_cuda(tmp_path)
    (tmp_path / "_C.so").write_bytes(b"not a library")
    assert not _needs_cuda(tmp_path)


def test_a_model_without_linear_classifier_is_refused() -> None:
    with pytest.raises(UserError, match="no linear classifier"):
        create_encoder("torchvision/squeezenet1_0", image_size=64)
    assert isinstance(create_encoder("torchvision/vgg11", image_size=32), nn.Module)
