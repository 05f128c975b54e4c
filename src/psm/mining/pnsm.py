"""Negative samplers: which negatives stay in the denominator. PNSM keeps each with a probability of its own."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psm.config.parts import Part, PartRegistry, setting
from psm.mining.draws import Draws


@torch.no_grad()
def keep_probability(similarity: Tensor, positive_similarity: Tensor, a: float) -> Tensor:
    """PNSM, eq. 8: p = exp(-a (s(q, n) - s(q, key))^2).

    Args:
        similarity: (N, M) cosine similarities of queries and negatives.
        positive_similarity: (N,) of queries and their keys.
        a: how fast the probability falls off.
    """
    if similarity.ndim != 2 or positive_similarity.shape != similarity.shape[:1]:
        raise ValueError(
            f"similarity {tuple(similarity.shape)} and positive_similarity {tuple(positive_similarity.shape)} are not "
            "(N, M) and (N,): give one similarity for each query and its key."
        )
    return (similarity - positive_similarity[:, None]).square_().mul_(-a).exp_()


@torch.no_grad()
def mine_negatives(
    similarity: Tensor, positive_similarity: Tensor, a: float, generator: torch.Generator | Draws | None = None
) -> Tensor:
    """PNSM, eq. 9: one Bernoulli draw for each (query, negative) decides whether it is kept.

    Args:
        similarity: (N, M) cosine similarities of queries and negatives.
        positive_similarity: (N,) of queries and their keys.
        a: how fast the probability falls off (eq. 8).
        generator: source of the draws; ``Draws`` that stand at the queries, where processes share a batch.

    Returns:
        (N, M) mask, True where the negative is kept.
    """
    probability = keep_probability(similarity, positive_similarity, a)
    # In float32 whatever the input: half precision would round the probabilities coarsely.
    if generator is None or isinstance(generator, torch.Generator):
        draws = torch.rand(probability.shape, generator=generator, device=probability.device, dtype=torch.float32)
    else:
        draws = generator.uniform(probability.shape[1], probability.device)
    return draws < probability


@dataclass(frozen=True)
class NegativeSampler(Part, ABC):
    """Base of the samplers."""

    keeps_all = False  # True: nothing is ever dropped, and the sampler is not called
    draws_per_pair = 0  # numbers that ``keep`` takes from ``draws`` for each pair

    @abstractmethod
    def __call__(
        self, similarity: Tensor, positive_similarity: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """Mask (N, M) of the negatives that are kept, from similarities (N, M) and those of the positives (N,)."""
        raise NotImplementedError

    def keep(self, similarity: Tensor, positive_similarity: Tensor, draws: Draws) -> Tensor:
        """The same with numbers that do not depend on how many processes share the queries."""
        return self(similarity, positive_similarity, draws.generator)

    def probability(self, similarity: Tensor, positive_similarity: Tensor) -> Tensor:
        """Probability (N, M) that each negative is kept, for analyses."""
        return torch.ones_like(similarity)

    def validate(self, method: Any) -> Iterator[str]:
        if not self.keeps_all and not method.objective.uses_negatives:
            yield f"objective.name={method.objective.part_name} has no negatives for sampler.name={self.part_name}."


SAMPLERS: PartRegistry[NegativeSampler] = PartRegistry("sampler", "name", NegativeSampler)  # type: ignore[type-abstract]


@SAMPLERS.register("none")
@dataclass(frozen=True)
class KeepAll(NegativeSampler):
    """Keep every negative."""

    keeps_all = True

    def __call__(
        self, similarity: Tensor, positive_similarity: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        return torch.ones_like(similarity, dtype=torch.bool)

    def describe(self) -> str:
        return ""


@SAMPLERS.register("pnsm")
@dataclass(frozen=True)
class PNSM(NegativeSampler):
    """Mine potential negatives: keep each with the probability of eq. 8 (eq. 9)."""

    draws_per_pair = 1
    a: float = setting(0.5, "how fast the probability to keep a negative falls off (eq. 8)", at_least=0)

    def __call__(
        self, similarity: Tensor, positive_similarity: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        return mine_negatives(similarity, positive_similarity, self.a, generator)

    def keep(self, similarity: Tensor, positive_similarity: Tensor, draws: Draws) -> Tensor:
        return mine_negatives(similarity, positive_similarity, self.a, draws)

    def probability(self, similarity: Tensor, positive_similarity: Tensor) -> Tensor:
        return keep_probability(similarity, positive_similarity, self.a)

    def describe(self) -> str:
        return f"PNSM a={self.a:g}"
