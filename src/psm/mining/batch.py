"""What the parts of a method may look at: one direction of a step."""

from typing import NamedTuple

import torch
from torch import Tensor

from psm.mining.memory_bank import MemoryBank


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

    @property
    def exclude_ids(self) -> Tensor | None:
        """Ids (N,) of the images whose bank rows a query may not meet."""
        return None if self.allow_self else self.ids

    def require_bank(self, part: str) -> MemoryBank:
        """The bank, or an error that names the part that needs it."""
        if self.bank is None:
            raise ValueError(f"{part} mines from a memory bank: pass bank=MemoryBank(size, width).")
        return self.bank
