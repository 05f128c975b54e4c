"""A memory bank that is shared out: each process holds and searches every ``count``-th row."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psm.mining.processes import Processes

GATHERED_ROWS = 2**16  # of a process that are exchanged at a time when the bank is put together


@dataclass(frozen=True)
class BankShard:
    """The rows of this process: row ``i`` of the bank is row ``i // count`` of the process ``i % count``.

    Consecutive rows lie on different processes, so that a batch is written, and a bank that fills is searched, by all.
    """

    processes: Processes

    @property
    def count(self) -> int:
        return self.processes.count

    @property
    def rank(self) -> int:
        return self.processes.rank

    def length(self, rows: int) -> int:
        """How many of the bank's first ``rows`` rows this process holds."""
        return len(range(self.rank, rows, self.count))

    def take(self, rows: Tensor) -> Tensor:
        """This process's rows of a whole bank (M, ...)."""
        return rows[self.rank :: self.count]

    def places(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these rows of the bank (N,) this process holds, as positions in the list, and where it holds them.

        On the CPU, where the number of hits is known at once.
        """
        own = (indices % self.count == self.rank).nonzero()[:, 0]
        return own, indices[own] // self.count

    def merge(self, best: Tensor, indices: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The k most similar rows of the whole bank for each query.

        Args:
            best: (N, k) similarities that this process found for all queries, -inf where it has too few rows.
            indices: (N, k) where it holds them.
            ids: (N, k) ids of their images.

        Returns:
            Similarities (N, k), indices in the whole bank and ids, alike on every process.
        """
        k = best.shape[1]
        places = indices * self.count + self.rank
        # One exchange: float64 holds all three exactly.
        local = torch.cat([best.double(), places.double(), ids.double()], 1)
        every = self.processes.gather(local).unflatten(0, (self.count, -1))
        values, places, ids = (x.movedim(0, 1).flatten(1) for x in every.split(k, dim=2))
        found, order = values.topk(k, dim=1)
        return found.to(best.dtype), places.gather(1, order).long(), ids.gather(1, order).long()

    def rows_at(self, rows: Tensor, indices: Tensor) -> Tensor:
        """Rows (..., D) of the whole bank, each from the process that holds it; ``rows`` are this process's."""
        own = (indices % self.count == self.rank)[..., None]
        held = rows[(indices // self.count).clamp(max=len(rows) - 1)]
        return self.processes.sum(torch.where(own, held, 0.0))  # one term of each sum is not zero

    def whole(self, rows: Tensor, size: int) -> Tensor:
        """The whole bank (size, ...) on the CPU, on every process. For checkpoints."""
        length = -(-size // self.count)
        whole = torch.empty((length * self.count, *rows.shape[1:]), dtype=rows.dtype)
        padded = rows if len(rows) == length else torch.cat([rows, rows[:1]])
        for start in range(0, length, GATHERED_ROWS):
            part = padded[start : start + GATHERED_ROWS]
            every = self.processes.gather(part).unflatten(0, (self.count, -1)).movedim(0, 1).flatten(0, 1)
            whole[start * self.count : start * self.count + len(every)] = every.cpu()
        return whole[:size]


def shard_state(state: dict[str, Any], prefix: str, shard: BankShard, size: int) -> None:
    """Replace a whole bank in a state dict by this process's rows."""
    for name in ("rows", "ids"):
        whole = state.get(prefix + name)
        if whole is not None and len(whole) == size:
            state[prefix + name] = shard.take(whole).clone()
