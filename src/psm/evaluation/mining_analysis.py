"""What a trained run mines: its positives with their weights and its negatives with their chance to be kept."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from psm.config import merge as settings
from psm.config.schema import PretrainConfig, ViewsConfig
from psm.data import ImageDataset, ImageStore
from psm.methods.build import build_networks, composition_of
from psm.methods.registry import Composition
from psm.mining.memory_bank import MemoryBank, Mined
from psm.mining.negatives import keep_probability, of_the_bank
from psm.mining.positives import Positives, key_alone, nearest, soft_neighbors
from psm.models.siamese import SiameseNetworks
from psm.training.checkpoint import read_checkpoint
from psm.utils.errors import UserError
from psm.views.transform import Views

NEIGHBORS = 5  # shown where a method says nothing of how many
BATCH = 256  # images a forward pass


@dataclass(frozen=True)
class RunSnapshot:
    """A run as it was when a checkpoint was written."""

    epoch: float  # how often the images had been seen
    config: PretrainConfig
    composition: Composition
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


def source_of(composition: Composition) -> str:
    """Where the negatives come from in the method's own term, or in L_hard where that is the only one."""
    return composition.negatives.source if composition.loss.soft else "views"


def load_snapshot(checkpoint: Path, encoder: nn.Module | None = None) -> RunSnapshot:
    """The networks and the bank of a checkpoint, ready to mine with. ``encoder`` receives the weights of a run that
    was given a network of the user's own."""
    content = read_checkpoint(checkpoint)
    described, state = content["psm"], content["state_dict"]
    config = settings.build(PretrainConfig, described["config"])
    if config.encoder == "custom" and encoder is None:
        raise UserError(
            f"{checkpoint} holds a network of its user's own, which cannot be rebuilt from it: give that network, from "
            "Python, as encoder=."
        )
    composition, info = composition_of(config), described["encoder_info"]
    networks = build_networks(config, info["size"], encoder if config.encoder == "custom" else None)
    bank = MemoryBank(composition.bank.size, config.heads.out_dim) if composition.needs_bank else None
    try:
        networks.load_state_dict(_part(state, "networks."))
        if bank is not None:
            bank.load_state_dict(_part(state, "bank."))
    except RuntimeError as error:
        raise UserError(f"{checkpoint} does not fit its networks: {' '.join(str(error).split())}") from None
    views = Views(ViewsConfig(size=info["size"]), info["size"], info["mean"], info["std"])
    epoch = content["global_step"] / max(1, described["images"] // config.batch_size)
    return RunSnapshot(epoch, config, composition, networks.eval(), bank, views)


@torch.inference_mode()
def embed(
    moment: RunSnapshot, images: ImageStore, ids: Tensor, advance: Callable[[int], Any] = lambda count: None
) -> Embedded:
    """Queries, keys and projections of the images at ``ids``; ``advance`` is told how many more are done."""
    parts = []
    for rows in ids.split(BATCH):
        inputs = moment.views.plain(images.take(rows))
        projection = moment.networks.projector(moment.networks.encoder(inputs))
        vectors = moment.networks.predict(projection), moment.networks.keys(inputs), projection
        parts.append([normalize(vector.float(), dim=1) for vector in vectors])
        advance(len(rows))
    return Embedded(ids, *(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.inference_mode()
def mine(moment: RunSnapshot, queries: Embedded, others: Embedded) -> Mining:
    """Mine for the queries as a step of the method would, in a batch whose other images are ``others``.

    On plain views the two views of an image agree, so that each stands once among the negatives. Synthetic negatives
    (MoCHi) are of no image and left out. Where a method mines no positives, the nearest rows of its bank, or the
    nearest of ``others`` where it has none, are given with weight 0: what could be mined.
    """
    mined, positives = _positives(moment, queries, others)
    first = positives.vectors[:, 0]
    source = source_of(moment.composition)
    anchor = first if source == "queries" else queries.query
    reference = (queries.query * first).sum(1)
    ids, vectors, allowed = _candidates(moment, source, queries, others)
    similarity = anchor @ vectors.T
    mining = moment.composition.negatives
    return Mining(
        queries=queries.ids,
        positives=mined.ids,
        positive_similarity=torch.einsum("nd,nkd->nk", queries.query, mined.vectors),
        weights=_weights(moment.composition, mined, positives),
        reference=reference,
        negatives=ids,
        similarity=similarity,
        allowed=allowed,
        keep=keep_probability(similarity, reference, mining.a if mining.pnsm else 0.0),
    )


def _positives(moment: RunSnapshot, queries: Embedded, others: Embedded) -> tuple[Mined, Positives]:
    """The bank rows found for each query, and what the query is pulled to."""
    composition, bank = moment.composition, moment.bank
    if composition.mines:
        mined = bank.nearest(queries.key, composition.mined, None if composition.bank.own else queries.ids)
        if composition.positives.rule == "nearest":
            return mined, nearest(queries.key, mined)
        return mined, soft_neighbors(queries.projection, queries.key, mined, composition.positives.weighting)
    if bank is None:
        bank = MemoryBank(len(others.ids), others.key.shape[1])
        bank.push(others.key, others.ids)
    return bank.nearest(queries.key, composition.positives.k or NEIGHBORS, queries.ids), key_alone(queries.key)


def _weights(composition: Composition, mined: Mined, positives: Positives) -> Tensor:
    if not composition.mines:
        return torch.zeros_like(mined.similarity)
    weights = positives.weights if composition.positives.rule == "nearest" else positives.weights[:, 1:]
    return weights * mined.found[:, None]


def _candidates(moment: RunSnapshot, source: str, queries: Embedded, others: Embedded) -> tuple[Tensor, Tensor, Tensor]:
    """The candidates for negatives: ids (C,), vectors (C, D), and whose negatives they are (Q, C)."""
    if source == "none" or moment.composition.loss.objective != "contrastive":
        return others.ids[:0], others.key[:0], torch.zeros(len(queries.ids), 0, dtype=torch.bool)
    if source == "bank":
        rows, ids = moment.bank.filled
        own = None if moment.composition.bank.own else queries.ids
        return ids, rows, of_the_bank(queries.query, moment.bank, own).mask
    ids, vectors = others.ids[:, None], (others.query if source == "queries" else others.key)[:, None]
    if source == "positives":
        mined, positives = _positives(moment, others, others)
        ids = torch.cat([ids, mined.ids], 1) if moment.composition.mines else ids
        vectors = positives.vectors
        if moment.composition.mines and moment.composition.positives.rule == "nearest":
            ids = torch.where(mined.found[:, None], mined.ids, others.ids[:, None])
    owners = others.ids[:, None].expand_as(ids).flatten()
    ids, vectors = ids.flatten(), vectors.flatten(0, 1)
    return ids, vectors, (owners != queries.ids[:, None]) & (ids >= 0)


def same_class(labels: Tensor, queries: Tensor, ids: Tensor) -> Tensor:
    """Whether the images at ``ids``, (Q, n) or (n,) for all queries alike, are of their query's class, (Q, n)."""
    return labels[ids.clamp(min=0)] == labels[queries][:, None]


def spread(count: int, number: int) -> Tensor:
    """At most ``number`` of ``count`` places, evenly spaced from the first to the last."""
    return torch.linspace(0, count - 1, min(number, count)).long()


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
    moment = load_snapshot(checkpoint)
    others = spread(len(data.train), batch)
    others = others[~torch.isin(others, queries)]
    mining = mine(moment, embed(moment, data.train, queries), embed(moment, data.train, others))
    labels = data.train.labels

    def samples(row: int, ids: Tensor, similarity: Tensor, share: Tensor) -> list[MinedSample]:
        same = [None] * len(ids) if labels is None else (labels[ids] == labels[queries[row]]).tolist()
        columns = zip(ids.tolist(), similarity.tolist(), share.tolist(), same, strict=True)
        return [MinedSample(*column) for column in columns]

    found = []
    for row, image in enumerate(queries.tolist()):
        pulled = (mining.positives[row] >= 0) & moment.composition.mines
        mine_of = mining.positives[row], mining.positive_similarity[row], mining.weights[row]
        places = mining.allowed[row].nonzero().flatten()
        places = places[mining.similarity[row, places].argsort(descending=True)]
        places = places[spread(len(places), negatives)]
        pushed = mining.negatives[places], mining.similarity[row, places], mining.keep[row, places]
        found.append(MinedQuery(image, samples(row, *(x[pulled] for x in mine_of)), samples(row, *pushed)))
    return found


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
