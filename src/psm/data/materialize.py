"""Decode or generate the images of a data set: into memory if it is small enough, else into the cache."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from psm.config.schema import ImagesConfig
from psm.data import cache
from psm.data.cache import CachedPixels, CachedWhole, Failure
from psm.data.dataset import Pixels
from psm.data.whole_images import WholeImages
from psm.utils.errors import ResourceError
from psm.utils.progress import counting

log = logging.getLogger("psm")

KEPT_FROM = 1_000  # images: their decoding takes more than a moment
_CHUNK_BYTES = 64_000_000


@dataclass(frozen=True)
class PixelSource:
    """The images of one split before they are decoded.

    ``read(start, stop)`` returns the readable images of that range, uint8 (n, 3, size, size), and the failures; whole
    images as a list of (H, W, 3), with ``size`` their shorter side. The
    fingerprint names everything that the pixels depend on.
    """

    title: str  # of the progress bar
    count: int
    size: int
    fingerprint: str
    read: Callable[[int, int], tuple[np.ndarray | list[np.ndarray], list[Failure]]]
    decodes: bool = False  # reading takes much longer than copying
    whole: bool = False

    @property
    def bytes(self) -> int:
        """Memory of all images; of whole ones about."""
        return round(self.count * 3 * self.size * self.size * (1.4 if self.whole else 1))

    def chunks(self, shown: bool) -> Iterator[tuple[np.ndarray | list[np.ndarray], list[Failure]]]:
        """The images in order, a bounded number at a time."""
        most = max(8, min(1024, _CHUNK_BYTES // (3 * self.size * self.size)))
        step = 1 << (most.bit_length() - 1)  # a power of two, so that chunks end where generated blocks end
        with counting(self.title, self.count, shown) as done:
            for start in range(0, self.count, step):
                stop = min(start + step, self.count)
                yield self.read(start, stop)
                done(stop)


@dataclass(frozen=True)
class Materialized:
    """The images of a source that could be read, and the failures."""

    pixels: Pixels | CachedWhole
    failures: list[Failure]

    def held(self, size: int) -> Pixels:
        """The images for a store, as squares of this size."""
        return WholeImages(self.pixels, size) if isinstance(self.pixels, CachedWhole) else self.pixels

    def readable(self, count: int) -> np.ndarray:
        """Indices of the source's ``count`` images that could be read."""
        mask = np.ones(count, dtype=bool)
        mask[[index for index, _ in self.failures]] = False
        return np.flatnonzero(mask)


def materialize(
    sources: list[PixelSource], config: ImagesConfig, progress: bool, shared: bool = False
) -> list[Materialized]:
    """Read the splits of one data set, all into memory, or all into the cache if together they exceed images.memory.

    Images in memory come from the cache too, decoded once, where decoding them takes its time or several processes of
    this machine need them: all of these then hold the same memory.
    """
    if sum(source.bytes for source in sources) > config.memory * 1e9 or any(source.whole for source in sources):
        folder = cache.cache_folder(config)
        return [_into_cache(source, folder, progress) for source in sources]
    if shared or any(source.decodes and source.count >= KEPT_FROM for source in sources):
        try:
            folder = cache.cache_folder(config)
            return [_into_memory_from_cache(source, folder, progress) for source in sources]
        except (cache.CacheUnusable, ResourceError) as error:
            log.warning("%s Until then the images are decoded at every start, by each process.", error)
    return [_into_memory(source, progress) for source in sources]


def _into_memory(source: PixelSource, progress: bool) -> Materialized:
    pixels = np.empty((source.count, 3, source.size, source.size), dtype=np.uint8)
    filled, failures = 0, []
    for images, failed in source.chunks(progress):
        pixels[filled : filled + len(images)] = images
        filled += len(images)
        failures += failed
    return Materialized(pixels[:filled], failures)


def _into_memory_from_cache(source: PixelSource, folder: Path, progress: bool) -> Materialized:
    found = _into_cache(source, folder, progress)
    assert isinstance(found.pixels, CachedPixels)
    return Materialized(found.pixels.in_memory(), found.failures)


def _into_cache(source: PixelSource, folder: Path, progress: bool) -> Materialized:
    entry = cache.CacheEntry(folder, source.fingerprint, source.size, source.whole)
    pixels, failures = entry.open(lambda: source.chunks(progress), source.bytes)
    return Materialized(pixels, failures)
