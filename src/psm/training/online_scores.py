"""Scores of the encoder while it trains, where labels exist: nearest neighbors and the online linear probe.

Shared out over the processes of a run: each computes the features of its part of the images and classifies its part of
the test images, on its device.
"""

from torch import Tensor

from psm.config.schema import KnnConfig
from psm.data import ImageDataset, ImageStore
from psm.evaluation.accuracy import topk_accuracy
from psm.evaluation.knn import knn_scores
from psm.training.distributed import gather_rows
from psm.training.module import PretrainModule
from psm.training.shared_features import own_features


def online_score_names(module: PretrainModule, data: ImageDataset) -> list[str]:
    """Which scores the run measures."""
    monitor = module.config.monitor
    names = [name for name, wanted in (("knn", monitor.knn), ("linear", monitor.linear)) if wanted]
    return names if data.test is not None else []


def online_scores(module: PretrainModule, data: ImageDataset) -> dict[str, float]:
    """Top-1 accuracy in percent of each, on evenly spaced test images. Called on every rank; all get the same."""
    names, monitor = online_score_names(module, data), module.config.monitor
    if not names:
        return {}
    assert data.test is not None
    test, labels = _own_features(module, data.test, monitor.test_images)
    votes = {}
    if "knn" in names:
        own, train_labels = _own_features(module, data.train, monitor.images)
        train, knn = gather_rows(own), KnnConfig()
        votes["knn"] = knn_scores(train, train_labels, test, len(data.classes), knn.counts[0], knn.temperatures[0])
    if module.probe is not None:
        votes["linear"] = module.probe(test)
    return {name: topk_accuracy(gather_rows(own), labels).top1 for name, own in votes.items()}


def _own_features(module: PretrainModule, images: ImageStore, most: int) -> tuple[Tensor, Tensor]:
    """Features of this process's part of at most so many evenly spaced images, and the labels of all of them."""
    assert images.labels is not None
    indices = images.sample(most)
    features = own_features(module.networks.encoder, images, module.views, indices)
    return features, images.labels[indices].to(features.device)
