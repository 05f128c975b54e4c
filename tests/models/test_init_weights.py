"""Weights to start from: every kind of file that is accepted, what is left out, and what is refused in a sentence."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from psm.models.encoder import as_encoder, unwrapped
from psm.models.factory import create_encoder
from psm.models.heads import prediction_head, projection_head
from psm.models.init_weights import describe, fit, load_initial_weights, read_initial_weights
from psm.models.libraries import LIBRARIES
from psm.models.resnet import BasicBlock, ResNet
from psm.models.siamese import SiameseNetworks
from psm.utils.errors import UserError


def networks(name: str = "tiny", stem: str = "imagenet") -> SiameseNetworks:
    encoder = create_encoder(name, stem, 32)
    return SiameseNetworks(encoder, projection_head(encoder.width, 8, 4), prediction_head(4, 8, 4))


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """A state dict as torchvision publishes them: a ResNet (a small one) with its classifier."""
    torch.manual_seed(1)
    encoder = create_encoder("tiny", "imagenet")
    return {**encoder.state_dict(), "fc.weight": torch.randn(10, 256), "fc.bias": torch.randn(10)}


def without_classifier(state: Any) -> Any:
    return {name: value for name, value in state.items() if not name.startswith("fc.")}


# Content of a file from a whole state dict, and what is said to be left out.
FILES: dict[str, Any] = {
    "with classifier": (lambda state: state, ["fc"]),
    "without classifier": (without_classifier, []),
    "within an entry": (lambda state: {"epoch": 3, "state_dict": state}, ["fc"]),
    "of DistributedDataParallel": (lambda state: {f"module.{k}": v for k, v in state.items()}, ["fc"]),
    "with other parts": (
        lambda state: {**{f"backbone.{k}": v for k, v in state.items()}, "head.mlp.0.weight": torch.zeros(3, 3)},
        ["fc", "head"],
    ),
    "before torch 0.4.1": (lambda state: {k: v for k, v in state.items() if "tracked" not in k}, ["fc"]),
    "in half precision": (
        lambda state: {k: v.half() if v.is_floating_point() else v for k, v in state.items()},
        ["fc"],
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_state_dict_files(kind: str, state: Any, tmp_path: Path) -> None:
    """The encoder gets exactly the file's weights, the target equals it, and the classifier is named as left out."""
    content, left_out = FILES[kind]
    path = tmp_path / "weights.pth"
    torch.save(content(state), path)
    nets = networks()
    record = load_initial_weights(nets, read_initial_weights(path), None)
    exact = kind != "in half precision"
    for name, value in nets.encoder.state_dict().items():
        if "tracked" not in name:
            assert torch.equal(value, state[name]) if exact else torch.allclose(value, state[name], atol=1e-3)
    assert record["left_out"] == left_out
    assert record["heads"] == []
    online = nn.Sequential(nets.encoder, nets.projector).state_dict()
    assert all(torch.equal(value, online[name]) for name, value in nets.target.state_dict().items())
    sentence = describe(record, nets.heads)
    assert sentence.startswith(f"init={path}: took the encoder")
    assert "projector and predictor start at random" in sentence
    assert all(name in sentence for name in left_out)


def test_safetensors_of_another_library(state: Any, tmp_path: Path) -> None:
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "w.safetensors")
    weights = read_initial_weights(tmp_path / "w.safetensors")
    assert weights.info is None
    assert fit(weights, unwrapped(networks().encoder), 256).left_out == ["fc"]


@pytest.mark.parametrize(
    ("library", "name", "left_out"),
    [
        ("timm", "test_vit", ["head"]),
        ("torchvision", "mobilenet_v3_small", ["classifier.3"]),
    ],
)
def test_state_dicts_of_the_libraries_themselves(library: str, name: str, left_out: list[str], tmp_path: Path) -> None:
    """Files as the library's own models write them, classifier included, into psm's encoder of that name."""
    import importlib

    module = importlib.import_module(library)
    theirs = module.create_model(name) if library == "timm" else module.models.get_model(name, weights=None)
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    size = 160 if name == "test_vit" else 64
    encoder = create_encoder(f"{library}/{name}", image_size=size)
    fitted = fit(read_initial_weights(tmp_path / "w.pth"), unwrapped(encoder), encoder.width)
    unwrapped(encoder).load_state_dict(fitted.state, strict=True)
    assert fitted.left_out == left_out
    bare = LIBRARIES[library].create(name).eval()
    bare.load_state_dict({k: v for k, v in theirs.state_dict().items() if k in bare.state_dict()}, strict=True)
    images = torch.randn(2, 3, size, size)
    torch.testing.assert_close(encoder.eval()(images), bare(images))


def test_a_network_of_the_users_own(tmp_path: Path) -> None:
    def own() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    torch.save(own().state_dict(), tmp_path / "w.pt")
    encoder = as_encoder(own())
    nets = SiameseNetworks(encoder, projection_head(5, 8, 4))
    load_initial_weights(nets, read_initial_weights(tmp_path / "w.pt"), None)
    assert torch.equal(encoder.module[0].weight, torch.load(tmp_path / "w.pt")["0.weight"])


class Code:
    """Unpickling this would write a file."""

    def __reduce__(self) -> Any:
        return (open, ("/tmp/unpickled", "w"))


REFUSED: dict[str, Any] = {
    "other stem": (lambda s: s | {"conv1.weight": torch.zeros(32, 3, 3, 3)}, "has the cifar stem.*give stem=cifar"),
    "lacking a weight": (lambda s: {k: v for k, v in s.items() if k != "layer2.0.conv1.weight"}, "it lacks 1 weights"),
    "other widths": (lambda s: create_encoder("resnet18", "cifar").state_dict(), "encoder=resnet18 stem=cifar"),
    "a deeper network": (
        lambda s: ResNet(BasicBlock, (2, 1, 1, 1), (32, 64, 128, 256)).state_dict(),
        r"10 weights that the encoder has not \(layer1.1.conv1.weight",
    ),
    "more than a classifier": (lambda s: s | {"neck.weight": torch.zeros(7, 3)}, "1 weights that the encoder has not"),
    "two networks": (
        lambda s: {f"{p}.{k}": v for p in ("encoder_q", "encoder_k") for k, v in s.items()},
        r"several networks \(encoder_q., encoder_k.\)",
    ),
    "not a number": (lambda s: s | {"bn1.bias": torch.full((32,), torch.nan)}, r"NaN or infinite \(bn1.bias\)"),
    "no tensors": (lambda s: {"epoch": 3}, "holds no state dict"),
    "a list": (lambda s: [1, 2], "holds no state dict"),
    "code": (lambda s: {"state_dict": Code()}, "holds more than tensors"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused(kind: str, state: Any, tmp_path: Path) -> None:
    content, says = REFUSED[kind]
    path = tmp_path / "weights.pth"
    torch.save(content(state), path, pickle_module=pickle)
    nets = networks()
    before = {name: value.clone() for name, value in nets.state_dict().items()}
    with pytest.raises(UserError, match=says):
        load_initial_weights(nets, read_initial_weights(path), None)
    assert all(torch.equal(value, before[name]) for name, value in nets.state_dict().items()), "nothing is half loaded"


@pytest.mark.parametrize(
    ("name", "says"), [("no.pth", "does not exist: give a run folder"), ("", "is a folder without")]
)
def test_what_is_not_there(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        read_initial_weights(tmp_path / name)


def test_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "w.pth").write_bytes(b"x" * 100)
    for name in ("w.safetensors", "w.pth"):
        with pytest.raises(UserError, match=r"safetensors|no checkpoint"):
            read_initial_weights(tmp_path / name)


@pytest.mark.parametrize("parts", [{}, {"state_dict": [1]}, {"state_dict": {"w": 1}, "global_step": 3}])
def test_a_checkpoint_with_parts_missing_is_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    info = {"encoder": "tiny", "stem": "cifar", "width": 8, "size": 16, "mean": [0.5] * 3, "std": [0.2] * 3}
    info |= {"method": "psm", "data": "shapes", "epoch": 1, "init": None}
    described = {"config": {}, "encoder_info": info, "images": 3}
    torch.save({"psm": described, **parts}, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"last\.ckpt"):
        read_initial_weights(tmp_path / "last.ckpt")
