"""What the parts of a method may look at: one direction of a step."""

from typing import NamedTuple

import torch
from torch import Tensor

from psm.mining.memory_bank import MemoryBank, Mined


class MiningBatch(NamedTuple):
    """Queries from one view and keys from the other; vectors (N, D) of unit norm."""

    query: Tensor
    key: Tensor
    projection: Tensor  # online projection of the query's view: weighs the mined positives (eq. 5)
    query_view_key: Tensor | None = None  # the key network's projection of the query's view: a negative (eq. 4)
    ids: Tensor | None = None  # (N,) ids of the images
    bank: MemoryBank | None = None  # only read
    generator: torch.Generator | None = None  # decides the draws of PNSM and MoCHi
    allow_self: bool = False  # let a query meet stale copies of its own image in the bank
    positive_generator: torch.Generator | None = None  # decides the draws of the positives; None: ``generator``
    progress: float = 1.0  # share of the run's steps that are done
    views: tuple[int, int] = (0, 1)  # of query and key
    searches: dict[tuple[int, int], Mined] | None = None  # by view and k, shared by the directions of a step

    @property
    def exclude_ids(self) -> Tensor | None:
        """Ids (N,) of the images whose bank rows a query may not meet."""
        return None if self.allow_self else self.ids

    def require_bank(self, part: str) -> MemoryBank:
        """The bank, or an error that names the part that needs it."""
        if self.bank is None:
            raise ValueError(f"{part} mines from a memory bank: pass bank=MemoryBank(size, width).")
        return self.bank

    def search(self, part: str, k: int, query_view: bool = False) -> Mined:
        """The k bank rows nearest to the keys, own images excluded; searched once a step for the keys of each view.

        Args:
            part: who asks, for the error where there is no bank.
            k: how many rows.
            query_view: search for the keys of the query's view instead.
        """
        bank = self.require_bank(part)
        keys = self.query_view_key if query_view else self.key
        if keys is None:
            raise ValueError(f"{part} searches for the keys of the query's view: pass query_view_key.")
        place = self.views[0 if query_view else 1], k
        found = None if self.searches is None else self.searches.get(place)
        if found is None:
            found = bank.search(keys.detach(), k, self.exclude_ids)
            if self.searches is not None:
                self.searches[place] = found
        return found
