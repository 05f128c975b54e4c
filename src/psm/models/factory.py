"""Encoders by name: the ResNets of this package, torchvision's and timm's models, or any module of the user's."""

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from psm.models.resnet import BasicBlock, Bottleneck, ResNet
from psm.utils.errors import UserError, did_you_mean

STEMS = ("cifar", "imagenet")
SMALL_BELOW = 96  # pixels: the stem that auto takes

ENCODERS: dict[str, Callable[[str], ResNet]] = {
    # Learns on a laptop's CPU: 1.2 M parameters, and its CIFAR stem halves the image.
    "tiny": lambda stem: ResNet(BasicBlock, (1, 1, 1, 1), (32, 64, 128, 256), stem, cifar_stride=2),
    "resnet18": lambda stem: ResNet(BasicBlock, (2, 2, 2, 2), stem=stem),
    "resnet34": lambda stem: ResNet(BasicBlock, (3, 4, 6, 3), stem=stem),
    "resnet50": lambda stem: ResNet(Bottleneck, (3, 4, 6, 3), stem=stem),
}


def create_encoder(name: str, stem: str = "auto", image_size: int = 32) -> nn.Module:
    """A new encoder, images (B, 3, H, W) to features (B, ``width``), by its name.

    ``tiny``, ``resnet18``, ``resnet34`` and ``resnet50`` are written here; ``torchvision/NAME`` and ``timm/NAME`` are
    taken, untrained and without their classifier, from those packages. The stem ``cifar`` is a 3x3 convolution without
    pooling, ``imagenet`` the 7x7 one with it; ``auto`` takes ``cifar`` below 96 pixels.
    """
    if stem not in (*STEMS, "auto"):
        raise UserError(f"the stem {stem!r} is not known; use cifar, imagenet or auto.")
    library, _, model = name.rpartition("/")
    if library in LIBRARIES:
        if stem == "cifar":
            raise UserError(f"the encoder {name!r} comes with its own stem; leave the stem at auto for it.")
        network = LIBRARIES[library](model)
        network.width = feature_width(network, image_size, name)
        return network
    if name not in ENCODERS:
        known = f"{', '.join(ENCODERS)}, torchvision/NAME or timm/NAME"
        raise UserError(f"the encoder {name!r} is not known{did_you_mean(name, ENCODERS)}; use {known}.")
    if stem == "auto":
        stem = "cifar" if image_size < SMALL_BELOW else "imagenet"
    return ENCODERS[name](stem)


def prefers_channels_last(device: torch.device | str) -> bool:
    """Whether networks and images should be stored channels-last on a device.

    Measured on two CPU cores (AVX-512, torch 2.13, float32), forward and backward of 256 images of 32 pixels:
    channels-last is 1.2 times as fast for ``tiny`` and for ``resnet18``, with one thread and with two. On CUDA it is
    the layout that tensor cores work in. Elsewhere it has not been measured.
    """
    return torch.device(device).type in ("cpu", "cuda")


class PooledEncoder(nn.Module):
    """Somebody's module as an encoder: its maps (B, D, h, w), if it gives maps, are averaged over places."""

    def __init__(self, module: nn.Module, width: int):
        super().__init__()
        self.module = module
        self.width = width

    def forward(self, images: Tensor) -> Tensor:
        features = self.module(images)
        return features.mean((2, 3)) if features.ndim == 4 else features


def as_encoder(module: nn.Module, image_size: int = 32) -> nn.Module:
    """Any module that maps images (B, 3, H, W) to (B, D) or (B, D, h, w) as an encoder whose width is found out."""
    return PooledEncoder(module, feature_width(module, image_size, type(module).__name__))


def unwrapped(network: nn.Module) -> nn.Module:
    """The user's own module of an encoder that ``as_encoder`` made, else the encoder itself."""
    return network.module if isinstance(network, PooledEncoder) else network


@torch.no_grad()
def feature_width(module: nn.Module, image_size: int, name: str) -> int:
    """D of a module's output (B, D) or (B, D, h, w), from a dry run that leaves the module as it was."""
    modes = {part: part.training for part in module.modules()}
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    images = torch.zeros(2, 3, image_size, image_size, device=device)
    module.eval()
    try:
        features = module(images)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"the encoder {name!r} does not take images of {image_size} pixels ({reason}); "
            "give larger images or another encoder."
        ) from error
    finally:
        for part, training in modes.items():
            part.training = training
    if not isinstance(features, Tensor) or features.ndim not in (2, 4) or len(features) != 2:
        given = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else f"type {type(features).__name__}"
        raise UserError(
            f"the encoder {name!r} turns two images into output of {given}; it must be (B, D) or (B, D, h, w)."
        )
    return features.shape[1]


def torchvision_model(name: str) -> nn.Module:
    """A classification model of torchvision's, its last linear layer replaced by the identity."""
    models = installed("torchvision").models
    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"torchvision has no classification model {name!r}{did_you_mean(name, known)}.")
    network = models.get_model(name, weights=None)
    linear = [path for path, part in network.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise UserError(f"the model torchvision/{name} has no linear classifier to set aside; use another encoder.")
    parent, _, last = linear[-1].rpartition(".")
    setattr(network.get_submodule(parent), last, nn.Identity())
    return network


def timm_model(name: str) -> nn.Module:
    """A model of timm's without its classifier."""
    timm = installed("timm")
    known = timm.list_models()
    if name not in known:
        raise UserError(f"timm has no model {name!r}{did_you_mean(name, known)}.")
    return timm.create_model(name, pretrained=False, num_classes=0)


LIBRARIES: dict[str, Callable[[str], nn.Module]] = {"torchvision": torchvision_model, "timm": timm_model}


def installed(package: str) -> ModuleType:
    """An optional package, or the way to install it."""
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # torchvision built for another torch fails with the latter
        raise UserError(
            f"the encoder needs {package}, which cannot be imported ({error}); "
            f"install it with `pip install 'psm[{package}]'`."
        ) from error
