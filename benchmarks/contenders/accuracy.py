"""What the contenders of time_to_accuracy.py share: the images, the score, and the conversation with the driver."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from psm.evaluation.knn import knn_accuracy


def images(path: str) -> dict[str, Tensor]:
    """uint8 images (N, 3, H, W) and labels of both splits, and mean and deviation of each channel."""
    return torch.load(path, weights_only=True)


@torch.no_grad()
def score(encoder: nn.Module, data: dict[str, Tensor]) -> float:
    """kNN accuracy in percent (k = 20, T = 0.1) of the encoder in evaluation mode; its mode is restored."""
    training = encoder.training
    encoder.eval()
    mean, std = (data[name].view(1, 3, 1, 1) for name in ("mean", "std"))

    def features(pixels: Tensor) -> Tensor:
        return torch.cat([encoder((part / 255 - mean) / std) for part in pixels.split(500)])

    train, test = features(data["train"]), features(data["test"])
    encoder.train(training)
    classes = int(data["test_labels"].max()) + 1
    return knn_accuracy(train, data["train_labels"], test, data["test_labels"], classes).top1


def tell(seconds: float, encoder: nn.Module, data: dict[str, Tensor]) -> None:
    """Say how long the steps took and what they led to."""
    print(f"score {score(encoder, data)}", flush=True)
    print(f"seconds {seconds}", flush=True)
