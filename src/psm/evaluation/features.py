"""Features of images by a frozen encoder; nothing of the encoder changes, its batch-norm statistics included."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from psm import ops
from psm.data import ImageStore
from psm.views.transform import Views

Encode = Callable[[Tensor], Tensor]


@contextmanager
def frozen(encoder: nn.Module) -> Iterator[nn.Module]:
    """The encoder in evaluation mode; every part's own mode is restored afterwards."""
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    try:
        yield encoder
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.inference_mode()
def extract(
    encoder: nn.Module,
    images: ImageStore,
    prepare: Views | Encode,
    indices: Tensor | None = None,
    batch_size: int = 512,
    precision: str = "32-true",
    advance: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Features (N, F), float32 on the CPU, of the images at ``indices`` (all by default).

    ``prepare`` turns uint8 images into the encoder's input: the plain view unless a function is given. ``advance`` is
    told how many images are done.
    """
    prepare = prepare.plain if isinstance(prepare, Views) else prepare
    place = next(encoder.parameters(), torch.empty(0))
    indices = torch.arange(len(images)) if indices is None else indices
    mixed = precision in ("bf16-mixed", "16-mixed")
    features = []
    with (
        frozen(encoder),
        ops.accelerated(encoder, place.device),
        torch.autocast(place.device.type, torch.bfloat16 if "bf16" in precision else torch.float16, enabled=mixed),
    ):
        for rows in indices.split(batch_size):
            inputs = prepare(images.take(rows).to(place.device))
            features.append(encoder(inputs.to(place.dtype)).float().cpu())
            advance(len(rows))
    return torch.cat(features)
