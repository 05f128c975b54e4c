"""Label-free health metrics of the features, and warnings in words."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

SAMPLED = 1024  # images that health is measured on, at most

HEALTH = ("feature_std", "effective_rank", "alignment", "uniformity")  # what feature_health measures


def sampling_step(images: int) -> int:
    """Health is measured on every so many-th image of a batch."""
    return max(1, -(-images // SAMPLED))


@torch.no_grad()
def feature_health(features: Tensor, projection: Tensor) -> dict[str, float]:
    """Health metrics of one batch's features (2N, F) and projections (2, N, D), of at most SAMPLED of its images.

    Returns:
        feature_std: standard deviation of unit features, scaled so that 1 is isotropic and 0 a collapse.
        effective_rank: exp of the entropy of the variance over principal components.
        alignment, uniformity: Wang and Isola 2020.
    """
    features = features[:: sampling_step(len(features) // 2)]
    projection = projection[:, :: sampling_step(projection.shape[1])]
    if features.device.type not in ("cpu", "cuda"):  # not every device has float64 or these operations
        features, projection = features.cpu(), projection.cpu()
    features, projection = features.double(), normalize(projection.double(), dim=-1)
    unit = normalize(features, dim=1)
    std = unit.std(0).mean() * unit.shape[1] ** 0.5
    centered = features - features.mean(0)
    variance = torch.linalg.svdvals(centered).square()
    ratio = variance / variance.sum().clamp(min=1e-300)
    rank = torch.where(variance.sum() > 0, torch.special.entr(ratio).sum().exp(), 1.0)
    alignment = (projection[0] - projection[1]).square().sum(1).mean()
    distance = torch.pdist(projection[0]).square()
    uniformity = distance.mul(-2).exp().mean().log() if len(distance) else distance.new_zeros(())
    return dict(zip(HEALTH, torch.stack([std, rank, alignment, uniformity]).tolist(), strict=True))


def divergence(loss: float, epoch: int) -> str:
    """What to say when the loss or a weight is NaN or infinite."""
    return (
        f"The loss became {loss} in epoch {epoch}: the run stops, and that is not saved. "
        "Try a lower optim.lr, optim.clip=1 or precision=32-true."
    )


def health_warnings(history: Sequence[dict[str, Any]]) -> list[str]:
    """Warnings about the last of these epoch records, given those before it; empty if all is well."""
    now = history[-1]
    warnings = []
    if now["feature_std"] < 0.02 or now["effective_rank"] < 1.5:
        warnings.append(
            f"Collapse: all images get nearly the same features (spread {now['feature_std']:.3f}, effective rank "
            f"{now['effective_rank']:.1f}). Try a lower optim.lr or a longer optim.warmup."
        )
    # While the bank fills the number of candidates grows: compare with chance only once it is full.
    full = [x for x in history[-2:] if "chance" in x and x.get("bank_fill", 1.0) >= 1.0]
    if len(full) == 2 and all(abs(x["loss"] - x["chance"]) < 0.002 * x["chance"] for x in full):
        cause = (
            "the features have collapsed"
            if warnings
            else "the learning rate may be too low or too high, or the views too different from each other"
        )
        warnings.append(
            f"The loss is pinned at chance: {now['loss']:.3f}, where guessing among all candidates gives "
            f"{now['chance']:.3f}; {cause}."
        )
    return warnings
