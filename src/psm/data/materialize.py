"""From a recipe for images to the images themselves: in memory when the set is small enough, else in the cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from psm.config.schema import ImagesConfig
from psm.data import cache
from psm.utils import progress as bars

Failure = tuple[int, str]  # which image of the recipe could not be made, and why
_WINDOW_BYTES = 64_000_000


@dataclass(frozen=True)
class Recipe:
    """Images still to be made: how many, how large, and how to make those from ``start`` to ``stop``.

    ``make`` returns the images it could make, uint8 (n, 3, size, size), and the failures it met. The fingerprint
    names everything that the pixels depend on.
    """

    title: str
    count: int
    size: int
    fingerprint: str
    make: Callable[[int, int], tuple[np.ndarray, list[Failure]]]

    @property
    def bytes(self) -> int:
        return self.count * 3 * self.size * self.size

    def windows(self, shown: bool) -> Iterator[tuple[np.ndarray, list[Failure]]]:
        """The images in order, a bounded number at a time."""
        room = max(8, min(1024, _WINDOW_BYTES // (3 * self.size * self.size)))
        step = 1 << (room.bit_length() - 1)  # a power of two, so that windows end where generated blocks end
        with bars.counting(self.title, self.count, shown) as done:
            for start in range(0, self.count, step):
                stop = min(start + step, self.count)
                yield self.make(start, stop)
                done(stop)


@dataclass(frozen=True)
class Made:
    """What came of a recipe: the images (array or memory map), and the failures left out of them."""

    pixels: np.ndarray
    failures: list[Failure]

    def present(self, count: int) -> np.ndarray:
        """Which of the recipe's ``count`` images were made, as a mask."""
        mask = np.ones(count, dtype=bool)
        mask[[index for index, _ in self.failures]] = False
        return mask


def hold(recipes: list[Recipe], config: ImagesConfig, progress: bool) -> list[Made]:
    """Make all images of one set; the set as a whole decides between memory and cache."""
    if sum(recipe.bytes for recipe in recipes) > config.memory * 1e9:
        folder = cache.folder(config)
        return [_through_cache(recipe, folder, progress) for recipe in recipes]
    return [_in_memory(recipe, progress) for recipe in recipes]


def _in_memory(recipe: Recipe, progress: bool) -> Made:
    pixels = np.empty((recipe.count, 3, recipe.size, recipe.size), dtype=np.uint8)
    filled, failures = 0, []
    for window, missed in recipe.windows(progress):
        pixels[filled : filled + len(window)] = window
        filled += len(window)
        failures += missed
    return Made(pixels[:filled], failures)


def _through_cache(recipe: Recipe, folder: Path, progress: bool) -> Made:
    entry = cache.Entry(folder, recipe.fingerprint, recipe.size)
    pixels, failures = entry.open(lambda: recipe.windows(progress), recipe.bytes)
    return Made(pixels, failures)
