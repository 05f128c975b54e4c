"""Positive rules: which vectors a query is pulled to, and with what weight."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from psm.config.parts import Part, PartRegistry, setting
from psm.mining.batch import MiningBatch
from psm.mining.memory_bank import Mined


class Positives(NamedTuple):
    """P positives of each of N queries."""

    vectors: Tensor  # (N, P, D), unit norm
    weights: Tensor  # (N, P), no gradient
    mask: Tensor  # (N, P), False where there is none
    ids: Tensor | None = None  # (N, P) images that they come from, -1 where there is none; None: unknown
    first_mined: int = 0  # columns from here on come from the bank
    metrics: Mapping[str, Tensor] = MappingProxyType({})  # scalars on the device, no gradient


@dataclass(frozen=True)
class PositiveRule(Part, ABC):
    """Base of the positive rules: call with a batch to get its positives."""

    first_name = "key"  # the first positive, as pages call it

    @property
    def num_mined(self) -> int:
        """How many bank rows are mined for a query."""
        return 0

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that come with the positives."""
        return ("mined_similarity", "mined_share") if self.num_mined else ()

    @abstractmethod
    def __call__(self, batch: MiningBatch) -> Positives:
        raise NotImplementedError


POSITIVES: PartRegistry[PositiveRule] = PartRegistry("positives", "rule", PositiveRule)  # type: ignore[type-abstract]


@POSITIVES.register("view")
@dataclass(frozen=True)
class ViewPositives(PositiveRule):
    """One positive, the key, with weight w_0 = 1 (eq. 4)."""

    def __call__(self, batch: MiningBatch) -> Positives:
        return single(batch.key, batch.ids, mined=False)

    def describe(self) -> str:
        return "key"


@POSITIVES.register("nn")
@dataclass(frozen=True)
class NearestPositives(PositiveRule):
    """NNCLR: one positive, the bank row nearest to the key; the key itself while the bank has no usable row."""

    first_name = "mined positive"

    @property
    def num_mined(self) -> int:
        return 1

    def __call__(self, batch: MiningBatch) -> Positives:
        mined = batch.require_bank("positives.rule=nn").search(batch.key.detach(), 1, batch.exclude_ids)
        vectors = torch.where(mined.found[:, None], mined.vectors[:, 0].to(batch.key.dtype), batch.key.detach())
        return single(vectors, mined.ids[:, 0], mined=True)._replace(metrics=mined_metrics(mined))

    def describe(self) -> str:
        return "nearest bank row"


@dataclass(frozen=True)
class SoftWeights:
    """One way to weigh mined positives (figure 5)."""

    meaning: str
    weigh: Callable[[Tensor], Tensor]  # softmax weights (N, k) to weights (N, k)


def _survivors(weights: Tensor) -> Tensor:
    """1 where a softmax weight is at least 1/k, else 0; equal weights survive in spite of rounding."""
    return (weights >= (1 - 8 * torch.finfo(weights.dtype).eps) / weights.shape[1]).to(weights.dtype)


def _equal_survivors(weights: Tensor) -> Tensor:
    survivors = _survivors(weights)
    return survivors / survivors.sum(1, keepdim=True)


SOFT_WEIGHTS: dict[str, SoftWeights] = {
    "V0": SoftWeights("softmax of the similarities (eq. 5)", lambda weights: weights),
    "V1": SoftWeights("V0 with weights under 1/k set to 0", lambda weights: weights * _survivors(weights)),
    "V2": SoftWeights("the k' survivors of V1 get 1/k' each", _equal_survivors),
    "V3": SoftWeights("the survivors of V1 get 1 each", _survivors),
    "V4": SoftWeights("all k get 1", torch.ones_like),
}


@POSITIVES.register("knn")
@dataclass(frozen=True)
class NeighborPositives(PositiveRule):
    """The key with weight 1 and its k nearest bank rows with soft weights (eq. 3, 5, 6)."""

    k: int = setting(5, "how many bank rows are mined (eq. 3)", at_least=0)
    weights: str = setting("V0", "weights of the mined rows, V0 (eq. 5) to V4 (figure 5)", choices=tuple(SOFT_WEIGHTS))

    @property
    def num_mined(self) -> int:
        return self.k

    def __call__(self, batch: MiningBatch) -> Positives:
        if not self.k:
            return single(batch.key, batch.ids, mined=False)
        mined = batch.require_bank("positives.rule=knn").search(batch.key.detach(), self.k, batch.exclude_ids)
        return with_neighbors(batch, mined, self.weights)

    def describe(self) -> str:
        return f"key + {self.k} bank rows ({self.weights})"


def single(vectors: Tensor, ids: Tensor | None, mined: bool) -> Positives:
    """One positive (N, D) for each query, with weight 1."""
    ones = vectors.new_ones(len(vectors), 1)
    columns = None if ids is None else ids[:, None]
    return Positives(vectors[:, None], ones, ones.bool(), columns, first_mined=0 if mined else 1)


def with_neighbors(batch: MiningBatch, mined: Mined, weights: str = "V0") -> Positives:
    """The key with weight 1, and the mined rows with soft weights from the query's projection z1 (eq. 5, 6)."""
    vectors = mined.vectors.to(batch.key.dtype)
    similarity = torch.einsum("nd,nkd->nk", normalize(batch.projection.detach(), dim=1), vectors)
    found = mined.found[:, None].expand_as(similarity)
    key = single(batch.key, batch.ids, mined=False)
    return Positives(
        torch.cat([key.vectors, vectors], 1),
        torch.cat([key.weights, soft_weights(similarity, weights).masked_fill(~found, 0.0)], 1),
        torch.cat([key.mask, found], 1),
        None if key.ids is None else torch.cat([key.ids, mined.ids], 1),
        first_mined=1,
        metrics=mined_metrics(mined),
    )


@torch.no_grad()
def soft_weights(similarity: Tensor, weights: str = "V0") -> Tensor:
    """w_1..w_k from the similarities (N, k) of the mined rows to z1: eq. 5 and its variants of figure 5."""
    if weights not in SOFT_WEIGHTS:
        raise ValueError(f"weights {weights!r} are unknown: choose one of {', '.join(SOFT_WEIGHTS)}")
    return SOFT_WEIGHTS[weights].weigh(similarity.softmax(1))


def mined_metrics(mined: Mined) -> dict[str, Tensor]:
    """Mean similarity of the mined rows to the key, and the share of queries for which k rows were found."""
    found = mined.found.to(mined.similarity.dtype)
    return {
        "mined_similarity": mined.similarity.mean(1).sum() / found.sum().clamp(min=1),
        "mined_share": found.mean(),
    }
