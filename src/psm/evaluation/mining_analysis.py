"""What a trained run mines: its positives with their weights and its negatives with their chance to be kept."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from psm.config.schema import ResolvedPretrainConfig, ViewsConfig
from psm.config.stored import load_run_config
from psm.data import ImageDataset, ImageStore
from psm.methods.build import build_networks, method_of
from psm.methods.spec import MethodSpec
from psm.mining.batch import MiningBatch
from psm.mining.memory_bank import MemoryBank
from psm.mining.negatives import FlatCandidates, NegativeSource, NoNegatives, ViewNegatives
from psm.mining.positives import PositiveRule, Positives, ViewPositives
from psm.models.siamese import SiameseNetworks
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError
from psm.utils.indices import evenly_spaced
from psm.views.transform import Views

NEIGHBORS = 5  # shown where a method says nothing of how many
BATCH = 256  # images a forward pass


@dataclass(frozen=True)
class RunSnapshot:
    """A run as it was when a checkpoint was written."""

    epoch: float  # how often the images had been seen
    config: ResolvedPretrainConfig
    method: MethodSpec
    networks: SiameseNetworks
    bank: MemoryBank | None
    views: Views


class Embedded(NamedTuple):
    """What a moment's networks say of some images on plain views: unit-norm vectors, (N, D) each."""

    ids: Tensor  # (N,) indices of training images
    query: Tensor
    key: Tensor
    projection: Tensor


class Mining(NamedTuple):
    """What Q queries are pulled to and pushed from. Ids are indices of training images."""

    queries: Tensor  # (Q,) ids
    positives: Tensor  # (Q, k) ids, -1 where the bank held too few rows
    positive_similarity: Tensor  # (Q, k) to the query
    weights: Tensor  # (Q, k), 0 where the method does not pull to them
    reference: Tensor  # (Q,) similarity of the anchor and its first positive: where eq. 8 peaks
    negatives: Tensor  # (C,) ids of the candidates
    similarity: Tensor  # (Q, C) to the anchor
    allowed: Tensor  # (Q, C) which candidates are negatives of the query
    keep: Tensor  # (Q, C) probability that the negative is kept (eq. 8); 1 without PNSM


def load_snapshot(checkpoint: Path, encoder: nn.Module | None = None) -> RunSnapshot:
    """The networks and the bank of a checkpoint, ready to mine with. ``encoder`` receives the weights of a run that
    was given a network of the user's own."""
    content = read_checkpoint(checkpoint)
    described, state = content["psm"], content["state_dict"]
    config = load_run_config(content)
    if config.encoder == "custom" and encoder is None:
        raise UserError(
            f"{checkpoint} holds a network of its user's own, which cannot be rebuilt from it: give that network, from "
            "Python, as encoder=."
        )
    method, info = method_of(config), described["encoder_info"]
    networks = build_networks(config, method, info["size"], encoder if config.encoder == "custom" else None)
    bank = MemoryBank(method.bank.size, config.heads.out_dim) if method.needs_bank else None
    try:
        networks.load_state_dict(_part(state, "networks."))
        if bank is not None:
            bank.load_state_dict(_part(state, "bank."))
    except RuntimeError as error:
        raise UserError(f"{checkpoint} does not fit its networks: {' '.join(str(error).split())}") from None
    views = Views(ViewsConfig(size=info["size"]), info["size"], info["mean"], info["std"])
    epoch = content["global_step"] / max(1, described["images"] // config.batch_size)
    return RunSnapshot(epoch, config, method, networks.eval(), bank, views)


@torch.inference_mode()
def embed(
    snapshot: RunSnapshot, images: ImageStore, ids: Tensor, advance: Callable[[int], Any] = lambda count: None
) -> Embedded:
    """Queries, keys and projections of the images at ``ids``; ``advance`` is told how many more are done."""
    parts = []
    for rows in ids.split(BATCH):
        inputs = snapshot.views.plain(images.take(rows))
        projection = snapshot.networks.projector(snapshot.networks.encoder(inputs))
        vectors = snapshot.networks.predict(projection), snapshot.networks.embed_keys(inputs), projection
        parts.append([normalize(vector.float(), dim=1) for vector in vectors])
        advance(len(rows))
    return Embedded(ids, *(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.inference_mode()
def mine(snapshot: RunSnapshot, queries: Embedded, others: Embedded) -> Mining:
    """Mine for the queries as a step of the method would, in a batch whose other images are ``others``.

    On plain views the two views of an image agree, so each stands once among the negatives. Synthetic negatives
    (MoCHi) come from no image and are left out. Where a method mines no positives, the nearest rows of its bank, or
    the nearest of ``others`` where it has none, are given with weight 0: what could be mined.
    """
    method = snapshot.method
    rule, source = soft_parts(method)
    batch = mining_batch(snapshot, queries)
    positives = rule(batch)
    anchors, targets = source.anchors(batch, positives)
    reference = (anchors * targets[:, 0]).sum(1)
    candidates, allowed = _candidates(snapshot, rule, source, queries, others)
    similarity = anchors @ candidates.vectors.T
    mined = _mined(snapshot, batch, positives, others)
    return Mining(
        queries=queries.ids,
        positives=mined.ids,
        positive_similarity=mined.similarity,
        weights=mined.weights,
        reference=reference,
        negatives=candidates.ids,
        similarity=similarity,
        allowed=allowed,
        keep=method.sampler.probability(similarity, reference),
    )


def soft_parts(method: MethodSpec) -> tuple[PositiveRule, NegativeSource]:
    """Positives and negatives of the method's own term, or of L_hard where that is the only one, without draws."""
    if not method.loss.soft_weight:
        return ViewPositives(), ViewNegatives()
    return method.positives.without_draws(), method.negatives


def mining_batch(snapshot: RunSnapshot, images: Embedded) -> MiningBatch:
    """Images as the parts of a method see them."""
    vectors = images.query, images.key, images.projection
    return MiningBatch(*vectors, None, images.ids, snapshot.bank, allow_self=snapshot.method.bank.allow_self)


class MinedRows(NamedTuple):
    """Rows that were, or could be, mined for Q queries, (Q, k) each."""

    ids: Tensor  # -1 where the bank held too few rows
    similarity: Tensor  # to the query, 0 where there is none
    weights: Tensor  # 0 where the method does not pull to them


def _mined(snapshot: RunSnapshot, batch: MiningBatch, positives: Positives, others: Embedded) -> MinedRows:
    if snapshot.method.num_mined and positives.ids is not None:
        columns = slice(positives.first_mined, None)
        ids, vectors = positives.ids[:, columns], positives.vectors[:, columns]
        weights = positives.weights[:, columns]
    else:
        bank = snapshot.bank
        if bank is None:
            bank = MemoryBank(len(others.ids), others.key.shape[1])
            bank.enqueue(others.key, others.ids)
        found = bank.search(batch.key, snapshot.method.num_mined or NEIGHBORS, batch.ids)
        ids, vectors, weights = found.ids, found.vectors, torch.zeros_like(found.similarity)
    similarity = torch.einsum("nd,nkd->nk", batch.query, vectors)
    return MinedRows(ids, similarity.masked_fill(ids < 0, 0.0), weights.masked_fill(ids < 0, 0.0))


def _candidates(
    snapshot: RunSnapshot, rule: PositiveRule, source: NegativeSource, queries: Embedded, others: Embedded
) -> tuple[FlatCandidates, Tensor]:
    """The candidates for negatives, and whose negatives they are (Q, C)."""
    if not snapshot.method.objective.uses_negatives:
        source = NoNegatives()
    batch = mining_batch(snapshot, others)
    candidates = source(batch, rule(batch)).flat()
    allowed = (candidates.owners != queries.ids[:, None]) & (candidates.ids >= 0)
    return candidates, allowed


def same_class(labels: Tensor, queries: Tensor, ids: Tensor) -> Tensor:
    """Whether the images at ``ids``, (Q, n) or (n,) for all queries alike, are of their query's class, (Q, n)."""
    return labels[ids.clamp(min=0)] == labels[queries][:, None]


@dataclass(frozen=True)
class MinedSample:
    """One vector that a query was contrasted with."""

    image: int  # index among the training images
    similarity: float  # to the query
    share: float  # a positive's weight or a negative's probability to be kept
    same_class: bool | None  # None without labels


@dataclass(frozen=True)
class MinedQuery:
    """A query image with the positives mined for it and some negatives, hardest first."""

    image: int
    positives: list[MinedSample]
    negatives: list[MinedSample]


def mined_samples(
    checkpoint: Path, data: ImageDataset, queries: Tensor, negatives: int = 8, batch: int = 256
) -> list[MinedQuery]:
    """Mine for the training images at ``queries`` with a checkpoint's networks and bank, on plain views.

    The negatives are evenly spread over the similarities of a batch of training images.
    """
    snapshot = load_snapshot(checkpoint)
    others = data.train.sample(batch)
    others = others[~torch.isin(others, queries)]
    mining = mine(snapshot, embed(snapshot, data.train, queries), embed(snapshot, data.train, others))
    labels = data.train.labels

    def samples(row: int, ids: Tensor, similarity: Tensor, share: Tensor) -> list[MinedSample]:
        same = [None] * len(ids) if labels is None else (labels[ids] == labels[queries[row]]).tolist()
        columns = zip(ids.tolist(), similarity.tolist(), share.tolist(), same, strict=True)
        return [MinedSample(*column) for column in columns]

    found = []
    for row, image in enumerate(queries.tolist()):
        pulled = (mining.positives[row] >= 0) & (snapshot.method.num_mined > 0)
        mine_of = mining.positives[row], mining.positive_similarity[row], mining.weights[row]
        places = mining.allowed[row].nonzero().flatten()
        places = places[mining.similarity[row, places].argsort(descending=True)]
        places = places[evenly_spaced(len(places), negatives)]
        pushed = mining.negatives[places], mining.similarity[row, places], mining.keep[row, places]
        found.append(MinedQuery(image, samples(row, *(x[pulled] for x in mine_of)), samples(row, *pushed)))
    return found


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
