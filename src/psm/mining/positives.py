"""Positive rules: which vectors a query is pulled to, and with what weight."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from psm.config.parts import Part, PartRegistry, setting
from psm.mining.batch import MiningBatch
from psm.mining.draws import as_draws
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
    def draws(self) -> bool:
        """False if the rule never draws."""
        return True

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

    def phase(self, progress: float) -> float:
        """A number with which the rule does what it does with ``batch.progress``, and that changes as seldom as it can.

        A compiled loss is compiled anew for each.
        """
        return progress

    def equal_sums(self, one_search: bool) -> bool:
        """True if weights sum to the same in all directions; ``one_search``: all of them are given the same rows."""
        return not self.num_mined

    def without_draws(self) -> "PositiveRule":
        """The rule as analyses apply it to plain views: nothing is drawn, and one view is enough."""
        return self

    @property
    def remark(self) -> str:
        """Sentences for pages on what a step does beyond ``without_draws``."""
        return ""


POSITIVES: PartRegistry[PositiveRule] = PartRegistry("positives", "rule", PositiveRule)  # type: ignore[type-abstract]


@POSITIVES.register("view")
@dataclass(frozen=True)
class ViewPositives(PositiveRule):
    """One positive, the key, with weight w_0 = 1 (eq. 4)."""

    draws = False

    def __call__(self, batch: MiningBatch) -> Positives:
        return single(batch.key, batch.ids, mined=False)

    def phase(self, progress: float) -> float:
        return 1.0

    def describe(self) -> str:
        return "key"


@POSITIVES.register("nn")
@dataclass(frozen=True)
class NearestPositives(PositiveRule):
    """NNCLR: one positive, the bank row nearest to the key; the key itself while the bank has no usable row."""

    first_name = "mined positive"
    draws = False

    @property
    def num_mined(self) -> int:
        return 1

    def __call__(self, batch: MiningBatch) -> Positives:
        mined = batch.search("positives.rule=nn", 1)
        vectors = torch.where(mined.found[:, None], mined.vectors[:, 0].to(batch.key.dtype), batch.key.detach())
        return single(vectors, mined.ids[:, 0], mined=True)._replace(metrics=mined_metrics(mined))

    def phase(self, progress: float) -> float:
        return 1.0

    def equal_sums(self, one_search: bool) -> bool:
        return True

    def describe(self) -> str:
        return "nearest bank row"


@dataclass(frozen=True)
class SoftWeights:
    """One way to weigh mined positives (figure 5)."""

    meaning: str
    weigh: Callable[[Tensor, Tensor | int], Tensor]  # softmax weights (N, k) and how many rows count to weights (N, k)


def _survivors(weights: Tensor, k: Tensor | int) -> Tensor:
    """1 where a softmax weight is at least 1/k, else 0; equal weights survive in spite of rounding."""
    return (weights >= (1 - 8 * torch.finfo(weights.dtype).eps) / k).to(weights.dtype)


def _equal_survivors(weights: Tensor, k: Tensor | int) -> Tensor:
    survivors = _survivors(weights, k)
    return survivors / survivors.sum(1, keepdim=True)


SOFT_WEIGHTS: dict[str, SoftWeights] = {
    "V0": SoftWeights("softmax of the similarities (eq. 5)", lambda weights, k: weights),
    "V1": SoftWeights("V0 with weights under 1/k set to 0", lambda weights, k: weights * _survivors(weights, k)),
    "V2": SoftWeights("the k' survivors of V1 get 1/k' each", _equal_survivors),
    "V3": SoftWeights("the survivors of V1 get 1 each", _survivors),
    "V4": SoftWeights("all k get 1", lambda weights, k: torch.ones_like(weights)),
}


@POSITIVES.register("knn")
@dataclass(frozen=True)
class NeighborPositives(PositiveRule):
    """The key with weight 1 and its k nearest bank rows with soft weights (eq. 3, 5, 6)."""

    k: int = setting(5, "how many bank rows are mined (eq. 3)", at_least=0)
    weights: str = setting("V0", "weights of the mined rows, V0 (eq. 5) to V4 (figure 5)", choices=tuple(SOFT_WEIGHTS))
    temperature: float = setting(1.0, "what similarities are divided by in eq. 5", above=0, neutral=True)
    mix: bool = setting(
        False, "pull to mined rows mixed with the key, each by a share drawn from (0, 1) (MNN)", neutral=True
    )
    agree: bool = setting(False, "drop rows of images that the key of the query's view did not mine", neutral=True)
    min_similarity: float = setting(
        -1.0, "drop rows less similar to the key than this", at_least=-1, at_most=1, neutral=True
    )
    share: float = setting(
        1.0,
        "share of a batch's mined rows that counts: those most similar to what was searched with",
        above=0,
        at_most=1,
        neutral=True,
    )
    start: float = setting(0.0, "share of the steps before anything is mined", at_least=0, at_most=1, neutral=True)

    @property
    def draws(self) -> bool:
        return self.mix

    @property
    def num_mined(self) -> int:
        return self.k

    def __call__(self, batch: MiningBatch) -> Positives:
        if not self.k:
            return single(batch.key, batch.ids, mined=False)
        if batch.progress < self.start:
            zero = batch.key.new_zeros(())
            metrics = {"mined_similarity": zero, "mined_share": zero}
            return single(batch.key, batch.ids, mined=False)._replace(metrics=metrics)
        mined = batch.search("positives.rule=knn", self.k)
        positives = with_neighbors(batch, mined, self.weights, self.temperature, self._usable(batch, mined))
        return mix_with_key(positives, batch) if self.mix else positives

    def phase(self, progress: float) -> float:
        return float(progress >= self.start)

    def equal_sums(self, one_search: bool) -> bool:
        """V1 and V3 drop rows by the similarity to the query, which is another in each direction."""
        drops = self.agree or self.min_similarity != -1 or self.share < 1
        return not self.k or (self.weights in ("V0", "V2", "V4") and (one_search or not drops))

    def _usable(self, batch: MiningBatch, mined: Mined) -> Tensor | None:
        """Mask (N, k) of the rows that count; None: all that were found."""
        masks = []
        if self.min_similarity != -1:
            masks.append(mined.similarity >= self.min_similarity)
        if self.share < 1:
            masks.append(most_similar(mined.similarity, self.share, len(batch.directions)))
        if self.agree:
            other = batch.search("positives.agree=true", self.k, query_view=True)
            masks.append((mined.ids[:, :, None] == other.ids[:, None]).any(2))
        return torch.stack(masks).all(0) if masks else None

    @property
    def remark(self) -> str:
        mixed = ["In training the rows are mixed with the key."] if self.mix else []
        agreed = ["In training only images that both views mine count."] if self.agree else []
        shared = (
            [f"In training only the most similar {self.share:.0%} of a batch's rows count."] if self.share < 1 else []
        )
        return " ".join([*mixed, *agreed, *shared])

    def without_draws(self) -> "NeighborPositives":
        return replace(self, mix=False, agree=False, share=1.0, start=0.0)

    def describe(self) -> str:
        words = [self.weights, *(["mixed"] if self.mix else []), *(["agreed"] if self.agree else [])]
        words += [] if self.temperature == 1 else [f"t={self.temperature:g}"]
        words += [] if self.min_similarity == -1 else [f"s ≥ {self.min_similarity:g}"]
        words += [] if self.share == 1 else [f"most similar {self.share:.0%}"]
        words += [f"from {self.start:.0%} on"] if self.start else []
        return f"key + {self.k} bank rows ({', '.join(words)})"


def single(vectors: Tensor, ids: Tensor | None, mined: bool) -> Positives:
    """One positive (N, D) for each query, with weight 1."""
    ones = vectors.new_ones(len(vectors), 1)
    columns = None if ids is None else ids[:, None]
    return Positives(vectors[:, None], ones, ones.bool(), columns, first_mined=0 if mined else 1)


def with_neighbors(
    batch: MiningBatch, mined: Mined, weights: str = "V0", temperature: float = 1.0, usable: Tensor | None = None
) -> Positives:
    """The key with weight 1, and the mined rows with soft weights from the query's projection z1 (eq. 5, 6).

    Args:
        batch: the queries.
        mined: their rows.
        weights: V0 to V4.
        temperature: of eq. 5.
        usable: (N, k) mask of the rows that count; the weights are those of eq. 5 over these alone. None: all.
    """
    vectors = mined.vectors.to(batch.key.dtype)
    similarity = torch.einsum("nd,nkd->nk", normalize(batch.projection.detach(), dim=1), vectors)
    found = mined.found[:, None].expand_as(similarity)
    found = found if usable is None else found & usable
    weighed = soft_weights(similarity, weights, temperature, None if usable is None else found)
    key = single(batch.key, batch.ids, mined=False)
    ids = mined.ids if usable is None else mined.ids.masked_fill(~found, -1)
    return Positives(
        torch.cat([key.vectors, vectors], 1),
        torch.cat([key.weights, weighed.masked_fill(~found, 0.0)], 1),
        torch.cat([key.mask, found], 1),
        None if key.ids is None else torch.cat([key.ids, ids], 1),
        first_mined=1,
        metrics=mined_metrics(mined, None if usable is None else found),
    )


@torch.no_grad()
def soft_weights(
    similarity: Tensor, weights: str = "V0", temperature: float = 1.0, usable: Tensor | None = None
) -> Tensor:
    """w_1..w_k from the similarities (N, k) of the mined rows to z1: eq. 5 and its variants of figure 5.

    Args:
        similarity: (N, k).
        weights: V0 to V4.
        temperature: what similarities are divided by; the paper has none, that is 1.
        usable: (N, k) mask of the rows that count, where not all do; k is then their number.
    """
    if weights not in SOFT_WEIGHTS:
        raise ValueError(f"weights {weights!r} are unknown: choose one of {', '.join(SOFT_WEIGHTS)}")
    logits = similarity if temperature == 1 else similarity / temperature
    if usable is None:
        return SOFT_WEIGHTS[weights].weigh(logits.softmax(1), logits.shape[1])
    shares = logits.masked_fill(~usable, -torch.inf).softmax(1)
    return SOFT_WEIGHTS[weights].weigh(shares, usable.sum(1, keepdim=True)).masked_fill(~usable, 0.0)


def most_similar(similarity: Tensor, share: float, groups: int = 1) -> Tensor:
    """Mask (N, k) of the share of the similarities (N, k) that is largest, in each of so many groups of queries."""
    grouped = similarity.unflatten(0, (groups, -1)).flatten(1)
    count = max(1, round(share * grouped.shape[1]))
    least = grouped.topk(count, dim=1).values[:, -1:]
    return (grouped >= least).view_as(similarity)


def mix_with_key(positives: Positives, batch: MiningBatch) -> Positives:
    """Mined rows mixed with the key: normalize(x row + (1 - x) key), x uniform in (0, 1) for each row (MNN).

    No gradient flows through them. Weights stay those of the rows as they were mined.
    """
    key, rows = positives.vectors[:, :1], positives.vectors[:, positives.first_mined :]
    given = batch.draws or batch.generator if batch.positive_generator is None else batch.positive_generator
    draws, groups = as_draws(given), len(batch.directions)
    draws.start(len(rows) // groups, len(rows) // groups, rows.shape[1], groups)
    draws.seek(slice(0, len(rows) // groups))
    x = draws.uniform(rows.shape[1], rows.device)[..., None].to(rows.dtype)
    mixed = normalize(x * rows + (1 - x) * key.detach(), dim=2)
    return positives._replace(vectors=torch.cat([key, mixed], 1))


def mined_metrics(mined: Mined, usable: Tensor | None = None) -> dict[str, Tensor]:
    """Mean similarity of the mined rows to the key, and the share of queries for which k rows were found.

    Where only rows that are ``usable`` (N, k) count, the share is that of all rows.
    """
    if usable is not None:
        count = usable.to(mined.similarity.dtype)
        return {
            "mined_similarity": (mined.similarity * count).sum() / count.sum().clamp(min=1),
            "mined_share": count.mean(),
        }
    found = mined.found.to(mined.similarity.dtype)
    return {
        "mined_similarity": mined.similarity.mean(1).sum() / found.sum().clamp(min=1),
        "mined_share": found.mean(),
    }
