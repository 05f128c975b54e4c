"""Layer-wise learning rate decay: how far below the head each parameter of an encoder stands."""

import re

from torch import nn

from psm.models.encoder import unwrapped

# A part of a name that numbers a layer: layer1 of a ResNet, blocks.3 of a ViT, denseblock2, encoder_layer_0, stages.1.
_NUMBERED = re.compile(r"\d+|\w*(?:layer|block|stage)_?\d+")


def layer_scales(encoder: nn.Module, decay: float) -> dict[nn.Parameter, float]:
    """The factor of each parameter's learning rate: ``decay`` to the power of its distance from the head.

    The layers of an encoder are the stages of a ResNet and the blocks of a transformer; what comes before the first of
    them (stem, embeddings) is a layer too, and what comes between or after belongs to the layer before it.
    """
    depth, layer = 0, ""
    depths: dict[nn.Parameter, int] = {}
    for name, parameter in unwrapped(encoder).named_parameters():
        numbered = _layer_name(name)
        if numbered and numbered != layer:
            depth, layer = depth + 1, numbered
        depths[parameter] = depth
    return {parameter: decay ** (depth + 1 - at) for parameter, at in depths.items()}


def _layer_name(name: str) -> str:
    """The name up to the first part that numbers a layer; empty where none does."""
    parts = name.split(".")[:-1]
    end = next((place for place, part in enumerate(parts, 1) if _NUMBERED.fullmatch(part)), 0)
    return ".".join(parts[:end])
