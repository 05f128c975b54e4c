"""Features of images by a frozen encoder, which stays unchanged, including its batch-norm statistics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from psm import ops
from psm.data import ImageStore
from psm.utils.errors import UserError
from psm.views.transform import Views

Prepare = Callable[[Tensor], Tensor]  # uint8 images (B, 3, H, W) -> inputs of the encoder


@contextmanager
def frozen(encoder: nn.Module) -> Iterator[nn.Module]:
    """The encoder in evaluation mode; the mode of each submodule is restored afterwards."""
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
    prepare: Views | Prepare,
    indices: Tensor | None = None,
    batch_size: int = 512,
    precision: str = "32-true",
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Features (N, F) of images, float32.

    Args:
        encoder: maps inputs (B, 3, H, W) to features (B, F).
        images: the images, uint8.
        prepare: turns uint8 images into inputs; of a ``Views`` the plain view is taken.
        indices: which images, (N,); all by default.
        batch_size: images per forward pass.
        precision: 32-true, bf16-mixed or 16-mixed.
        device: where the features are kept.
        advance: called with the number of images after each batch.
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
            features.append(encoder(inputs.to(place.dtype)).float().to(device))
            advance(len(rows))
    return torch.cat(features)


def check_finite_weights(encoder: nn.Module, source: str) -> None:
    """Refuse an encoder with a weight or buffer that is NaN or infinite; ``source`` names it in the error."""
    for name, value in encoder.state_dict().items():
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(
                f"{source} has weights that are NaN or infinite ({name}), so it cannot be scored: give a checkpoint "
                "from before its training diverged, or train it again."
            )


def check_finite_features(features: Tensor, source: str) -> Tensor:
    """The features (N, F); refused if any of them is NaN or infinite."""
    damaged = int((~features.isfinite().all(1)).sum())
    if damaged:
        raise UserError(
            f"{source} gives features that are NaN or infinite for {damaged:,} of {len(features):,} images, so it "
            "cannot be scored: try precision=32-true, or give another checkpoint."
        )
    return features
