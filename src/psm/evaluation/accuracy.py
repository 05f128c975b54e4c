"""Top-1 and top-5 accuracy of class scores."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Accuracy:
    """Percentage of test images whose class has the highest score (top-1) or one of the five highest (top-5)."""

    top1: float
    top5: float


def topk_accuracy(scores: Tensor, labels: Tensor) -> Accuracy:
    """Top-1 and top-5 accuracy of class scores (N, C) for labels (N,)."""
    predictions = scores.topk(min(5, scores.shape[1]), dim=1).indices
    hits = predictions == labels[:, None]
    return Accuracy(100 * hits[:, 0].double().mean().item(), 100 * hits.any(1).double().mean().item())
