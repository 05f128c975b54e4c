"""Which images are held out and which a limit keeps: functions of the labels and a fixed seed."""

import numpy as np

_SEED = 9_182_736
TEST_NAMES = ("test", "val", "valid", "validation")  # what a test split may be called


def class_ranks(labels: np.ndarray | None, count: int, purpose: str) -> np.ndarray:
    """Each image's random rank within its class, from 0, (count,). Without labels all are one class."""
    random = np.random.default_rng([_SEED, *purpose.encode()])
    labels = np.zeros(count, dtype=np.int64) if labels is None else labels
    shuffled = random.permutation(count)
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    sizes = np.bincount(labels, minlength=1)
    ranks = np.empty(count, dtype=np.int64)
    ranks[by_class] = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return ranks


def limit_indices(labels: np.ndarray | None, count: int, limit: int | None) -> np.ndarray:
    """Sorted indices of at most ``limit`` images, balanced over classes; smaller limits give subsets of larger ones."""
    if limit is None or limit >= count:
        return np.arange(count)
    ranks = class_ranks(labels, count, "limit")
    order = np.lexsort((ranks,) if labels is None else (labels, ranks))
    return np.sort(order[:limit])


def held_out_mask(labels: np.ndarray, fraction: float, purpose: str = "test") -> np.ndarray:
    """Mask (N,) of held-out images: the fraction of each class, at least one image but never a whole class.

    Args:
        labels: classes of the images, (N,).
        fraction: of each class.
        purpose: other images are drawn for another purpose.
    """
    sizes = np.bincount(labels)
    quota = np.minimum(np.maximum(np.round(sizes * fraction).astype(np.int64), 1), sizes - 1)
    return class_ranks(labels, len(labels), purpose) < quota[labels]
