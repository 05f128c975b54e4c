"""Which images are held out and which are kept: pure functions of the labels and a fixed seed."""

import numpy as np

_SEED = 9_182_736


def turns(labels: np.ndarray | None, count: int, purpose: str) -> np.ndarray:
    """Each image's random place within its class, from 0, (count,). Without labels all are one class."""
    random = np.random.default_rng([_SEED, *purpose.encode()])
    labels = np.zeros(count, dtype=np.int64) if labels is None else labels
    shuffled = random.permutation(count)
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    sizes = np.bincount(labels, minlength=1)
    place = np.empty(count, dtype=np.int64)
    place[by_class] = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return place


def kept(labels: np.ndarray | None, count: int, limit: int | None) -> np.ndarray:
    """Sorted indices of at most ``limit`` images, even over classes; a smaller limit picks a subset of a larger."""
    if limit is None or limit >= count:
        return np.arange(count)
    place = turns(labels, count, "limit")
    order = np.lexsort((place,) if labels is None else (labels, place))
    return np.sort(order[:limit])


def held_out(labels: np.ndarray, share: float) -> np.ndarray:
    """Mask of the images held out for testing: the share of each class, one at least, but never a whole class."""
    sizes = np.bincount(labels)
    quota = np.minimum(np.maximum(np.round(sizes * share).astype(np.int64), 1), sizes - 1)
    return turns(labels, len(labels), "test") < quota[labels]
