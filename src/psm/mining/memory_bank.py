"""The bank M: a first-in first-out memory of unit-norm target projections and the images they came from."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from psm.config.schema import INDEXES
from psm.kernels import similarity as products
from psm.mining.faiss_index import InvertedLists

SEARCH_ELEMENTS = 2**22  # similarities held at once while searching: 16 MiB in float32, whatever batch and bank
QUERIES = 256  # that a CPU searches for at once: more of them, beside fewer rows, leave more to be sorted
BLOCK = 128
SPARE = 4  # rows that an approximate search asks for beyond k, for those that are of the query's own image


class Mined(NamedTuple):
    """What was found for each query: NN(z)_1..k of eq. 3, best first."""

    vectors: Tensor  # (N, k, D), zero where nothing usable was found
    similarity: Tensor  # (N, k) to the vector that was searched with
    ids: Tensor  # (N, k) ids of the images, -1 where nothing usable was found
    found: Tensor  # (N,) whether k usable rows exist; where not, the mined part is empty


class MemoryBank(nn.Module):
    """Holds ``size`` rows; query it, then push: nothing of a batch is in the bank while that batch is mined.

    Where the next row goes and how many are filled are plain numbers that follow from what was pushed, so that neither
    a push nor a search waits for the device. Everything is part of the state dict.

    The search is exact. With ``index="faiss"`` it is approximate once the bank is full, on a CPU: the centroids of its
    inverted lists are found anew whenever all rows have been replaced.
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
        self.register_buffer("rows", torch.zeros(size, width))
        self.register_buffer("ids", torch.full((size,), -1, dtype=torch.long))
        self.index = InvertedLists(size, width) if index == "faiss" else None
        self._similarity = torch.empty(0)  # written by torch's searches: fresh memory would cost as much as the product

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.pointer, self.fill])

    def set_extra_state(self, state: Tensor) -> None:
        self.pointer, self.fill = state.tolist()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *given: Any) -> None:
        if self.index is None:  # rows can be looked at without the index that they were mined by
            state_dict.pop(f"{prefix}index._extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *given)

    def _apply(self, function: Callable, recurse: bool = True) -> "MemoryBank":
        """Rows stay in single precision at least in a network of half precision."""
        rows = self.rows
        super()._apply(function, recurse)
        if self.rows.dtype in (torch.bfloat16, torch.float16):
            self.rows = rows.to(self.rows.device)  # not by way of half precision, which would round them
        return self

    @torch.no_grad()
    def push(self, rows: Tensor, ids: Tensor) -> None:
        """Enqueue rows (N, D), normalized on entry, with the ids (N,) of their images; the oldest rows give way."""
        dropped = max(0, len(rows) - self.size)
        rows, ids = normalize(rows[dropped:].to(self.rows.dtype), dim=1), ids[dropped:]
        places = (torch.arange(len(rows), device=self.rows.device) + self.pointer + dropped) % self.size
        self.rows.index_copy_(0, places, rows)
        self.ids.index_copy_(0, places, ids.to(self.ids.dtype))
        first = self.pointer + dropped
        last = first + len(rows)
        self.pointer, self.fill = last % self.size, min(self.fill + dropped + len(rows), self.size)
        if self.index is None:
            return
        if last >= self.size:  # the last of the earlier rows are gone
            self.index.fit(self.rows)
        else:
            self.index.replace(first, self.rows[first:last])

    @property
    def filled(self) -> tuple[Tensor, Tensor]:
        """The rows in use (M, D) and their ids (M,)."""
        return self.rows[: self.fill], self.ids[: self.fill]

    @torch.no_grad()
    def nearest(self, vectors: Tensor, k: int, own: Tensor | None = None) -> Mined:
        """The k rows most similar (cosine) to each vector (N, D): eq. 3.

        Rows with the id of the query's own image, given as ``own`` (N,), are passed over. The exact search runs over
        slices of the bank, so that its memory does not grow with the bank.
        """
        if own is not None and own.shape != vectors.shape[:1]:
            raise ValueError(f"{len(vectors)} vectors need an id each, not {len(own)}")
        vectors = normalize(vectors.to(self.rows.dtype), dim=1)
        if self.index is not None and self.index.ready and k:
            best, places = self._approximate(vectors, k, own)
        else:
            best, places = self._exact(vectors, k, own)
        found = (best > -torch.inf).all(1)
        kept = found[:, None].expand_as(best)
        return Mined(
            vectors=self.rows[places] * kept[..., None],
            similarity=best.masked_fill(~kept, 0.0),
            ids=self.ids[places].masked_fill(~kept, -1),
            found=found,
        )

    def _exact(self, vectors: Tensor, k: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
        """The k largest similarities (N, k) of unit vectors, -inf where there are too few rows, and their places."""
        count = len(vectors)
        if vectors.device.type == "cpu" and count > QUERIES:
            whose = (None,) * -(-count // QUERIES) if own is None else own.split(QUERIES)
            parts = [self._exact(some, k, of) for some, of in zip(vectors.split(QUERIES), whose, strict=True)]
            return tuple(map(torch.cat, zip(*parts, strict=True)))
        best = vectors.new_full((count, k), -torch.inf)
        places = torch.zeros((count, k), dtype=torch.long, device=vectors.device)
        rows, ids = self.filled
        step = max(BLOCK, SEARCH_ELEMENTS // max(count, 1) // BLOCK * BLOCK)
        for start in range(0, self.fill if k else 0, step):
            part = slice(start, start + step)
            values, where = self._largest(vectors, rows[part], min(k, len(rows[part])), ids[part], own)
            values, where = torch.cat([best, values], 1), torch.cat([places, where + start], 1)
            best, order = values.topk(k, dim=1)
            places = where.gather(1, order)
        return best, places

    def _approximate(self, vectors: Tensor, k: int, own: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same by the index; exactly for vectors for which it finds too few rows.

        Where a query's own image takes most of the places, in a bank that holds many copies of each, four times as
        many are asked for before that.
        """

        def search(vectors: Tensor, own: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
            places = self.index.search(self.rows, vectors, count)
            usable = places >= 0
            places = places.clamp(min=0)
            if own is not None:
                usable &= self.ids[places] != own[:, None]
            similarity = torch.einsum("nd,npd->np", vectors, self.rows[places]).masked_fill_(~usable, -torch.inf)
            best, order = similarity.topk(k, dim=1)
            return best, places.gather(1, order)

        best, places = search(vectors, own, k + SPARE)
        for again in (lambda *of: search(*of, 4 * (k + SPARE)), lambda some, whose: self._exact(some, k, whose)):
            short = (best[:, -1] == -torch.inf).nonzero()[:, 0]
            if len(short):
                best[short], places[short] = again(vectors[short], None if own is None else own[short])
        return best, places

    def _largest(self, vectors: Tensor, rows: Tensor, k: int, ids: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
        """The k largest similarities (N, k) among these rows, and their places."""
        if products.searchable(vectors, rows, k, *(() if own is None else (ids, own))):
            return products.largest(vectors, rows, k, ids, own)
        count = len(vectors) * len(rows)
        similarity = self._memory(count, vectors)[:count].view(len(vectors), len(rows))
        torch.mm(vectors, rows.T, out=similarity)
        if own is not None:
            mask_same_image_(similarity, ids, own, -torch.inf)
        return largest(similarity, k)

    def _memory(self, count: int, like: Tensor) -> Tensor:
        """Room for so many similarities at least, overwritten by the next search."""
        held = self._similarity
        if held.numel() < count or held.dtype != like.dtype or held.device != like.device:
            with torch.inference_mode(False):
                self._similarity = torch.empty(count, dtype=like.dtype, device=like.device)
        return self._similarity


def mask_same_image_(pairs: Tensor, ids: Tensor, own: Tensor, value: float | bool) -> Tensor:
    """Set, in a matrix (N, M) of queries and rows, the pairs of one image to a value: where ``ids`` meet ``own``.

    On a CPU only the few columns with an id of the batch are touched: comparing all pairs takes longer there than the
    search itself. Elsewhere that would wait for the device, and comparing is cheap.
    """
    if pairs.device.type != "cpu" or not len(own):
        return pairs.masked_fill_(ids == own[:, None], value)
    ordered = own.sort().values
    place = torch.searchsorted(ordered, ids).clamp(max=len(ordered) - 1)
    columns = (ordered[place] == ids).nonzero()[:, 0]
    row, column = (ids[columns] == own[:, None]).nonzero(as_tuple=True)
    pairs[row, columns[column]] = value
    return pairs


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``values.topk(k, dim=1)``, exactly, by blocks: the k largest lie in the k blocks with the largest maxima."""
    count, width = values.shape
    blocks = width // BLOCK
    if blocks <= 2 * k or width % BLOCK:
        return values.topk(k, dim=1)
    blocked = values.view(count, blocks, BLOCK)
    chosen = blocked.amax(2).topk(k, dim=1).indices
    candidates = blocked.gather(1, chosen[..., None].expand(-1, -1, BLOCK)).flatten(1)
    largest, where = candidates.topk(k, dim=1)
    return largest, chosen.gather(1, where // BLOCK) * BLOCK + where % BLOCK
