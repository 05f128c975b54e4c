"""Indices of a sample of a sequence."""

import torch
from torch import Tensor


def evenly_spaced(count: int, most: int) -> Tensor:
    """At most ``most`` distinct indices below ``count``, int64 and ascending, the first and the last among them.

    All indices where there are no more than ``most``; index 0 alone where ``most`` is 1.
    """
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).round().long()
