"""Encoders by name: stems, names that are refused, lists of names."""

import pytest
import torch
from torch import nn

from psm.models.factory import create_encoder, list_encoders, prefers_channels_last
from psm.models.resnet import ResNet
from psm.utils.errors import UserError


@pytest.mark.parametrize(("size", "kernel"), [(32, 3), (64, 3), (95, 3), (96, 7), (224, 7)])
def test_auto_takes_the_small_stem_below_96_pixels(size: int, kernel: int) -> None:
    network = create_encoder("resnet18", image_size=size)
    assert isinstance(network, ResNet)
    assert network.conv1.kernel_size == (kernel, kernel)
    assert network.conv1.stride == ((1, 1) if kernel == 3 else (2, 2))
    assert isinstance(network.maxpool, nn.Identity if kernel == 3 else nn.MaxPool2d)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'resnet19' is not known \(did you mean 'resnet18'\?\)"):
        create_encoder("resnet19")
    with pytest.raises(UserError, match="use tiny, resnet18, resnet34, resnet50, torchvision/NAME or timm/NAME"):
        create_encoder("clip/vit")
    with pytest.raises(UserError, match="the stem 'large' is not known; use cifar, imagenet or auto"):
        create_encoder("tiny", stem="large")


@pytest.mark.parametrize("package", ["torchvision", "timm"])
@pytest.mark.parametrize("failure", [ImportError, RuntimeError])
def test_a_missing_package_is_named_with_the_way_to_install_it(
    package: str, failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, *_: object) -> None:
        raise failure(f"no {name}")

    monkeypatch.setattr("psm.models.libraries.importlib.import_module", refuse)
    with pytest.raises(UserError, match=rf"pip install 'psm\[{package}\]'"):
        create_encoder(f"{package}/resnet18")


def test_a_library_encoder_has_its_own_stem() -> None:
    with pytest.raises(UserError, match="comes with its own stem"):
        create_encoder("torchvision/resnet18", stem="cifar")


def test_every_listed_name_is_created() -> None:
    for name in list_encoders():
        encoder = create_encoder(name)
        assert isinstance(encoder, ResNet)
        assert encoder.stem == "cifar"


def test_names_of_an_unknown_library_are_refused() -> None:
    with pytest.raises(UserError, match="the library 'clip' is not known; use torchvision or timm"):
        list_encoders("clip")


def test_networks_are_stored_channels_last_where_that_is_faster() -> None:
    assert prefers_channels_last("cpu")
    assert prefers_channels_last(torch.device("cuda", 1))
    assert not prefers_channels_last("mps")
