"""The order of an epoch over shards: shards permuted, then images within a window of shards.

A function of the seed, the epoch and the index alone. It is made one window at a time, so that neither the whole order
is held nor everything before a resumed step computed.
"""

from functools import lru_cache

import numpy as np
import torch

from psm.utils.seeding import generator


class ShardOrder:
    """The images of one epoch in their order."""

    def __init__(self, starts: np.ndarray, window: int, seed: int, epoch: int):
        """Permute the shards.

        Args:
            starts: (shards + 1,) the id of each shard's first image, and the number of images.
            window: shards whose images are mixed.
            seed: of the run.
            epoch: counted from 0.
        """
        self.starts, self.seed, self.epoch = starts, seed, epoch
        shards = torch.randperm(len(starts) - 1, generator=generator(seed, "shards", epoch)).numpy()
        self.windows = [shards[first : first + window] for first in range(0, len(shards), window)]
        lengths = [int(np.diff(starts)[window].sum()) for window in self.windows]
        self.ends = np.cumsum(lengths)  # (windows,): positions in the epoch
        self._ids = lru_cache(maxsize=2)(self._window_ids)

    def window_of(self, position: int) -> int:
        """The window in which a position of the epoch lies."""
        return int(np.searchsorted(self.ends, position, side="right"))

    def shards(self, first: int, last: int) -> np.ndarray:
        """The shards of the windows in which some positions lie."""
        return np.concatenate(self.windows[self.window_of(first) : self.window_of(last - 1) + 1])

    def ids(self, first: int, last: int) -> np.ndarray:
        """The ids of the images at some positions of the epoch."""
        parts = []
        for window in range(self.window_of(first), min(self.window_of(last - 1), len(self.windows) - 1) + 1):
            begins = int(self.ends[window - 1]) if window else 0
            parts.append(self._ids(window)[max(0, first - begins) : last - begins])
        return np.concatenate(parts)

    def _window_ids(self, window: int) -> np.ndarray:
        ids = np.concatenate([np.arange(self.starts[shard], self.starts[shard + 1]) for shard in self.windows[window]])
        random = generator(self.seed, "order", self.epoch, window)
        return ids[torch.randperm(len(ids), generator=random).numpy()]
