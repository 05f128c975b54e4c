"""Top-1 and top-5 accuracy of class scores, with their confidence intervals."""

from dataclasses import dataclass

from torch import Tensor

from psm.evaluation.intervals import Interval, accuracy_interval


@dataclass(frozen=True)
class Accuracy:
    """Percentage of test images whose class has the highest score (top-1) or one of the five highest (top-5)."""

    top1: float
    top5: float
    count: int  # test images

    @property
    def top1_interval(self) -> Interval:
        """95 % interval of top-1, in percent."""
        return accuracy_interval(self.top1, self.count)

    @property
    def top5_interval(self) -> Interval:
        """95 % interval of top-5, in percent."""
        return accuracy_interval(self.top5, self.count)


def topk_accuracy(scores: Tensor, labels: Tensor) -> Accuracy:
    """Top-1 and top-5 accuracy of class scores (N, C) for labels (N,), on one device."""
    predictions = scores.topk(min(5, scores.shape[1]), dim=1).indices
    hits = predictions == labels[:, None]
    top1, top5 = hits[:, 0].sum().item(), hits.any(1).sum().item()
    return Accuracy(100 * top1 / len(labels), 100 * top5 / len(labels), len(labels))
