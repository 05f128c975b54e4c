"""Signs of health that need no labels, and what they say in words."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize


@torch.no_grad()
def feature_health(features: Tensor, projection: Tensor) -> dict[str, float]:
    """Of the encoder's features (2N, F) and unit projections (2, N, D) of one batch.

    feature_std: spread of unit features, 1 for an even spread, 0 for a collapse. effective_rank: exp of the entropy of
    the features' variance over its principal directions. alignment and uniformity: Wang and Isola 2020.
    """
    # On the CPU: once an epoch, and not every device has double precision or these operations.
    features, projection = features.cpu().double(), normalize(projection.cpu().double(), dim=-1)
    unit = normalize(features, dim=1)
    std = unit.std(0).mean() * unit.shape[1] ** 0.5
    centered = features - features.mean(0)
    variance = torch.linalg.svdvals(centered).square()
    share = variance / variance.sum().clamp(min=1e-300)
    rank = torch.special.entr(share).sum().exp() if variance.sum() > 0 else share.new_ones(())
    alignment = (projection[0] - projection[1]).square().sum(1).mean()
    distance = torch.pdist(projection[0]).square()
    uniformity = distance.mul(-2).exp().mean().log() if len(distance) else distance.new_zeros(())
    return {
        "feature_std": std.item(),
        "effective_rank": rank.item(),
        "alignment": alignment.item(),
        "uniformity": uniformity.item(),
    }


def in_words(history: Sequence[dict[str, Any]]) -> list[str]:
    """What the last epoch's record, given those before it, says of a run that goes wrong; nothing if all is well."""
    now = history[-1]
    if not math.isfinite(now["loss"]):
        return [
            f"The loss became {now['loss']} in epoch {now['epoch']}: the run stops, and that is not saved. "
            "Try a lower optim.lr, optim.clip=1 or precision=32-true."
        ]
    warnings = []
    if now["feature_std"] < 0.02 or now["effective_rank"] < 1.5:
        warnings.append(
            f"Collapse: all images get nearly the same features (spread {now['feature_std']:.3f}, effective rank "
            f"{now['effective_rank']:.1f}). Try a lower optim.lr or a longer optim.warmup."
        )
    # While the bank fills the number of candidates moves: chance is not compared until that is over.
    settled = [x for x in history[-2:] if "chance" in x and x.get("bank_fill", 1.0) >= 1.0]
    if len(settled) == 2 and all(abs(x["loss"] - x["chance"]) < 0.002 * x["chance"] for x in settled):
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
