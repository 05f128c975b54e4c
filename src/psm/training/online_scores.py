"""Scores of the encoder while it trains, where labels exist: nearest neighbors and the online linear probe."""

from torch import Tensor

from psm.config.schema import KnnConfig
from psm.data import ImageDataset, ImageStore
from psm.evaluation.accuracy import topk_accuracy
from psm.evaluation.features import extract
from psm.evaluation.knn import knn_accuracy
from psm.training.module import PretrainModule


def online_score_names(module: PretrainModule, data: ImageDataset) -> list[str]:
    """Which scores the run measures."""
    monitor = module.config.monitor
    names = [name for name, wanted in (("knn", monitor.knn), ("linear", monitor.linear)) if wanted]
    return names if data.test is not None else []


def online_scores(module: PretrainModule, data: ImageDataset) -> dict[str, float]:
    """Top-1 accuracy in percent of each, on evenly spaced test images."""
    names, monitor = online_score_names(module, data), module.config.monitor
    if not names:
        return {}
    assert data.test is not None
    test, labels = _features(module, data.test, monitor.test_images)
    scores = {}
    if "knn" in names:
        train = _features(module, data.train, monitor.images)
        scores["knn"] = knn_accuracy(*train, test, labels, len(data.classes), KnnConfig(), module.device).top1
    if module.probe is not None:
        logits = module.probe(test)
        scores["linear"] = topk_accuracy(logits, labels.to(logits.device)).top1
    return scores


def _features(module: PretrainModule, images: ImageStore, most: int) -> tuple[Tensor, Tensor]:
    """Features and labels of at most so many evenly spaced images."""
    assert images.labels is not None
    indices = images.sample(most)
    return extract(module.networks.encoder, images, module.views, indices), images.labels[indices]
