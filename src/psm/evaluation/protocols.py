"""Every kind of score as a function of a subject's features; `SCORES` in psm.config.evaluation gives their order."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from torch import Tensor

from psm.config.evaluation import SCORES, LinearConfig
from psm.evaluation.accuracy import Accuracy
from psm.evaluation.clusters import kmeans, nmi
from psm.evaluation.few_labels import DrawStats, draw_labeled, parse_amounts, score_draws
from psm.evaluation.intervals import Interval, mean_interval
from psm.evaluation.knn import knn_accuracies, searches
from psm.evaluation.linear import LinearResult, linear_accuracy
from psm.evaluation.logistic import fits, logistic_accuracy
from psm.evaluation.ranks import lidar, rankme
from psm.evaluation.retrieval import average_precisions
from psm.evaluation.scores import Estimate, linear_name
from psm.evaluation.subject import SubjectFeatures

log = logging.getLogger("psm")

# Scores that need neither labels nor test images.
LABEL_FREE = ("rankme", "lidar")


class Measured(NamedTuple):
    """What a kind of score measured, and the settings that it adds to the protocol."""

    estimates: dict[str, Estimate]
    used: dict[str, Any]


def accuracy_estimates(accuracy: Accuracy | DrawStats) -> dict[str, Estimate]:
    """Top-1 and top-5 with their intervals."""
    return {
        "top1": Estimate(accuracy.top1, accuracy.top1_interval),
        "top5": Estimate(accuracy.top5, accuracy.top5_interval),
    }


def score_knn(features: SubjectFeatures) -> Iterator[Measured]:
    """A score for each k and temperature, from one search."""
    (train_labels, test_labels), config = features.labels, features.config.knn
    train, test = features.train, features.test
    with features.bars(f"{features.subject.name}: nearest neighbors", searches(train, test)) as advance:
        found = knn_accuracies(
            train, train_labels, test, test_labels, features.data.classes, config, features.device, advance
        )
    for k, temperature, accuracy in found:
        yield Measured(accuracy_estimates(accuracy), {"k": k, "temperature": temperature})


def score_linear(features: SubjectFeatures) -> Iterator[Measured]:
    """A linear layer, at one rate or the best of several on held-out training images."""
    config = features.subject.linear
    result = _linear(features, config)
    yield Measured(accuracy_estimates(result.accuracy), _linear_settings(config, result))


def _linear_settings(config: LinearConfig, result: LinearResult) -> dict[str, Any]:
    used = {name: value for name, value in asdict(config).items() if name != "enabled"} | {"lr": result.lr}
    chosen = {"held_out_top1": list(result.held_out_top1.values())} if result.held_out_top1 else {}
    return {"name": linear_name(used)} | used | chosen


def _linear(features: SubjectFeatures, config: LinearConfig, rows: Tensor | None = None) -> LinearResult:
    """Trained on the images at ``rows``, all by default."""
    train_labels, test_labels = features.labels
    trainings = 2 if len(set(config.lr_grid or ())) > 1 else 1
    with features.bars(f"{features.subject.name}: linear", trainings * config.epochs) as advance:
        return linear_accuracy(
            features.of_epochs(config.augment, rows),
            train_labels if rows is None else train_labels[rows],
            features.test,
            test_labels,
            features.data.classes,
            config,
            features.config.seed,
            advance=lambda epoch: advance(1),
            device=features.device,
        )


def score_logistic(features: SubjectFeatures) -> Iterator[Measured]:
    """Logistic regression, C chosen on held-out training images."""
    (train_labels, test_labels), grid = features.labels, features.config.logistic.c_grid
    with features.bars(f"{features.subject.name}: logistic regression", fits(grid, len(train_labels))) as advance:
        result = logistic_accuracy(
            features.train,
            train_labels,
            features.test,
            test_labels,
            features.data.classes,
            grid,
            features.device,
            advance,
        )
    if not result.converged:
        log.warning("logistic regression (C = %g) has not converged: its score may be a little low.", result.c)
    chosen = {"held_out_top1": list(result.held_out_top1.values())} if result.held_out_top1 else {}
    used = {"c": result.c, "c_grid": sorted(set(grid)), "converged": result.converged} | chosen
    yield Measured(accuracy_estimates(result.accuracy), used)


def score_few_labels(features: SubjectFeatures) -> Iterator[Measured]:
    """A score for each amount of labels and classifier, the mean over draws."""
    config, seed = features.config.few_labels, features.config.seed
    train_labels, _ = features.labels
    for amount in parse_amounts(config.amounts):
        for name in dict.fromkeys(config.classifiers):
            score = _few_label_scorer(features, name)
            with features.bars(f"{features.subject.name}: {amount}, {name}", config.draws) as advance:
                stats = score_draws(train_labels, amount, config.draws, seed, score, advance)
            used = {
                "labels": str(amount),
                "labeled_images": len(draw_labeled(train_labels, amount, seed)),
                "classifier": name,
                "draws": len(stats.draws),
                "draw_top1": [draw.top1 for draw in stats.draws],
            }
            yield Measured(accuracy_estimates(stats), used)


def _few_label_scorer(features: SubjectFeatures, name: str) -> Callable[[Tensor], Accuracy]:
    """The test accuracy of a classifier trained on the training images at some indices."""
    (labels, test_labels), classes, config = features.labels, features.data.classes, features.config

    def by_knn(rows: Tensor) -> Accuracy:
        parts = features.train[rows], labels[rows], features.test, test_labels
        return knn_accuracies(*parts, classes, config.knn, features.device)[0][2]

    def by_logistic(rows: Tensor) -> Accuracy:
        parts = features.train[rows], labels[rows], features.test, test_labels
        return logistic_accuracy(*parts, classes, config.logistic.c_grid, features.device).accuracy

    def by_linear(rows: Tensor) -> Accuracy:
        return _linear(features, replace(features.subject.linear, augment=False), rows).accuracy

    return {"knn": by_knn, "logistic": by_logistic, "linear": by_linear}[name]


def score_retrieval(features: SubjectFeatures) -> Iterator[Measured]:
    """Mean average precision of the test images' queries."""
    (train_labels, test_labels), gallery = features.labels, features.config.retrieval.gallery
    own = gallery == "test"
    rows, labels = (features.test, test_labels) if own else (features.train, train_labels)
    with features.bars(f"{features.subject.name}: retrieval", len(test_labels)) as advance:
        precisions = average_precisions(features.test, test_labels, rows, labels, own, features.device, advance)
    if not len(precisions):
        log.warning("no query has an image of its class to find: retrieval is not scored.")
        return
    low, high = mean_interval(precisions)
    interval = Interval(100 * max(0.0, low), 100 * min(1.0, high))
    estimate = Estimate(100 * precisions.double().mean().item(), interval)
    yield Measured({"map": estimate}, {"gallery": gallery, "queries": len(precisions)})


def score_clusters(features: SubjectFeatures) -> Iterator[Measured]:
    """NMI of k-means clusters of the test images."""
    _, test_labels = features.labels
    config = features.config.clusters
    k = min(config.k or features.data.classes, len(test_labels))
    seed, device = features.config.seed, features.device
    with features.bars(f"{features.subject.name}: k-means", config.starts) as advance:
        found = kmeans(features.test, k, config.starts, seed=seed, device=device, advance=advance)
    value, interval = nmi(found.assignments, test_labels)
    yield Measured({"nmi": Estimate(value, interval)}, {"k": k, "starts": config.starts, "inertia": found.inertia})


def score_rankme(features: SubjectFeatures) -> Iterator[Measured]:
    """RankMe of the training images."""
    config = features.config.rankme
    if _has_space(features, config.space):
        vectors = features.sample(config.images, config.space)
        value, interval = rankme(vectors)
        _warn_of_few("RankMe", len(vectors), vectors.shape[-1])
        used = {"space": config.space, "images_used": len(vectors), "width": vectors.shape[-1]}
        yield Measured({"rankme": Estimate(value, interval)}, used)


def score_lidar(features: SubjectFeatures) -> Iterator[Measured]:
    """LiDAR of random views of training images."""
    config = features.config.lidar
    if _has_space(features, config.space):
        vectors = features.of_views(config.images, config.views, config.space)
        value, interval = lidar(vectors, config.delta)
        _warn_of_few("LiDAR", len(vectors), vectors.shape[-1])
        used = {"space": config.space, "images_used": len(vectors), "width": vectors.shape[-1]}
        yield Measured({"lidar": Estimate(value, interval)}, used | {"views": config.views, "delta": config.delta})


def _has_space(features: SubjectFeatures, space: str) -> bool:
    """False for a baseline that has no such vectors."""
    return features.subject.has_rank and (space == "features" or features.subject.projector is not None)


def _warn_of_few(name: str, images: int, width: int) -> None:
    if images <= width:
        log.warning("%s of %d images cannot exceed their number, and the features have width %d.", name, images, width)


PROTOCOLS: dict[str, Callable[[SubjectFeatures], Iterator[Measured]]] = {
    "knn": score_knn,
    "linear": score_linear,
    "logistic": score_logistic,
    "few_labels": score_few_labels,
    "retrieval": score_retrieval,
    "clusters": score_clusters,
    "rankme": score_rankme,
    "lidar": score_lidar,
}
assert tuple(PROTOCOLS) == SCORES
