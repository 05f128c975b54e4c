"""Encoders by name: the ResNets of this package, and the models of torchvision and timm."""

from collections.abc import Callable

import torch

from psm.models.encoder import Encoder, as_encoder
from psm.models.libraries import LIBRARIES
from psm.models.resnet import BasicBlock, Bottleneck, ResNet
from psm.utils.errors import UserError, did_you_mean

STEMS = ("cifar", "imagenet")
CIFAR_STEM_BELOW = 96  # pixels: stem=auto takes the CIFAR stem for smaller images

ENCODERS: dict[str, Callable[[str], ResNet]] = {
    # For training on a CPU: 1.2 M parameters, and a CIFAR stem of stride 2.
    "tiny": lambda stem: ResNet(BasicBlock, (1, 1, 1, 1), (32, 64, 128, 256), stem, cifar_stride=2),
    "resnet18": lambda stem: ResNet(BasicBlock, (2, 2, 2, 2), stem=stem),
    "resnet34": lambda stem: ResNet(BasicBlock, (3, 4, 6, 3), stem=stem),
    "resnet50": lambda stem: ResNet(Bottleneck, (3, 4, 6, 3), stem=stem),
}


def create_encoder(name: str, stem: str = "auto", image_size: int = 32) -> Encoder:
    """A new, untrained encoder: images (B, 3, H, W) to features (B, ``encoder.width``).

    Args:
        name: One of ``list_encoders()``, ``torchvision/NAME`` or ``timm/NAME``; the latter two without classifier.
        stem: ``cifar`` (3x3 convolution, no pooling), ``imagenet`` (7x7 convolution of stride 2, max pooling) or
            ``auto`` (``cifar`` below 96 pixels). Models of torchvision and timm have their own stem.
        image_size: H and W of the images.
    """
    if stem not in (*STEMS, "auto"):
        raise UserError(f"the stem {stem!r} is not known; use cifar, imagenet or auto.")
    library, _, model = name.rpartition("/")
    if library in LIBRARIES:
        if stem == "cifar":
            raise UserError(f"the encoder {name!r} comes with its own stem; leave the stem at auto for it.")
        return as_encoder(LIBRARIES[library].create(model), image_size, name)
    if name not in ENCODERS:
        known = f"{', '.join(ENCODERS)}, {' or '.join(f'{library}/NAME' for library in LIBRARIES)}"
        raise UserError(f"the encoder {name!r} is not known{did_you_mean(name, ENCODERS)}; use {known}.")
    if stem == "auto":
        stem = "cifar" if image_size < CIFAR_STEM_BELOW else "imagenet"
    return ENCODERS[name](stem)


def list_encoders(library: str | None = None) -> list[str]:
    """Names for ``create_encoder``: those of this package, or of a library, ``torchvision`` or ``timm``."""
    if library is None:
        return list(ENCODERS)
    if library not in LIBRARIES:
        raise UserError(f"the library {library!r} is not known; use {' or '.join(LIBRARIES)}.")
    return [f"{library}/{name}" for name in LIBRARIES[library].names()]


def prefers_channels_last(device: torch.device | str) -> bool:
    """True if networks and images should be stored channels-last on a device.

    Measured on two CPU cores (AVX-512, torch 2.13, float32), forward and backward of 256 images of 32 pixels:
    channels-last is 1.2 times as fast for ``tiny`` and for ``resnet18``, with one thread and with two. On CUDA it is
    the layout that tensor cores work in. Elsewhere it has not been measured.
    """
    return torch.device(device).type in ("cpu", "cuda")
