"""What the parts of a method may look at: one direction of a step."""

from typing import NamedTuple

import torch
from torch import Tensor

from psm.mining.draws import Draws
from psm.mining.memory_bank import MemoryBank, Mined
from psm.mining.processes import ONE_PROCESS, Processes


class MiningBatch(NamedTuple):
    """Queries from one view and keys from the other; vectors (N, D) of unit norm."""

    query: Tensor
    key: Tensor
    projection: Tensor  # online projection of the query's view: weighs the mined positives (eq. 5)
    query_view_key: Tensor | None = None  # the key network's projection of the query's view: a negative (eq. 4)
    ids: Tensor | None = None  # (N,) ids of the images
    bank: MemoryBank | None = None  # only read
    generator: torch.Generator | None = None  # decides the draws of PNSM and MoCHi, unless ``draws`` are given
    allow_self: bool = False  # let a query meet stale copies of its own image in the bank
    positive_generator: torch.Generator | None = None  # decides the draws of the positives; None: ``generator``
    progress: float = 1.0  # share of the run's steps that are done
    views: tuple[int, int] = (0, 1)  # of query and key
    searches: dict[tuple[int, int], Mined] | None = None  # by view and k, shared by the directions of a step
    search_both: bool = False  # the keys of both views are searched for, in one search
    draws: Draws | None = None  # decide the same, whichever process draws for which queries
    processes: Processes = ONE_PROCESS  # that share the anchors of the batch

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
        if found is None and self.search_both and self.searches is not None and self.query_view_key is not None:
            self.searches.update(self._search_both(bank, k, self.searches, self.query_view_key))
            found = self.searches[place]
        if found is None:
            found = bank.search(keys.detach(), k, self.exclude_ids, self.processes)
            if self.searches is not None:
                self.searches[place] = found
        return found

    def _search_both(
        self, bank: MemoryBank, k: int, known: dict[tuple[int, int], Mined], query_view_key: Tensor
    ) -> dict[tuple[int, int], Mined]:
        """What a search finds for the keys of both views, but for a view that is known: one search for both."""
        given = zip(self.views, (query_view_key, self.key), strict=True)
        wanted = {view: keys.detach() for view, keys in given if (view, k) not in known}
        ids = None if self.exclude_ids is None else self.exclude_ids.repeat(len(wanted))
        both = bank.search(torch.cat(list(wanted.values())), k, ids, self.processes)
        parts = zip(*(column.chunk(len(wanted)) for column in both), strict=True)
        return {(view, k): Mined(*part) for view, part in zip(wanted, parts, strict=True)}
