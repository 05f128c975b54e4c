"""A trained encoder that is ready to embed, with what identifies it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from psm.config.schema import ViewsConfig
from psm.data import ImageStore
from psm.evaluation.features import check_finite_features, check_finite_weights, extract
from psm.models.encoder import Encoder, unwrapped
from psm.models.factory import prefers_channels_last
from psm.models.pretrained import EncoderInfo, checksum, find_encoder, load_encoder
from psm.utils.devices import find_device
from psm.utils.errors import UserError
from psm.views.transform import Views


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder in evaluation mode on its device."""

    file: Path
    module: Encoder
    checksum: str  # of the weights
    views: Views
    precision: str

    @property
    def info(self) -> EncoderInfo:
        return self.module.info

    def embed(self, pixels: torch.Tensor, batch_size: int = 256) -> torch.Tensor:
        """Embeddings (N, D), float32 on the CPU, of images uint8 (N, 3, H, W)."""
        features = extract(self.module, ImageStore(pixels), self.views, None, batch_size, self.precision)
        return check_finite_features(features, f"checkpoint={self.file}")

    def describe(self) -> dict[str, Any]:
        """What a file of its embeddings says of it."""
        info = self.info
        described = {"encoder": info.encoder, "method": info.method, "epoch": info.epoch, "size": info.size}
        return {"checksum": self.checksum, "file": str(self.file.resolve()), "width": info.width, **described}


def open_encoder(
    checkpoint: str | Path, module: nn.Module | None = None, accelerator: str = "auto", precision: str = "32-true"
) -> LoadedEncoder:
    """Load a trained encoder.

    Args:
        checkpoint: run folder, checkpoint (.ckpt) or encoder (.safetensors).
        module: receives the weights of a run that was given a module as its encoder.
        accelerator: auto, cpu, gpu or mps.
        precision: 32-true, bf16-mixed or 16-mixed.
    """
    if not str(checkpoint):
        raise UserError("checkpoint= is missing: give a run folder, for example checkpoint=runs/a.")
    device = find_device(accelerator)
    file = find_encoder(checkpoint)
    encoder = load_encoder(file, module)
    check_finite_weights(encoder, f"checkpoint={file}")
    digest = f"{checksum(unwrapped(encoder).state_dict()):08x}"
    if prefers_channels_last(device):
        encoder = encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    info = encoder.info
    views = Views(ViewsConfig(size=info.size), info.size, info.mean, info.std)
    return LoadedEncoder(file, encoder.to(device), digest, views, precision)
