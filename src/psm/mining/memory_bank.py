"""The bank M: a first-in first-out memory of unit-norm target projections and the images they came from."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from psm import ops
from psm.mining.bank_shard import BankShard, shard_state
from psm.mining.faiss_index import InvertedLists
from psm.mining.processes import ONE_PROCESS, Processes, take_rows
from psm.ops import TOPK_BLOCK
from psm.utils.devices import matrix_elements, not_compiled, prefers_few_kernels, to_device

INDEXES = ("exact", "faiss")
SEARCH_ELEMENTS = 2**22  # similarities held at once while searching: 16 MiB in float32, whatever batch and bank
DEVICE_SEARCH_SHARE = 1 / 16  # of an accelerator's memory that they take instead: fewer kernels
QUERIES = 256  # that a CPU searches for at once: more of them, beside fewer rows, leave more to be sorted
SPARE = 4  # rows that an approximate search asks for beyond k, for those that are of the query's own image


class Mined(NamedTuple):
    """What was found for each query: NN(z)_1..k of eq. 3, best first."""

    vectors: Tensor  # (N, k, D), zero where nothing usable was found
    similarity: Tensor  # (N, k) to the vector that was searched with
    ids: Tensor  # (N, k) ids of the images, -1 where nothing usable was found
    found: Tensor  # (N,) whether k usable rows exist; where not, the mined part is empty


class MemoryBank(nn.Module):
    """Holds ``size`` rows. Search, then enqueue: nothing of a batch is in the bank while that batch is mined.

    Where the next row goes and how many are filled are plain numbers that follow from what was enqueued, so that
    neither waits for the device. Everything is part of the state dict.

    The search is exact. With ``index="faiss"`` it is approximate once the bank is full, on a CPU: the centroids of its
    inverted lists are found anew whenever all rows have been replaced.

    ``share_out`` leaves each of several processes its rows; searches then give what one bank would give.
    """

    rows: Tensor
    ids: Tensor

    def __init__(self, size: int, width: int, index: str = "exact"):
        super().__init__()
        if size < 1:
            raise ValueError(f"a bank needs at least one row, not {size}")
        if index not in INDEXES:
            raise ValueError(f"index {index!r} is unknown: choose one of {', '.join(INDEXES)}")
        self.size = size
        self.pointer = 0
        self.fill = 0
        self.full = False  # beside ``fill``: a compiled step is compiled anew where this changes, not with every row
        self.register_buffer("rows", torch.zeros(size, width))
        self.register_buffer("ids", torch.full((size,), -1, dtype=torch.long))
        self.index = InvertedLists(size, width) if index == "faiss" else None
        self.shard: BankShard | None = None  # the rows of this process, where the bank is shared out
        self._similarity = torch.empty(0)  # written by torch's searches: fresh memory would cost as much as the product

    def share_out(self, processes: Processes) -> None:
        """Keep this process's rows alone. Every process must then search and enqueue alike, with all vectors."""
        if self.index is not None:
            raise ValueError("a bank with an index cannot be shared out: make it with index='exact'")
        if processes.count == 1 or self.shard is not None:
            return
        if self.size < processes.count:
            raise ValueError(f"a bank of {self.size} rows cannot be shared by {processes.count} processes")
        self.shard = BankShard(processes)
        self.rows, self.ids = (self.shard.take(x).clone() for x in (self.rows, self.ids))

    def whole_state(self) -> dict[str, Tensor]:
        """Rows and ids of the whole bank, on the CPU; all processes have to ask."""
        return {
            name: value if self.shard is None else self.shard.whole(value, self.size)
            for name, value in (("rows", self.rows), ("ids", self.ids))
        }

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.pointer, self.fill])

    def set_extra_state(self, state: Tensor) -> None:
        self.pointer, self.fill = state.tolist()
        self.full = self.fill == self.size

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *given: Any) -> None:
        if self.index is None:  # rows can be looked at without the index that they were mined by
            state_dict.pop(f"{prefix}index._extra_state", None)
        if self.shard is not None:
            shard_state(state_dict, prefix, self.shard, self.size)
        super()._load_from_state_dict(state_dict, prefix, *given)

    def _apply(self, function: Callable, recurse: bool = True) -> "MemoryBank":
        """Rows stay in single precision at least in a network of half precision."""
        rows = self.rows
        super()._apply(function, recurse)
        if self.rows.dtype in (torch.bfloat16, torch.float16):
            self.rows = rows.to(self.rows.device)  # not by way of half precision, which would round them
        return self

    @torch.no_grad()
    def enqueue(self, rows: Tensor, ids: Tensor) -> None:
        """Enqueue rows (N, D), normalized on entry, with the ids (N,) of their images; the oldest rows give way."""
        self._check_width(rows)
        if ids.shape != rows.shape[:1]:
            raise ValueError(f"{len(rows)} rows need an id each, not ids of the shape {tuple(ids.shape)}")
        dropped = max(0, len(rows) - self.size)
        rows, ids = normalize(rows[dropped:].to(self.rows.dtype), dim=1), ids[dropped:]
        place = "cpu" if self.shard is not None else self.rows.device
        indices = (torch.arange(len(rows), device=place) + self.pointer + dropped) % self.size
        if self.shard is not None:
            own, indices = (to_device(x, self.rows.device) for x in self.shard.places(indices))
            rows, ids, number = rows[own], ids[own], len(rows)
        else:
            number = len(rows)
        self.rows.index_copy_(0, indices, rows)
        self.ids.index_copy_(0, indices, ids.to(self.ids.dtype))
        first = self.pointer + dropped
        last = first + number
        self.pointer, self.fill = last % self.size, min(self.fill + dropped + number, self.size)
        self.full = self.fill == self.size
        if self.index is None:
            return
        if last >= self.size:  # the last of the earlier rows are gone
            self.index.fit(self.rows)
        else:
            self.index.replace(first, self.rows[first:last])

    @property
    def filled(self) -> tuple[Tensor, Tensor]:
        """The rows in use (M, D) and their ids (M,); of this process, where the bank is shared out.

        Compiled: all rows, whose number does not change; ``in_use`` says which of them count.
        """
        if torch.compiler.is_compiling():
            return self.rows, self.ids
        count = self.fill if self.shard is None else self.shard.length(self.fill)
        return self.rows[:count], self.ids[:count]

    @property
    def in_use(self) -> Tensor | None:
        """Mask (M,) of the rows of ``filled`` that count; None: all of them do."""
        return self.ids >= 0 if torch.compiler.is_compiling() and not self.full else None

    @property
    def fill_share(self) -> Tensor:
        """Share () of the rows in use, on the device."""
        if torch.compiler.is_compiling():
            return torch.ones((), device=self.rows.device) if self.full else (self.ids >= 0).float().mean()
        return torch.full((), self.fill / self.size, dtype=torch.float32, device=self.rows.device)

    @torch.no_grad()
    def search(
        self, vectors: Tensor, k: int, exclude_ids: Tensor | None = None, processes: Processes = ONE_PROCESS
    ) -> Mined:
        """The k rows most similar (cosine) to each vector: eq. 3.

        The exact search runs over slices of the bank, so that its memory does not grow with the bank.

        Args:
            vectors: (N, D), what is searched with.
            k: how many rows.
            exclude_ids: (N,) ids of the images whose rows are skipped: those of the queries' own images.
            processes: that have the same vectors and the same bank; each searches for its own rows of the vectors.
        """
        self._check_width(vectors)
        if exclude_ids is not None and exclude_ids.shape != vectors.shape[:1]:
            raise ValueError(f"{len(vectors)} vectors need an id each, not {len(exclude_ids)}")
        vectors = normalize(vectors.to(self.rows.dtype), dim=1)
        if self.shard is not None:
            best, indices = self._exact(vectors, k, exclude_ids)
            best, indices, ids = self.shard.merge(best, indices, self.ids[indices])
            return _mined(best, self.shard.rows_at(self.rows, indices), ids)
        mine = processes.rows(len(vectors))
        own = take_rows(vectors, mine), k, None if exclude_ids is None else take_rows(exclude_ids, mine)
        if self.index is not None and self.index.ready and k:
            best, indices = self._approximate(self.index, *own)
        else:
            best, indices = self._exact(*own)
        if mine != slice(0, len(vectors)):
            best, indices = _gather_found(best, indices, processes)
        return _mined(best, self.rows[indices], self.ids[indices])

    def _check_width(self, vectors: Tensor) -> None:
        if vectors.ndim != 2 or vectors.shape[1] != self.rows.shape[1]:
            raise ValueError(
                f"vectors have the shape {tuple(vectors.shape)}, and the bank's rows the width {self.rows.shape[1]}: "
                "give (N, D) of that width, or make the bank with width=D"
            )

    def _exact(self, vectors: Tensor, k: int, exclude_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """The k largest similarities (N, k) of unit vectors, -inf where there are too few rows, and their indices."""
        count = len(vectors)
        if vectors.device.type == "cpu" and count > QUERIES:
            slices = [slice(start, start + QUERIES) for start in range(0, count, QUERIES)]
            parts = [self._exact(vectors[s], k, None if exclude_ids is None else exclude_ids[s]) for s in slices]
            return torch.cat([best for best, _ in parts]), torch.cat([indices for _, indices in parts])
        rows = self.filled[0]
        few_kernels = prefers_few_kernels(vectors.device)
        parts = [] if few_kernels and 0 < k <= len(rows) else [_nothing_found(vectors, k)]
        on_cpu = vectors.device.type == "cpu"
        elements = SEARCH_ELEMENTS if on_cpu else matrix_elements(vectors.device, DEVICE_SEARCH_SHARE)
        step = max(TOPK_BLOCK, elements // max(count, 1) // TOPK_BLOCK * TOPK_BLOCK)
        for start in range(0, len(rows) if k else 0, step):
            part = slice(start, start + step)
            values, where = self._topk(vectors, part, min(k, len(rows[part])), exclude_ids)
            parts.append((values, where + start if start else where))
            last = start + step >= len(rows)
            if len(parts) > 1 and (last or not few_kernels):
                values, where = (torch.cat(column, 1) for column in zip(*parts, strict=True))
                best, order = values.topk(k, dim=1)
                parts = [(best, where.gather(1, order))]
        return parts[0]

    @not_compiled
    def _approximate(
        self, index: InvertedLists, vectors: Tensor, k: int, exclude_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same by the index; exactly for vectors for which it finds too few rows.

        Where rows of a query's own image take most of what is found, four times as many are asked for first.
        """
        best, indices = self._by_index(index, vectors, k, exclude_ids, k + SPARE)
        for exact in (False, True):
            short = (best[:, -1] == -torch.inf).nonzero()[:, 0]
            if len(short):
                some, exclude = vectors[short], None if exclude_ids is None else exclude_ids[short]
                best[short], indices[short] = (
                    self._exact(some, k, exclude) if exact else self._by_index(index, some, k, exclude, 4 * (k + SPARE))
                )
        return best, indices

    def _by_index(
        self, index: InvertedLists, vectors: Tensor, k: int, exclude_ids: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """The k best of ``count`` rows that the index finds, -inf where too few of them are usable."""
        indices = index.search(self.rows, vectors, count)
        usable = indices >= 0
        indices = indices.clamp(min=0)
        if exclude_ids is not None:
            usable &= self.ids[indices] != exclude_ids[:, None]
        similarity = torch.einsum("nd,npd->np", vectors, self.rows[indices]).masked_fill_(~usable, -torch.inf)
        best, order = similarity.topk(k, dim=1)
        return best, indices.gather(1, order)

    def _topk(self, vectors: Tensor, part: slice, k: int, exclude_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """The k largest similarities (N, k) among some rows, and their indices."""
        rows, ids = (x[part] for x in self.filled)
        compared = None if exclude_ids is None else ids
        if torch.compiler.is_compiling():
            in_use = None if self.in_use is None else self.in_use[part]
            return ops.topk_similarity(vectors, rows, k, compared, exclude_ids, in_use=in_use)
        buffer = partial(self._buffer, like=vectors)
        return ops.topk_similarity(vectors, rows, k, compared, exclude_ids, buffer)

    def _buffer(self, count: int, like: Tensor) -> Tensor:
        """A buffer of at least ``count`` similarities, overwritten by the next search."""
        held = self._similarity
        if held.numel() < count or held.dtype != like.dtype or held.device != like.device:
            with torch.inference_mode(False):
                self._similarity = torch.empty(count, dtype=like.dtype, device=like.device)
        return self._similarity


def _mined(best: Tensor, vectors: Tensor, ids: Tensor) -> Mined:
    """What was found: similarities (N, k), -inf where there are too few rows, vectors (N, k, D) and ids (N, k)."""
    found = (best > -torch.inf).all(1)
    missing = ~found[:, None]
    return Mined(vectors * found[:, None, None], best.masked_fill(missing, 0.0), ids.masked_fill(missing, -1), found)


def _nothing_found(vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Similarities (N, k) of -inf, and indices of no meaning."""
    indices = torch.zeros((len(vectors), k), dtype=torch.long, device=vectors.device)
    return vectors.new_full((len(vectors), k), -torch.inf), indices


def _gather_found(best: Tensor, indices: Tensor, processes: Processes) -> tuple[Tensor, Tensor]:
    """Similarities (N, k) and indices (N, k) of all processes, in one exchange: float64 holds both exactly."""
    joined = processes.gather(torch.cat([best.double(), indices.double()], 1))
    values, places = joined.tensor_split(2, dim=1)
    return values.to(best.dtype), places.long()
