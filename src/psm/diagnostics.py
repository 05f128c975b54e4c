"""What a trained run mines: its positives with their weights and its negatives with their chance to be kept."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from psm import settings
from psm.assembly import build_networks, composition_of
from psm.augment import Views
from psm.bank import Bank
from psm.checkpoints import read_checkpoint
from psm.config import PretrainConfig, ViewsConfig
from psm.data import DataSet
from psm.negatives import keep_probability
from psm.positives import soft_weights


@dataclass(frozen=True)
class MinedSample:
    """One vector that a query was contrasted with."""

    picture: int  # index among the training pictures
    similarity: float  # to the query
    share: float  # a positive's weight or a negative's probability to be kept
    same_class: bool | None  # None without labels


@dataclass(frozen=True)
class MinedQuery:
    """A query picture with the positives mined for it and some negatives, hardest first."""

    picture: int
    positives: list[MinedSample]
    negatives: list[MinedSample]


@torch.inference_mode()
def mined_samples(
    checkpoint: Path, data: DataSet, queries: Tensor, negatives: int = 8, batch: int = 256
) -> list[MinedQuery]:
    """Mine for the training pictures at ``queries`` with a checkpoint's networks and bank, on plain views.

    The negatives are other training pictures, evenly spread over the similarities of a batch that the queries are in.
    """
    content = read_checkpoint(checkpoint)
    config = settings.build(PretrainConfig, content["psm"]["config"])
    composition = composition_of(config)
    loading = content["psm"]["loading"]
    networks = build_networks(config, loading["size"])
    state = content["state_dict"]
    networks.load_state_dict(_part(state, "networks."))
    networks.eval()
    views = Views(ViewsConfig(size=loading["size"]), data.size, loading["mean"], loading["std"])
    spread = torch.linspace(0, len(data.train) - 1, min(batch, len(data.train))).long()
    others = spread[~torch.isin(spread, queries)]
    pictures = views.plain(data.train.take(torch.cat([queries, others])))
    keys = normalize(networks.keys(pictures), dim=1)
    projection = networks.projector(networks.encoder(pictures[: len(queries)]))
    query = normalize(networks.predict(projection), dim=1)
    projection = normalize(projection, dim=1)
    labels = data.train.labels

    def sample(of: Tensor, picture: Tensor, similarity: Tensor, share: Tensor) -> MinedSample:
        same = None if labels is None else bool(labels[of] == labels[picture])
        return MinedSample(int(picture), float(similarity), float(share), same)

    positives: list[list[MinedSample]] = [[] for _ in queries]
    if composition.mines:
        bank = Bank(composition.bank.size, config.heads.out)
        bank.load_state_dict(_part(state, "bank."))
        mined = bank.nearest(keys[: len(queries)], composition.mined, None if composition.bank.own else queries)
        weights = soft_weights(torch.einsum("nd,nkd->nk", projection, mined.vectors), composition.positives.weighting)
        similarity = torch.einsum("nd,nkd->nk", query, mined.vectors)
        for row, found in enumerate(mined.found):
            if found:
                columns = zip(mined.ids[row], similarity[row], weights[row], strict=True)
                positives[row] = [sample(queries[row], *column) for column in columns]
    similarity = query @ keys[len(queries) :].T
    own = (query * keys[: len(queries)]).sum(1)
    kept = keep_probability(similarity, own, composition.negatives.a if composition.negatives.pnsm else 0.0)
    order = similarity.argsort(1, descending=True)
    places = torch.linspace(0, len(others) - 1, min(negatives, len(others))).long()
    return [
        MinedQuery(
            int(queries[row]),
            positives[row],
            [sample(queries[row], others[i], similarity[row, i], kept[row, i]) for i in order[row, places]],
        )
        for row in range(len(queries))
    ]


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
