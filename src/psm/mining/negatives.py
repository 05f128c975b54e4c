"""Negative sources: which vectors a query is pushed from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psm.config.parts import Part, PartRegistry, setting
from psm.mining.batch import MiningBatch
from psm.mining.draws import Draws
from psm.mining.memory_bank import MemoryBank
from psm.mining.mochi import mix_negatives
from psm.mining.positives import Positives
from psm.mining.processes import take_rows
from psm.ops import mask_same_image_


class Negatives(NamedTuple):
    """M candidates of each of A anchors."""

    similarity: Tensor  # (A, M) to the anchor as given: logits, if that was divided by the temperature
    allowed: Tensor | None  # (A, M) which of them are its negatives; None: all

    @property
    def mask(self) -> Tensor:
        """``allowed`` as a tensor."""
        return torch.ones_like(self.similarity, dtype=torch.bool) if self.allowed is None else self.allowed


class Anchors(NamedTuple):
    """A slice of the batch's anchors."""

    rows: slice  # their places in the batch, in each of its directions
    vectors: Tensor  # (A, D)
    scaled: Tensor  # (A, D), vectors / temperature
    temperature: float
    draws: Draws | None = None  # that stand at these anchors
    groups: int = 1  # directions that they come from, one after another


class FlatCandidates(NamedTuple):
    """All candidates of a batch as analyses read them."""

    vectors: Tensor  # (C, D)
    ids: Tensor  # (C,) images that they come from, -1 where there is none
    owners: Tensor  # (C,) images that may not have them as negatives, -1: all may


@dataclass(frozen=True)
class Candidates:
    """Base of what a source gives: candidates for all anchors of a batch."""

    @property
    def count(self) -> int:
        """How many similarities an anchor has."""
        raise NotImplementedError

    @property
    def columns(self) -> int:
        """How many columns ``logits`` has."""
        return self.count

    @property
    def draws_per_anchor(self) -> int:
        """Numbers that ``logits`` draws for each anchor."""
        return 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What gradients flow to beside the anchors; handed back to ``logits``."""
        return ()

    def logits(self, anchors: Anchors, *tensors: Tensor) -> Negatives:
        """Logits (A, M) of the candidates for a slice of anchors."""
        raise NotImplementedError

    def constant_rows(self) -> Tensor | None:
        """Rows (M, D) without gradient that are negatives of every anchor alike, if that is all there is."""
        return None

    def flat(self) -> FlatCandidates:
        """For analyses."""
        raise NotImplementedError


@dataclass(frozen=True)
class BatchCandidates(Candidates):
    """C candidates of each of the batch's N images; an anchor's negatives are those of the other images."""

    vectors: Tensor  # (N, C, D)
    mask: Tensor  # (N, C), False where there is none
    ids: Tensor | None = None  # (N, C) images that they come from
    owners: Tensor | None = None  # (N,) ids of the batch's images
    groups: int = 1  # directions that the batch consists of; an anchor meets the candidates of its own
    targets: int = 0  # the first so many of an image's candidates are what its anchor is pulled to; 0: none is

    @property
    def count(self) -> int:
        return self.vectors.shape[0] // self.groups * self.vectors.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.vectors,)

    def logits(self, anchors: Anchors, *tensors: Tensor) -> Negatives:
        (vectors,) = tensors
        if self.groups == 1:
            similarity = anchors.scaled @ vectors.flatten(0, 1).T
        else:
            similarity = group_products(anchors.scaled, vectors, self.groups).flatten(0, 1)
        mask = self.mask.unflatten(0, (self.groups, 1, -1))
        allowed = mask.expand(-1, len(anchors.vectors) // self.groups, -1, -1).clone()
        allowed.diagonal(anchors.rows.start, 1, 2).fill_(False)
        return Negatives(similarity, allowed.flatten(0, 1).flatten(1))

    def flat(self) -> FlatCandidates:
        if self.ids is None or self.owners is None:
            raise ValueError("candidates can be listed only if the batch has ids.")
        ids = self.ids.masked_fill(~self.mask, -1)
        return FlatCandidates(self.vectors.flatten(0, 1), ids.flatten(), self.owners[:, None].expand_as(ids).flatten())


def group_products(anchors: Tensor, vectors: Tensor, groups: int) -> Tensor:
    """Products (G, A, N C) of the anchors (G A, D) of each group with its candidates, the vectors (G N, C, D)."""
    anchors, vectors = (x.unflatten(0, (groups, -1)) for x in (anchors, vectors))
    return anchors @ vectors.flatten(1, 2).mT


@dataclass(frozen=True)
class BankCandidates(Candidates):
    """The bank's rows; those of a query's own image are no negatives of it if ``exclude_ids`` (N,) are given."""

    bank: MemoryBank
    exclude_ids: Tensor | None

    @property
    def count(self) -> int:
        return len(self.bank.filled[0])

    def logits(self, anchors: Anchors, *tensors: Tensor) -> Negatives:
        return self._similarity(anchors, anchors.scaled)

    def constant_rows(self) -> Tensor | None:
        return self.bank.filled[0] if self.exclude_ids is None and self.bank.in_use is None else None

    def flat(self) -> FlatCandidates:
        rows, ids = self.bank.filled
        return FlatCandidates(rows, ids, torch.full_like(ids, -1) if self.exclude_ids is None else ids)

    def _similarity(self, anchors: Anchors, vectors: Tensor) -> Negatives:
        """Of the vectors of some anchors, scaled or not."""
        exclude = None if self.exclude_ids is None else take_rows(self.exclude_ids, anchors.rows, anchors.groups)
        return bank_negatives(vectors, self.bank, exclude)


@dataclass(frozen=True)
class MochiCandidates(BankCandidates):
    """The bank's rows and synthetic negatives made of each query's hardest."""

    source: "MochiNegatives"
    draws: Draws | torch.Generator | None

    @property
    def columns(self) -> int:
        return self.count and self.count + self.source.num_mix + self.source.num_mix_query

    @property
    def draws_per_anchor(self) -> int:
        return self.count and 3 * self.source.num_mix + 2 * self.source.num_mix_query

    def logits(self, anchors: Anchors, *tensors: Tensor) -> Negatives:
        plain = self._similarity(anchors, anchors.vectors)
        source = self.source
        similarity, mask = mix_negatives(
            anchors.vectors, self.bank, plain.similarity, plain.mask,
            source.num_hardest(self.count), source.num_mix, source.num_mix_query, anchors.draws or self.draws,
        )  # fmt: skip
        return Negatives(similarity / anchors.temperature, mask)

    def constant_rows(self) -> Tensor | None:
        return None


def bank_negatives(vectors: Tensor, bank: MemoryBank, exclude_ids: Tensor | None = None) -> Negatives:
    """The bank's filled rows as negatives of vectors (N, D), but for rows with the ids (N,) given."""
    rows, ids = bank.filled
    negatives = Negatives(vectors @ rows.to(vectors.dtype).T, None)
    if bank.in_use is not None:
        negatives = negatives._replace(allowed=bank.in_use.expand_as(negatives.similarity).clone())
    if exclude_ids is None:
        return negatives
    return negatives._replace(allowed=mask_same_image_(negatives.mask, ids, exclude_ids, False))


@dataclass(frozen=True)
class NegativeSource(Part, ABC):
    """Base of the negative sources: call with a batch and its positives to get the candidates."""

    needs_bank = False  # True: the candidates come from the memory bank
    anchor_name = "query"  # what their similarity is measured to, as pages call it
    has_synthetic = False  # True: some negatives come from no image

    @abstractmethod
    def __call__(self, batch: MiningBatch, positives: Positives) -> Candidates:
        raise NotImplementedError

    def anchors(self, batch: MiningBatch, positives: Positives) -> tuple[Tensor, Tensor]:
        """Anchors (N, D) and what each is pulled to (N, P, D): queries and their positives."""
        return batch.query, positives.vectors

    def validate(self, method: Any) -> Iterator[str]:
        if not method.objective.uses_negatives:
            yield (
                f"objective.name={method.objective.part_name} has no negatives: leave negatives.source at none, "
                f"not {self.part_name}."
            )


NEGATIVES: PartRegistry[NegativeSource] = PartRegistry("negatives", "source", NegativeSource)  # type: ignore[type-abstract]


@NEGATIVES.register("views")
@dataclass(frozen=True)
class ViewNegatives(NegativeSource):
    """SimCLR, L_hard: the keys of both views of the other images, 2(N-1) of them (eq. 4)."""

    def __call__(self, batch: MiningBatch, positives: Positives) -> Candidates:
        keys = [batch.key] if batch.query_view_key is None else [batch.key, batch.query_view_key]
        own_key = positives.first_mined == positives.vectors.shape[1] == 1
        return batch_candidates(torch.stack(keys, 1), batch, targets=int(own_key))

    def describe(self) -> str:
        return "other images, both views"


@NEGATIVES.register("positives")
@dataclass(frozen=True)
class PositiveNegatives(NegativeSource):
    """SNCLR, L_soft: the key and the mined positives of the other images, (N-1)(k+1) of them (eq. 6)."""

    def __call__(self, batch: MiningBatch, positives: Positives) -> Candidates:
        groups, targets = len(batch.directions), positives.vectors.shape[1]
        return BatchCandidates(positives.vectors, positives.mask, positives.ids, batch.ids, groups, targets)

    def describe(self) -> str:
        return "other images' positives"


@NEGATIVES.register("queries")
@dataclass(frozen=True)
class QueryNegatives(NegativeSource):
    """NNCLR: the softmax runs over the predictions of the batch for each positive."""

    anchor_name = "positive"

    def __call__(self, batch: MiningBatch, positives: Positives) -> Candidates:
        return batch_candidates(batch.query[:, None], batch, targets=1)

    def anchors(self, batch: MiningBatch, positives: Positives) -> tuple[Tensor, Tensor]:
        return positives.vectors[:, 0], batch.query[:, None]

    def validate(self, method: Any) -> Iterator[str]:
        yield from super().validate(method)
        if method.positives.num_mined > 1:
            yield (
                "negatives.source=queries compares one positive with all queries, not several: give "
                "positives.rule=nn or view."
            )

    def describe(self) -> str:
        return "other images' predictions"


@NEGATIVES.register("bank")
@dataclass(frozen=True)
class BankNegatives(NegativeSource):
    """MoCo: the rows of the memory bank."""

    needs_bank = True

    def __call__(self, batch: MiningBatch, positives: Positives) -> Candidates:
        return BankCandidates(batch.require_bank("negatives.source=bank"), batch.exclude_ids)

    def describe(self) -> str:
        return "memory bank"


@NEGATIVES.register("mochi")
@dataclass(frozen=True)
class MochiNegatives(NegativeSource):
    """MoCHi: the rows of the memory bank and synthetic ones mixed from each query's hardest rows."""

    needs_bank = True
    has_synthetic = True
    num_hard: int = setting(1024, "how many of a query's hardest rows are mixed", at_least=1)
    hard_share: float = setting(
        0.0,
        "the same as a share of the bank's rows (its authors: 1/64); 0: num_hard",
        at_least=0,
        at_most=1,
        neutral=True,
    )
    num_mix: int = setting(1024, "synthetic negatives from pairs of those rows", at_least=0)
    num_mix_query: int = setting(128, "synthetic negatives from those rows and the query", at_least=0)

    def __call__(self, batch: MiningBatch, positives: Positives) -> Candidates:
        bank = batch.require_bank("negatives.source=mochi")
        if not self.num_mix + self.num_mix_query:
            return BankCandidates(bank, batch.exclude_ids)
        return MochiCandidates(bank, batch.exclude_ids, self, batch.generator)

    def num_hardest(self, rows: int) -> int:
        """How many of a bank of so many rows are a query's hardest."""
        return max(1, round(self.hard_share * rows)) if self.hard_share else self.num_hard

    def describe(self) -> str:
        return f"memory bank + {self.num_mix + self.num_mix_query} mixed"


@NEGATIVES.register("none")
@dataclass(frozen=True)
class NoNegatives(NegativeSource):
    """No negatives: for objectives that have none."""

    def __call__(self, batch: MiningBatch, positives: Positives) -> Candidates:
        return BatchCandidates(positives.vectors[:, :0], positives.mask[:, :0], _no_ids(batch), batch.ids)

    def validate(self, method: Any) -> Iterator[str]:
        if method.objective.uses_negatives and method.loss.soft_weight:
            yield (
                "negatives.source=none leaves a contrastive objective nothing to contrast with: choose another "
                "source, or objective.name=byol."
            )

    def describe(self) -> str:
        return "none"


def batch_candidates(vectors: Tensor, batch: MiningBatch, targets: int = 0) -> BatchCandidates:
    """Candidates (N, C, D) that each come from their image, whose anchor is pulled to the first ``targets`` of them."""
    mask = torch.ones(vectors.shape[:2], dtype=torch.bool, device=vectors.device)
    ids = None if batch.ids is None else batch.ids[:, None].expand(mask.shape)
    return BatchCandidates(vectors, mask, ids, batch.ids, len(batch.directions), targets)


def _no_ids(batch: MiningBatch) -> Tensor | None:
    return None if batch.ids is None else batch.ids[:, None][:, :0]
