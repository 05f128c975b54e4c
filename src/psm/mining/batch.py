"""What the parts of a method may look at: one direction of a step, or several as one batch."""

from typing import NamedTuple

import torch
from torch import Tensor

from psm.mining.draws import Draws
from psm.mining.memory_bank import MemoryBank, Mined
from psm.mining.processes import ONE_PROCESS, Processes

ALL_VIEWS = -1  # stands for the view of a key that all views share


class MiningBatch(NamedTuple):
    """Queries from one view and keys from the other; vectors (N, D) of unit norm.

    Several directions as one batch follow each other: N is then their number times the number of images. The parts of
    this package alone are given such a batch, on accelerators and to compilers.
    """

    query: Tensor
    key: Tensor
    projection: Tensor  # online projection of the query's view: weighs the mined positives (eq. 5)
    query_view_key: Tensor | None = None  # the key network's projection of the query's view: a negative (eq. 4)
    ids: Tensor | None = None  # (N,) ids of the images
    bank: MemoryBank | None = None  # only read
    generator: torch.Generator | None = None  # decides the draws of PNSM and MoCHi, unless ``draws`` are given
    allow_self: bool = False  # let a query meet stale copies of its own image in the bank
    positive_generator: torch.Generator | Draws | None = None  # decides the draws of the positives; None: ``generator``
    progress: float = 1.0  # share of the run's steps that are done
    directions: tuple[tuple[int, int], ...] = ((0, 1),)  # views of query and key
    searches: dict[tuple[int, int], Mined] | None = None  # by view and k, shared by the directions of a step
    draws: Draws | None = None  # decide the same, whichever process draws for which queries
    processes: Processes = ONE_PROCESS  # that share the anchors of the batch
    mining_key: Tensor | None = None  # of each image, what is searched with in all directions; None: each view's key

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
        """The k bank rows nearest to the keys, own images excluded; searched once a step for the keys of each view, or
        once for all with ``mining_key`` where it is given (``bank.keys=mean``).

        Args:
            part: who asks, for the error where there is no bank.
            k: how many rows.
            query_view: search for the keys of the query's view instead.
        """
        bank = self.require_bank(part)
        if self.mining_key is not None:
            return self._search_once(bank, self.mining_key, k)
        vectors = self.query_view_key if query_view else self.key
        if vectors is None:
            raise ValueError(f"{part} searches for the keys of the query's view: pass query_view_key.")
        views = [pair[0 if query_view else 1] for pair in self.directions]
        keys = dict(zip(views, vectors.detach().chunk(len(views)), strict=True))
        known = {} if self.searches is None else self.searches
        wanted = [view for view in keys if (view, k) not in known]
        if wanted:
            ids = None if self.exclude_ids is None else self.exclude_ids[: len(wanted) * len(keys[wanted[0]])]
            searched = vectors.detach() if wanted == views else torch.cat([keys[view] for view in wanted])
            found = bank.search(searched, k, ids, self.processes)
            parts = zip(*(column.chunk(len(wanted)) for column in found), strict=True)
            known.update({(view, k): Mined(*part) for view, part in zip(wanted, parts, strict=True)})
            if wanted == views:
                return found
        if len(views) == 1:
            return known[views[0], k]
        return Mined(*(torch.cat(column) for column in zip(*(known[view, k] for view in views), strict=True)))

    def _search_once(self, bank: MemoryBank, keys: Tensor, k: int) -> Mined:
        """The rows nearest to one key of each image, the same for every direction."""
        known = {} if self.searches is None else self.searches
        if (ALL_VIEWS, k) not in known:
            ids = None if self.exclude_ids is None else self.exclude_ids[: len(keys)]
            known[ALL_VIEWS, k] = bank.search(keys.detach(), k, ids, self.processes)
        found, groups = known[ALL_VIEWS, k], len(self.directions)
        return found if groups == 1 else Mined(*(torch.cat([column] * groups) for column in found))
