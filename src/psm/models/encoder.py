"""What an encoder is: a module from images to features that knows its feature width."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from psm.utils.errors import UserError

if TYPE_CHECKING:
    from psm.models.pretrained import EncoderInfo


class Encoder(nn.Module):
    """A module that maps images (B, 3, H, W) to features (B, ``width``)."""

    width: int
    stem: str = "auto"
    info: "EncoderInfo"  # set by load_encoder

    def preprocess(self, images: Any) -> Tensor:
        """Inputs of a trained encoder: cropped to the central square, resized and normalized as in its training.

        Examples:
            >>> features = encoder(encoder.preprocess(["a.jpg", "b.jpg"]))  # doctest: +SKIP

        Args:
            images: An image or several. An image is a path, a PIL image, a tensor (C, H, W) or (H, W), or an array
                (H, W), (H, W, C) or (C, H, W), uint8 or float in [0, 1]; several are a list or a fourth dimension.

        Returns:
            float32 (3, S, S) on the CPU for an image, (B, 3, S, S) for several.
        """
        from psm.models.preprocess import preprocess  # imports Pillow, which a network does not need

        if not hasattr(self, "info"):
            raise UserError("this encoder does not know how its images are prepared: load one with psm.load_encoder.")
        return preprocess(images, self.info)


class WrappedEncoder(Encoder):
    """Any module as an encoder. Feature maps (B, D, h, w) are averaged over their positions."""

    def __init__(self, module: nn.Module, width: int):
        super().__init__()
        self.module = module
        self.width = width

    def forward(self, images: Tensor) -> Tensor:
        features = self.module(images)
        return features.mean((2, 3)) if features.ndim == 4 else features


def as_encoder(module: nn.Module, image_size: int = 32, name: str | None = None) -> WrappedEncoder:
    """Wrap a module as an encoder; its feature width is found by a forward pass.

    Args:
        module: Maps images (B, 3, H, W) to (B, D) or (B, D, h, w).
        image_size: H and W of the images that it will be given.
        name: What error messages call it; the name of its class by default.
    """
    return WrappedEncoder(module, feature_width(module, image_size, name or type(module).__name__))


def unwrapped(encoder: nn.Module) -> nn.Module:
    """The module that ``as_encoder`` wrapped, or the encoder itself: its state dict is what is saved."""
    return encoder.module if isinstance(encoder, WrappedEncoder) else encoder


@torch.no_grad()
def feature_width(module: nn.Module, image_size: int, name: str) -> int:
    """D of a module's output (B, D) or (B, D, h, w), by a forward pass that changes neither buffers nor modes.

    Args:
        module: Maps images (B, 3, H, W) to features.
        image_size: H and W of the images of the forward pass.
        name: What error messages call the module.
    """
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
