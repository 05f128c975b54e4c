"""What depends on the training device: copies that wait for nothing, and images that live where they are used."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from psm.data import ImageStore

FREE_SHARE = 0.5  # of the device's free memory that a data set may take


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Values on the device, by way of pinned memory where that lets the copy run beside the computation."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Computation in the tensors' own precision, whatever the networks around it compute in."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def free_bytes(device: torch.device) -> int:
    """Memory of a device that a data set could take: none on a CPU, where images are already, or where unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def held_images(images: ImageStore, device: torch.device) -> Tensor | None:
    """The whole set, uint8 (N, 3, H, W), on the device if it fits in half of the free memory; None otherwise."""
    height, width = images.shape[1:]
    if images.mapped or len(images) * 3 * height * width > FREE_SHARE * free_bytes(device):
        return None
    return images.take(torch.arange(len(images))).to(device)
