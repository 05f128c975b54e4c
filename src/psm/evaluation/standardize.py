"""A fixed affine map of features to zero mean and unit deviation: a classifier on top stays linear."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Standardize:
    """Subtract the training features' mean and divide by their standard deviation."""

    mean: Tensor  # (F,)
    std: Tensor  # (F,)

    @classmethod
    def fit(cls, features: Tensor) -> "Standardize":
        """From training features (N, F); features that do not vary, or a single row, keep their scale."""
        if len(features) < 2:
            return cls(features.mean(0), torch.ones_like(features[0]))
        return cls(features.mean(0), features.std(0).clamp(min=1e-6))

    def __call__(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.std

    def to(self, place: Tensor) -> "Standardize":
        """On the device and in the dtype of another tensor."""
        return Standardize(self.mean.to(place), self.std.to(place))
